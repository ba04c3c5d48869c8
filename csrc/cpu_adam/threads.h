// Threads: the OpenMP team that torch already runs, or an own pool where there is none.
#pragma once

#include <cstddef>
#include <string>

namespace cpu_adam {

// Calls body(context, task) once for each task in [0, num_tasks), on at most num_threads threads, and returns when all
// are done. Each thread starts on a contiguous share and then takes over what others have left. A body must not throw.
// Floating-point control is the default one in every body (no flushing of subnormals, round to nearest).
using TaskBody = void (*)(void* context, std::size_t task);
void parallel_for(std::size_t num_tasks, int num_threads, TaskBody body, void* context);

template <class Body> void parallel_for(std::size_t num_tasks, int num_threads, const Body& body) {
    parallel_for(
        num_tasks, num_threads, [](void* context, std::size_t task) { (*static_cast<const Body*>(context))(task); },
        const_cast<Body*>(&body));
}

// "openmp: <library path>" or "own pool".
std::string threading_backend();

} // namespace cpu_adam
