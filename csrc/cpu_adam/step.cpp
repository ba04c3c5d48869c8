#include "step.h"

#include <algorithm>

#include "threads.h"

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
        segment.kernel(slice(segment, task), coefficients[segment.group]);
    });
}

} // namespace cpu_adam
