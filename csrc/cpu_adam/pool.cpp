#include "pool.h"

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace cpu_adam {
namespace {

class Pool {
  public:
    Pool() : owner_(getpid()) {}

    pid_t owner() const { return owner_; }

    void run(int num_threads, void (*body)(void*, int), void* data) {
        const std::lock_guard<std::mutex> turn(turn_);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (; size_ < num_threads - 1; ++size_)
                std::thread(&Pool::serve, this, size_, generation_).detach();
            body_ = body;
            data_ = data;
            wanted_ = pending_ = num_threads - 1;
            ++generation_;
        }
        start_.notify_all();
        body(data, num_threads - 1);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return pending_ == 0; });
    }

  private:
    // Detached: a daemon thread that waits without end and holds nothing, so that the process may end at any time.
    void serve(int index, unsigned long seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            start_.wait(lock, [&] { return generation_ != seen; });
            seen = generation_;
            if (index >= wanted_)
                continue;
            const auto body = body_;
            void* const data = data_;
            lock.unlock();
            body(data, index);
            lock.lock();
            if (--pending_ == 0)
                done_.notify_one();
        }
    }

    const pid_t owner_;
    std::mutex turn_, mutex_;
    std::condition_variable start_, done_;
    unsigned long generation_ = 0;
    int size_ = 0, wanted_ = 0, pending_ = 0;
    void (*body_)(void*, int) = nullptr;
    void* data_ = nullptr;
};

// Never destroyed: its threads may outlive every static object.
Pool& pool() {
    static std::mutex guard;
    static Pool* current = nullptr;
    const std::lock_guard<std::mutex> lock(guard);
    if (current == nullptr || current->owner() != getpid())
        current = new Pool;
    return *current;
}

} // namespace

void run_on_pool(int num_threads, void (*body)(void*, int), void* data) { pool().run(num_threads, body, data); }

} // namespace cpu_adam
