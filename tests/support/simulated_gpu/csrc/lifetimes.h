// When device memory is handed out and when it may be used again, which depends on what the streams still have to do.
#pragma once

#include "streams.h"

namespace simgpu {

inline void* Simulator::allocate(c10::DeviceIndex device, uint64_t size_bytes, int stream) {
    Guard guard(*this);
    DeviceMemory& memory = memory_.at(device);
    release_deferred();
    uint64_t at = memory.allocate(size_bytes, stream);
    if (at == 0) {
        ++memory.statistics.retries;
        synchronize_all(device);
        release_deferred();
        memory.return_cached();
        at = memory.allocate(size_bytes, stream);
    }
    if (at == 0) {
        ++memory.statistics.out_of_memory;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated GPU out of memory. Tried to allocate ", size_bytes,
                         " bytes. GPU ", int(device), " has ", memory.size_bytes(), " bytes, of which ",
                         memory.limit_bytes(), " may be used; ", memory.statistics.allocated_bytes,
                         " bytes are allocated, ", memory.statistics.reserved_bytes, " bytes are reserved");
    }
    const uint64_t end = at + memory.find(at)->size_bytes;
    const uint64_t fresh = std::max(at, memory.touch(end));
    if (fresh < end)
        std::memset(space.shadow(fresh), kPoison, end - fresh);
    return reinterpret_cast<void*>(at);
}

inline void Simulator::free(void* pointer) {
    if (pointer == nullptr)
        return;
    Guard guard(*this);
    const auto at = reinterpret_cast<uint64_t>(pointer);
    Deferred deferred{at, {}};
    for (const int stream : memory_.at(device_of(pointer)).find(at)->recorded)
        deferred.versions.push_back(record_on(*streams_.at(stream)));
    deferred_.push_back(std::move(deferred));
    release_deferred();
}

inline void Simulator::release_deferred() {
    for (size_t i = 0; i < deferred_.size();) {
        bool done = true;
        for (const VersionRef& version : deferred_[i].versions)
            done = done && version->done;
        if (!done) {
            ++i;
            continue;
        }
        const uint64_t at = deferred_[i].at;
        deferred_.erase(deferred_.begin() + static_cast<std::ptrdiff_t>(i));
        release_block(at);
    }
}

inline void Simulator::release_block(uint64_t at) {
    DeviceMemory& memory = memory_.at(device_of(reinterpret_cast<void*>(at)));
    const Block& block = *memory.find(at);
    const Range range{at, at + block.size_bytes};
    accesses_.forget(range, {block.recorded.begin(), block.recorded.end()});
    // Only where it cannot be seen by what was given to a stream before. A queued user in another stream is the hazard
    // that the access map reports, and only when the memory is used again.
    if (!queued(range, -1)) {
        std::memset(space.shadow(at), kPoison, block.size_bytes);
    } else if (!queued(range, block.stream)) {
        Stream& owner = *streams_.at(block.stream);
        Task poison{Task::Kind::work, &*names_.insert("free").first, nullptr, {}, {}, {}, 0, {}};
        poison.run = [this, range] { std::memset(space.shadow(range.begin), kPoison, range.end - range.begin); };
        poison.uses = {{range, true}};
        owner.queue.push_back(std::move(poison));
    }
    memory.release(at);
}

inline void Simulator::record_stream(void* pointer, int stream) {
    if (pointer == nullptr)
        return;
    Guard guard(*this);
    Block* block = memory_.at(device_of(pointer)).find(reinterpret_cast<uint64_t>(pointer));
    if (block != nullptr && block->stream != stream)
        block->recorded.insert(stream);
}

inline void Simulator::empty_cache(c10::DeviceIndex device) {
    Guard guard(*this);
    synchronize_all(device);
    release_deferred();
    memory_.at(device).return_cached();
}

} // namespace simgpu
