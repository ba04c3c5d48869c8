// Device memory: addresses that the host cannot touch, and the allocator over them.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "clocks.h"

namespace simgpu {

constexpr int kPoison = 0xFF;
constexpr uint64_t kGranule = 512;
constexpr int kVirgin = -1; // free memory that no stream has a claim on

// One memory file. The addresses that tensors have lie in a mapping that allows nothing; the simulator reads and writes
// through a second mapping of the same size, at a fixed distance.
class AddressSpace {
  public:
    void open(uint64_t size_bytes) {
        size_bytes_ = size_bytes;
        const int file = memfd_create("simulated_gpu", MFD_CLOEXEC);
        TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size_bytes)) == 0, "simulated GPU: memfd failed");
        void* both = mmap(nullptr, 2 * size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        TORCH_CHECK(both != MAP_FAILED, "simulated GPU: no address space for ", 2 * size_bytes, " bytes");
        base_ = reinterpret_cast<uint64_t>(both);
        for (const uint64_t half : {uint64_t(0), size_bytes}) {
            const int protection = half == 0 ? PROT_NONE : PROT_READ | PROT_WRITE;
            void* at = reinterpret_cast<void*>(base_ + half);
            void* got = mmap(at, size_bytes, protection, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0);
            TORCH_CHECK(got == at, "simulated GPU: mapping failed");
        }
        ::close(file);
    }

    uint64_t base() const { return base_; }

    bool contains(const void* device) const {
        const auto at = reinterpret_cast<uint64_t>(device);
        return base_ != 0 && at >= base_ && at < base_ + size_bytes_;
    }

    void* shadow(const void* device) const {
        return device == nullptr ? nullptr : reinterpret_cast<void*>(reinterpret_cast<uint64_t>(device) + size_bytes_);
    }

    void* shadow(uint64_t device) const { return reinterpret_cast<void*>(device + size_bytes_); }

  private:
    uint64_t base_ = 0;
    uint64_t size_bytes_ = 0;
};

struct MemoryStatistics {
    uint64_t allocated_bytes = 0, allocated_peak_bytes = 0, reserved_bytes = 0, reserved_peak_bytes = 0;
    uint64_t allocations = 0, frees = 0, retries = 0, out_of_memory = 0;
};

struct Block {
    uint64_t size_bytes;
    int stream; // that it was allocated on; when free, only that stream gets it again
    bool free;
    std::set<int> recorded; // other streams, from record_stream
};

// One device's memory, best fit with exact sizes. Freed memory stays with its stream, as in CUDA's caching allocator.
class DeviceMemory {
  public:
    DeviceMemory(uint64_t base, uint64_t size_bytes) : base_(base), size_bytes_(size_bytes), touched_(base) {
        put(base, {size_bytes, kVirgin, true, {}});
    }

    // 0 when there is no room.
    uint64_t allocate(uint64_t wanted_bytes, int stream) {
        const uint64_t size = std::max(kGranule, (wanted_bytes + kGranule - 1) / kGranule * kGranule);
        for (const int pool : {stream, kVirgin}) {
            auto& sizes = free_[pool];
            auto fit = sizes.lower_bound({size, 0});
            if (fit == sizes.end())
                continue;
            if (pool == kVirgin && statistics.reserved_bytes + size > limit_bytes())
                return 0;
            const uint64_t at = fit->second;
            Block block = take(at);
            if (block.size_bytes > size)
                put(at + size, {block.size_bytes - size, pool, true, {}});
            blocks_[at] = {size, stream, false, {}};
            if (pool == kVirgin)
                statistics.reserved_bytes += size;
            statistics.reserved_peak_bytes = std::max(statistics.reserved_peak_bytes, statistics.reserved_bytes);
            statistics.allocated_bytes += size;
            statistics.allocated_peak_bytes = std::max(statistics.allocated_peak_bytes, statistics.allocated_bytes);
            ++statistics.allocations;
            return at;
        }
        return 0;
    }

    // The block's memory goes back to its stream's pool; neighbours that are free are joined.
    void release(uint64_t at) {
        Block block = blocks_.at(at);
        statistics.allocated_bytes -= block.size_bytes;
        ++statistics.frees;
        blocks_.erase(at);
        join_neighbours(at, {block.size_bytes, block.stream, true, {}});
    }

    // All free memory belongs to nobody again: what cudaFree does, after the device was synchronised.
    void return_cached() {
        std::vector<uint64_t> cached;
        for (const auto& [at, block] : blocks_)
            if (block.free && block.stream != kVirgin)
                cached.push_back(at);
        for (const uint64_t at : cached) {
            if (blocks_.find(at) == blocks_.end())
                continue;
            Block block = take(at);
            statistics.reserved_bytes -= block.size_bytes;
            join_neighbours(at, {block.size_bytes, kVirgin, true, {}});
        }
    }

    Block* find(uint64_t at) {
        const auto it = blocks_.find(at);
        return it == blocks_.end() || it->second.free ? nullptr : &it->second;
    }

    // Where memory begins that was never handed out, and so was never poisoned.
    uint64_t touch(uint64_t end) { return std::exchange(touched_, std::max(touched_, end)); }

    uint64_t size_bytes() const { return size_bytes_; }

    uint64_t limit_bytes() const { return static_cast<uint64_t>(static_cast<double>(size_bytes_) * fraction); }

    MemoryStatistics statistics;
    double fraction = 1.0;

  private:
    void put(uint64_t at, Block block) {
        free_[block.stream].insert({block.size_bytes, at});
        blocks_[at] = std::move(block);
    }

    Block take(uint64_t at) {
        Block block = blocks_.at(at);
        free_[block.stream].erase({block.size_bytes, at});
        blocks_.erase(at);
        return block;
    }

    void join_neighbours(uint64_t at, Block block) {
        auto next = blocks_.lower_bound(at);
        if (next != blocks_.end() && next->second.free && next->second.stream == block.stream)
            block.size_bytes += take(next->first).size_bytes;
        auto before = blocks_.lower_bound(at);
        if (before != blocks_.begin()) {
            --before;
            if (before->second.free && before->second.stream == block.stream) {
                at = before->first;
                block.size_bytes += take(at).size_bytes;
            }
        }
        put(at, std::move(block));
    }

    uint64_t base_;
    uint64_t size_bytes_;
    uint64_t touched_;
    std::map<uint64_t, Block> blocks_;
    std::map<int, std::set<std::pair<uint64_t, uint64_t>>> free_; // (size, address) by stream
};

} // namespace simgpu
