// One optimizer step over a list of segments.
#pragma once

#include <vector>

#include "types.h"

namespace cpu_adam {

// Where the old values of a segment's arrays lie, in bytes from where the new ones go; 0: in the same place.
struct Elsewhere {
    std::ptrdiff_t weight, remainder, master, state[kMaxStates], absmax[kMaxStates];
    bool any;
};

struct Segment {
    UpdateArgs args;
    Elsewhere old;
    UpdateFn kernel;
    std::size_t group;                              // index of its coefficients
    std::size_t grad_size, weight_size, state_size; // bytes per element
};

// Segments must not overlap each other, nor what is new what is old elsewhere. The result does not depend on
// num_threads.
void run_step(const std::vector<Segment>& segments, const std::vector<Coefficients>& coefficients, int num_threads);

} // namespace cpu_adam
