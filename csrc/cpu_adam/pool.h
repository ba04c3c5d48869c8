// The thread pool for processes without an OpenMP runtime.
#pragma once

namespace cpu_adam {

// Calls body(data, thread) for each thread in [0, num_threads), the last one on the caller; returns when all are done.
// Calls from several threads take turns. A forked child makes its own pool.
void run_on_pool(int num_threads, void (*body)(void* data, int thread), void* data);

} // namespace cpu_adam
