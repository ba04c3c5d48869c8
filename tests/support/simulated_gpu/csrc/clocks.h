// Vector clocks, and who touched which address range last: how a missing wait is found.
//
// The model is that of torch/cuda/_sanitizer.py: an access happens before another one when its stream's counter is
// known to the other's stream, which learns it from events, from waits, and from what the host had waited for when it
// launched. Here accesses are noted by address range and not by tensor, so that views of one big storage are told
// apart.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

namespace simgpu {

// Entry s is the number of operations of stream s that are known to be done.
using Clock = std::vector<uint64_t>;

inline void join(Clock& into, const Clock& from) {
    if (into.size() < from.size())
        into.resize(from.size(), 0);
    for (size_t i = 0; i < from.size(); ++i)
        into[i] = std::max(into[i], from[i]);
}

inline uint64_t entry(const Clock& clock, int stream) {
    return static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
}

struct Range {
    uint64_t begin;
    uint64_t end;
};

// A host allocation: once it is gone, its addresses belong to somebody else.
using HostOwner = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct Access {
    int stream;
    uint64_t sequence;
    const std::string* operation;
    std::optional<HostOwner> owner;

    bool expired() const { return owner && owner->expired(); }
};

struct Use {
    Range range;
    bool write;
    std::optional<HostOwner> owner = std::nullopt; // of host memory
    bool exact = true;                             // all bytes of the range are used
};

class AccessMap {
  public:
    // Raises when an earlier access to the range conflicts and does not happen before `access`.
    void check(const Use& use, const Access& access, const Clock& clock) const {
        for (auto it = first(use.range.begin); it != segments_.end() && it->first < use.range.end; ++it) {
            const Segment& segment = it->second;
            if (segment.write && unordered(*segment.write, access, clock))
                report(use, access, *segment.write, true, {it->first, segment.end});
            if (use.write)
                for (const Access& read : segment.reads)
                    if (unordered(read, access, clock))
                        report(use, access, read, false, {it->first, segment.end});
        }
    }

    void note(const Use& use, const Access& access) {
        if (use.range.begin >= use.range.end)
            return;
        cut(use.range.begin);
        cut(use.range.end);
        if (use.write) {
            segments_.erase(segments_.lower_bound(use.range.begin), segments_.lower_bound(use.range.end));
            segments_[use.range.begin] = {use.range.end, access, {}};
            return;
        }
        uint64_t at = use.range.begin;
        for (auto it = segments_.lower_bound(at); it != segments_.end() && it->first < use.range.end; ++it) {
            if (it->first > at)
                segments_[at] = {it->first, std::nullopt, {access}};
            add_read(it->second, access);
            at = it->second.end;
        }
        if (at < use.range.end)
            segments_[at] = {use.range.end, std::nullopt, {access}};
    }

    // What `stream` did to the range is known to be over by everybody who gets the memory next.
    void forget(Range range, const std::vector<int>& streams) {
        cut(range.begin);
        cut(range.end);
        const auto gone = [&](const Access& access) {
            return std::find(streams.begin(), streams.end(), access.stream) != streams.end();
        };
        drop(segments_.lower_bound(range.begin), segments_.lower_bound(range.end), gone);
    }

    // Accesses that the host has waited for happen before all that is still to come: every launch follows the host.
    void prune(const Clock& host) {
        if (segments_.size() < prune_at_)
            return;
        drop(segments_.begin(), segments_.end(),
             [&](const Access& access) { return access.expired() || entry(host, access.stream) >= access.sequence; });
        prune_at_ = std::max<size_t>(256, 2 * segments_.size());
    }

    void clear() { segments_.clear(); }

    size_t size() const { return segments_.size(); }

  private:
    struct Segment {
        uint64_t end;
        std::optional<Access> write;
        std::vector<Access> reads; // since the write, the last of each stream
    };
    using Segments = std::map<uint64_t, Segment>;

    static bool unordered(const Access& earlier, const Access& access, const Clock& clock) {
        return earlier.stream != access.stream && entry(clock, earlier.stream) < earlier.sequence && !earlier.expired();
    }

    static void add_read(Segment& segment, const Access& access) {
        for (Access& read : segment.reads)
            if (read.stream == access.stream) {
                read = access;
                return;
            }
        segment.reads.push_back(access);
    }

    [[noreturn]] static void report(const Use& use, const Access& access, const Access& earlier, bool wrote,
                                    Range where) {
        std::ostringstream text;
        text << "missing synchronisation: \"" << *access.operation << "\" (operation " << access.sequence
             << " of stream " << access.stream << ") " << (use.write ? "writes" : "reads") << " the "
             << (use.owner ? "host" : "device") << " bytes [0x" << std::hex << std::max(where.begin, use.range.begin)
             << ", 0x" << std::min(where.end, use.range.end) << std::dec << "), which \"" << *earlier.operation
             << "\" (operation " << earlier.sequence << " of stream " << earlier.stream << ") "
             << (wrote ? "writes" : "reads") << "; neither stream " << access.stream << " nor the host waited for it";
        TORCH_CHECK(false, text.str());
    }

    Segments::const_iterator first(uint64_t address) const {
        auto it = segments_.upper_bound(address);
        if (it != segments_.begin() && std::prev(it)->second.end > address)
            --it;
        return it;
    }

    // Makes `address` a border between segments.
    void cut(uint64_t address) {
        auto it = segments_.lower_bound(address);
        if (it == segments_.begin())
            return;
        Segment& before = std::prev(it)->second;
        if (before.end <= address)
            return;
        Segment after = before;
        before.end = address;
        segments_.emplace_hint(it, address, std::move(after));
    }

    template <class Gone> void drop(Segments::iterator it, Segments::iterator last, const Gone& gone) {
        while (it != last) {
            Segment& segment = it->second;
            if (segment.write && gone(*segment.write))
                segment.write.reset();
            auto& reads = segment.reads;
            reads.erase(std::remove_if(reads.begin(), reads.end(), gone), reads.end());
            it = segment.write || !reads.empty() ? std::next(it) : segments_.erase(it);
        }
    }

    Segments segments_;
    size_t prune_at_ = 256;
};

} // namespace simgpu
