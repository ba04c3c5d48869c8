// One optimizer step over a list of segments.
#pragma once

#include <vector>

#include "types.h"

namespace cpu_adam {

struct Segment {
    UpdateArgs args;
    UpdateFn kernel;
    std::size_t group;                              // index of its coefficients
    std::size_t grad_size, weight_size, state_size; // bytes per element
};

// Segments must not overlap each other. The result does not depend on num_threads.
void run_step(const std::vector<Segment>& segments, const std::vector<Coefficients>& coefficients, int num_threads);

} // namespace cpu_adam
