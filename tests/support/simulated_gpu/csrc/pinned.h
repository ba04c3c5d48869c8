// Host memory that is page-locked: only noted, since on the CPU nothing depends on it but what torch is told.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>

namespace simgpu {

class PinnedMemory {
  public:
    // False where a part is pinned already, or the limit would be passed.
    bool add(uint64_t begin, uint64_t end) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (overlaps(begin, end) || end - begin > limit_bytes_ || bytes_ > limit_bytes_ - (end - begin))
            return false;
        ends_[begin] = end;
        bytes_ += end - begin;
        return true;
    }

    bool remove(uint64_t begin) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = ends_.find(begin);
        if (it == ends_.end())
            return false;
        bytes_ -= it->second - begin;
        ends_.erase(it);
        return true;
    }

    bool contains(uint64_t address) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return overlaps(address, address + 1);
    }

    // Whether a copy may use the range: CUDA refuses one that is pinned in part (cuMemcpy: "memory regions spanning over
    // allocations that are both registered and not"); one over two that were pinned apart is not promised to work.
    bool is_one_kind(uint64_t begin, uint64_t end) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = ends_.lower_bound(end);
        return it == ends_.begin() || std::prev(it)->second <= begin ||
               (std::prev(it)->first <= begin && end <= std::prev(it)->second);
    }

    void limit(uint64_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        limit_bytes_ = bytes;
    }

  private:
    bool overlaps(uint64_t begin, uint64_t end) const {
        const auto it = ends_.lower_bound(end);
        return it != ends_.begin() && std::prev(it)->second > begin;
    }

    std::mutex mutex_;
    std::map<uint64_t, uint64_t> ends_; // by their beginnings
    uint64_t bytes_ = 0;
    uint64_t limit_bytes_ = ~uint64_t(0);
};

} // namespace simgpu
