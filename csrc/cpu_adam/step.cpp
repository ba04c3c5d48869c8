#include "step.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace cpu_adam {
namespace {

// Large enough that a task's hand-over (a few ns) and its cold start in the prefetchers do not show, small enough that
// threads finish together. Multiples of 64 elements keep every stream of an aligned segment on whole cache lines, and
// those of a block of 8-bit state keep it in one task.
constexpr std::size_t kTaskMax = 65536, kTaskMin = 4096, kTaskQuantum = kStateBlock;

struct Task {
    std::size_t segment, begin, n;
};

template <class T> T* advance(T* p, std::size_t n) { return p ? p + n : nullptr; }

UpdateArgs slice(const Segment& segment, const Task& task) {
    const UpdateArgs& a = segment.args;
    UpdateArgs s{};
    s.grad = static_cast<const char*>(a.grad) + task.begin * segment.grad_size;
    s.weight = static_cast<char*>(a.weight) + task.begin * segment.weight_size;
    s.remainder = advance(a.remainder, task.begin);
    s.master = advance(a.master, task.begin);
    for (int i = 0; i < kMaxStates; ++i) {
        s.state[i] = advance(static_cast<char*>(a.state[i]), task.begin * segment.state_size);
        s.absmax[i] = advance(a.absmax[i], task.begin / kStateBlock);
    }
    s.n = task.n;
    s.stream = a.n * segment.weight_size >= kStreamBytes;
    return s;
}

// Elements that are computed at once where the new values go to another place: what they take, 20 bytes each at most,
// stays in the second level of the caches.
constexpr std::size_t kTile = 2048;
constexpr std::size_t kLine = 64;

// Past the caches, where whole lines are written: nobody reads it soon, and no line is read to be overwritten.
void put(void* to, const void* from, std::size_t nbytes) {
#if defined(__x86_64__)
    if (reinterpret_cast<std::uintptr_t>(to) % kLine == 0) {
        auto* target = static_cast<__m128i*>(to);
        const auto* source = static_cast<const __m128i*>(from);
        const std::size_t whole = nbytes / kLine * kLine;
        for (std::size_t i = 0; i < whole / sizeof(__m128i); ++i)
            _mm_stream_si128(target + i, _mm_load_si128(source + i));
        to = static_cast<char*>(to) + whole;
        from = static_cast<const char*>(from) + whole;
        nbytes -= whole;
    }
#endif
    std::memcpy(to, from, nbytes);
}

void fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// One array of a tile: it is computed in `room`, where the old values were copied, and then goes where it belongs.
struct Moved {
    void* to;
    void* room;
    std::size_t nbytes;
};

class TileRoom {
  public:
    template <class T> void bring(T*& array, std::ptrdiff_t old, std::size_t nbytes) {
        if (array == nullptr || old == 0)
            return;
        void* const to = const_cast<void*>(static_cast<const void*>(array));
        void* const room = bytes_ + used_;
        std::memcpy(room, static_cast<const char*>(to) + old, nbytes);
        moved_[count_++] = {to, room, nbytes};
        used_ += (nbytes + kLine - 1) / kLine * kLine;
        array = static_cast<T*>(room);
    }
    void put_all() {
        for (std::size_t i = 0; i < count_; ++i)
            put(moved_[i].to, moved_[i].room, moved_[i].nbytes);
        used_ = count_ = 0;
    }

  private:
    static constexpr std::size_t kArrays = 3 + 2 * kMaxStates;
    alignas(64) unsigned char bytes_[kTile * (8 + 4 * kMaxStates) + kArrays * (kLine + 4 * kTile / kStateBlock)];
    Moved moved_[kArrays];
    std::size_t used_ = 0, count_ = 0;
};

// The kernel works in place. So each tile is copied to where its old values may be overwritten, computed there, and put
// in its place: what is old is read once and what is new written once, which is all the traffic of an update in place.
void run_elsewhere(const Segment& segment, const Task& task, const Coefficients& coefficients) {
    TileRoom room;
    const Elsewhere& old = segment.old;
    for (std::size_t begin = 0; begin < task.n; begin += kTile) {
        UpdateArgs a = slice(segment, {task.segment, task.begin + begin, std::min(kTile, task.n - begin)});
        a.stream = false;
        room.bring(a.weight, old.weight, a.n * segment.weight_size);
        room.bring(a.remainder, old.remainder, a.n * sizeof(*a.remainder));
        room.bring(a.master, old.master, a.n * sizeof(*a.master));
        for (int i = 0; i < kMaxStates; ++i) {
            room.bring(a.state[i], old.state[i], a.n * segment.state_size);
            room.bring(a.absmax[i], old.absmax[i], (a.n + kStateBlock - 1) / kStateBlock * sizeof(float));
        }
        segment.kernel(a, coefficients);
        room.put_all();
    }
    fence();
}

} // namespace

void run_step(const std::vector<Segment>& segments, const std::vector<Coefficients>& coefficients, int num_threads) {
    std::size_t total = 0;
    for (const Segment& segment : segments)
        total += segment.args.n;
    const std::size_t share = total / (4 * static_cast<std::size_t>(num_threads)) / kTaskQuantum * kTaskQuantum;
    const std::size_t task_size = std::min(std::max(share, kTaskMin), kTaskMax);
    std::vector<Task> tasks;
    tasks.reserve(total / task_size + segments.size());
    for (std::size_t s = 0; s < segments.size(); ++s)
        for (std::size_t begin = 0; begin < segments[s].args.n; begin += task_size)
            tasks.push_back({s, begin, std::min(task_size, segments[s].args.n - begin)});
    const int threads = total < 2 * kTaskMin ? 1 : num_threads;
    parallel_for(tasks.size(), threads, [&](std::size_t index) {
        const Task& task = tasks[index];
        const Segment& segment = segments[task.segment];
        if (segment.old.any)
            run_elsewhere(segment, task, coefficients[segment.group]);
        else
            segment.kernel(slice(segment, task), coefficients[segment.group]);
    });
}

} // namespace cpu_adam
