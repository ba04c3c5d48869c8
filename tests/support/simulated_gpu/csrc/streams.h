// Streams as queues, events as places in them, and the settings: the part of the simulator that knows no operators.
//
// Computing happens at once in the thread that calls; asynchronous copies are queued. In the mode "late" a queue moves
// only when somebody waits for it, which is the latest moment that CUDA allows too; in "random" a thread of its own
// takes one task after the other, each after a delay; in "eager" nothing is ever queued.
#pragma once

#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_set>

#include "memory.h"
#include "pinned.h"
#include "tasks.h"

namespace simgpu {

class Simulator {
  public:
    // Holds the simulator's lock. Host memory that finished tasks had kept is let go after the lock, since giving it
    // back may need Python's.
    class Guard {
      public:
        explicit Guard(Simulator& simulator) : simulator_(simulator) { simulator_.mutex_.lock(); }
        ~Guard() {
            std::vector<c10::Storage> garbage;
            garbage.swap(simulator_.garbage_);
            simulator_.mutex_.unlock();
        }
        Guard(const Guard&) = delete;
        Guard& operator=(const Guard&) = delete;

      private:
        Simulator& simulator_;
    };

    // Never destroyed: tensors may outlive every static object.
    static Simulator& get() {
        static auto* simulator = new Simulator();
        return *simulator;
    }

    void open(int devices, uint64_t memory_bytes) {
        memory_bytes = (memory_bytes + 4095) / 4096 * 4096;
        space.open(devices * memory_bytes);
        for (int device = 0; device < devices; ++device) {
            memory_.emplace_back(space.base() + device * memory_bytes, memory_bytes);
            add_stream(static_cast<c10::DeviceIndex>(device));
        }
        devices_ = devices;
    }

    int devices() const { return devices_; }

    void set(const Settings& settings) {
        Guard guard(*this);
        for (auto& stream : streams_)
            drain(*stream);
        settings_ = settings;
        random_.seed(settings.seed);
        if (settings.mode == Mode::random && !worker_started_) {
            worker_started_ = true;
            std::thread([this] { work(); }).detach();
        }
    }

    Settings settings() {
        Guard guard(*this);
        return settings_;
    }

    // Forgets what is queued, who touched what, and errors that nobody was told.
    void reset() {
        Guard guard(*this);
        for (auto& stream : streams_) {
            for (Task& task : stream->queue) {
                if (task.version && task.kind == Task::Kind::record)
                    task.version->done = true;
                discard(task);
            }
            stream->queue.clear();
        }
        accesses_.clear();
        error_ = nullptr;
        release_deferred();
    }

    std::vector<std::pair<int, std::string>> pending() {
        Guard guard(*this);
        std::vector<std::pair<int, std::string>> names;
        for (auto& stream : streams_)
            for (const Task& task : stream->queue)
                if (task.kind == Task::Kind::work)
                    names.emplace_back(stream->index, *task.name);
        return names;
    }

    size_t noted_ranges() {
        Guard guard(*this);
        return accesses_.size();
    }

    const std::string* intern(const std::string& name) {
        Guard guard(*this);
        return &*names_.insert(name).first;
    }

    // ---- streams and events

    int new_stream(c10::DeviceIndex device) {
        Guard guard(*this);
        return add_stream(device);
    }

    int stream_count() {
        Guard guard(*this);
        return static_cast<int>(streams_.size());
    }

    // An operation that computes: all that its stream was given is done first.
    void launch(int stream, const std::string* name, const std::vector<Use>& uses) {
        Guard guard(*this);
        raise_error();
        drain(*streams_.at(stream));
        note(*streams_.at(stream), name, uses);
    }

    // An operation that the stream does later. `now` also waits for it, in the host.
    void enqueue(int stream, Task task, bool now) {
        Guard guard(*this);
        raise_error();
        Stream& to = *streams_.at(stream);
        note(to, task.name, task.uses);
        const bool eager = settings_.mode == Mode::eager;
        if (now || eager) {
            drain(to);
            task.run();
            discard(task);
            if (now)
                join(host_, to.clock);
            return;
        }
        poison_or_watch(task);
        to.queue.push_back(std::move(task));
        wake_.notify_all();
    }

    VersionRef record(int stream) {
        Guard guard(*this);
        return record_on(*streams_.at(stream));
    }

    void wait(int stream, const VersionRef& version) {
        Guard guard(*this);
        Stream& waiting = *streams_.at(stream);
        join(waiting.clock, version->clock);
        if (!version->done && version->stream != stream)
            waiting.queue.push_back({Task::Kind::wait, nullptr, version, {}, {}, {}, 0, {}});
    }

    void synchronize(const VersionRef& version) {
        Guard guard(*this);
        finish(*version);
        join(host_, version->clock);
        accesses_.prune(host_);
        raise_error();
    }

    void synchronize_stream(int stream) {
        Guard guard(*this);
        drain(*streams_.at(stream));
        join(host_, streams_[stream]->clock);
        accesses_.prune(host_);
        raise_error();
    }

    void synchronize_device(c10::DeviceIndex device) {
        Guard guard(*this);
        synchronize_all(device);
        raise_error();
    }

    // A question that is asked again and again is answered with yes in the end, as on a real device.
    bool query(const VersionRef& version) {
        Guard guard(*this);
        if (!version->done) {
            step(*streams_.at(version->stream));
            return false;
        }
        join(host_, version->clock);
        return true;
    }

    bool query_stream(int stream) {
        Guard guard(*this);
        Stream& asked = *streams_.at(stream);
        if (!asked.queue.empty()) {
            step(asked);
            return false;
        }
        join(host_, asked.clock);
        return true;
    }

    // ---- memory, in lifetimes.h

    void* allocate(c10::DeviceIndex device, uint64_t size_bytes, int stream);
    void free(void* pointer);
    void record_stream(void* pointer, int stream);
    void empty_cache(c10::DeviceIndex device);

    // With the lock held for as long as the result is used.
    DeviceMemory& memory(c10::DeviceIndex device) { return memory_.at(device); }

    c10::DeviceIndex device_of(const void* pointer) const {
        TORCH_CHECK(space.contains(pointer), "not an address of the simulated GPU");
        return static_cast<c10::DeviceIndex>((reinterpret_cast<uint64_t>(pointer) - space.base()) /
                                             memory_[0].size_bytes());
    }

    AddressSpace space;
    PinnedMemory pinned;

  private:
    int add_stream(c10::DeviceIndex device) {
        const int index = static_cast<int>(streams_.size());
        streams_.push_back(std::make_unique<Stream>(Stream{index, device, {}, host_}));
        return index;
    }

    void raise_error() {
        if (error_)
            std::rethrow_exception(std::exchange(error_, nullptr));
    }

    void note(Stream& stream, const std::string* name, const std::vector<Use>& uses) {
        join(stream.clock, host_);
        if (stream.clock.size() <= static_cast<size_t>(stream.index))
            stream.clock.resize(stream.index + 1, 0);
        const uint64_t sequence = ++stream.clock[stream.index];
        if (!settings_.check)
            return;
        for (const Use& use : uses)
            accesses_.check(use, {stream.index, sequence, name, std::nullopt}, stream.clock);
        for (const Use& use : uses)
            accesses_.note(use, {stream.index, sequence, name, use.owner});
        accesses_.prune(host_);
    }

    static bool meet(const Range& a, const Range& b) { return a.begin < b.end && b.begin < a.end; }

    // Whether a queued task of a stream other than `but` uses the range, or writes it.
    bool queued(const Range& range, int but, bool writes_only = false) const {
        for (const auto& each : streams_)
            if (each->index != but)
                for (const Task& task : each->queue)
                    for (const Use& use : task.uses)
                        if ((use.write || !writes_only) && meet(use.range, range))
                            return true;
        return false;
    }

    // Host bytes that a task writes are made unlike anything expected; those that it reads are remembered.
    void poison_or_watch(Task& task) {
        bool writes_host = false;
        for (const Use& use : task.uses) {
            if (!use.owner)
                continue;
            if (queued(use.range, -1, !use.write)) {
                task.watched = nullptr; // an earlier task changes these bytes, or still needs them
                return;
            }
            writes_host = writes_host || (use.write && use.exact);
        }
        if (writes_host)
            for (const Use& use : task.uses)
                if (use.owner)
                    std::memset(reinterpret_cast<void*>(use.range.begin), kPoison, use.range.end - use.range.begin);
        if (task.watched && settings_.check)
            task.expected = task.watched();
        else
            task.watched = nullptr;
    }

    void discard(Task& task) {
        for (c10::Storage& storage : task.keep)
            garbage_.push_back(std::move(storage));
        task.keep.clear();
    }

    // Does the first task of the queue, and those of other streams that it waits for.
    void step(Stream& stream) {
        Task task = std::move(stream.queue.front());
        stream.queue.pop_front();
        if (task.kind == Task::Kind::wait)
            finish(*task.version);
        if (task.kind == Task::Kind::record)
            set_done(*task.version);
        if (task.kind != Task::Kind::work)
            return;
        const bool changed = task.watched && task.watched() != task.expected;
        task.run();
        discard(task);
        TORCH_CHECK(!changed, "missing synchronisation: the host wrote into the host memory of \"", *task.name,
                    "\" of stream ", stream.index, " before that copy was done");
    }

    static void set_done(Version& version) {
        version.done = true;
        version.time = std::chrono::steady_clock::now();
    }

    VersionRef record_on(Stream& stream) {
        auto version = std::make_shared<Version>(Version{stream.index, false, stream.clock, {}});
        if (stream.queue.empty())
            set_done(*version);
        else
            stream.queue.push_back({Task::Kind::record, nullptr, version, {}, {}, {}, 0, {}});
        return version;
    }

    void finish(Version& version) {
        while (!version.done)
            step(*streams_.at(version.stream));
    }

    void drain(Stream& stream) {
        while (!stream.queue.empty())
            step(stream);
    }

    void synchronize_all(c10::DeviceIndex device) {
        for (auto& stream : streams_)
            if (stream->device == device) {
                drain(*stream);
                join(host_, stream->clock);
            }
        accesses_.prune(host_);
    }

    // The thread of the mode "random".
    void work() {
        for (;;) {
            double delay_s = 0;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [this] { return settings_.mode == Mode::random && !movable().empty(); });
                delay_s = std::uniform_real_distribution<double>(0, settings_.delay_max_s)(random_);
            }
            std::this_thread::sleep_for(std::chrono::duration<double>(delay_s));
            Guard guard(*this);
            const std::vector<Stream*> ready = movable();
            if (ready.empty())
                continue;
            try {
                step(*ready[random_() % ready.size()]);
            } catch (...) {
                error_ = std::current_exception();
            }
        }
    }

    std::vector<Stream*> movable() {
        std::vector<Stream*> ready;
        for (auto& stream : streams_) {
            if (stream->queue.empty())
                continue;
            const Task& task = stream->queue.front();
            if (task.kind != Task::Kind::wait || task.version->done)
                ready.push_back(stream.get());
        }
        return ready;
    }

    struct Deferred {
        uint64_t at;
        std::vector<VersionRef> versions;
    };

    void release_deferred();
    void release_block(uint64_t at);

    std::mutex mutex_;
    std::condition_variable wake_;
    Settings settings_;
    std::mt19937_64 random_;
    bool worker_started_ = false;
    int devices_ = 0;
    std::deque<std::unique_ptr<Stream>> streams_;
    std::deque<DeviceMemory> memory_;
    std::vector<Deferred> deferred_;
    std::vector<c10::Storage> garbage_;
    Clock host_;
    AccessMap accesses_;
    std::unordered_set<std::string> names_;
    std::exception_ptr error_;
};

} // namespace simgpu
