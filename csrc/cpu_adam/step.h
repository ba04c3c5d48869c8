// One optimizer step over a list of segments.
#pragma once

#include <vector>

#include "types.h"

namespace cpu_adam {

struct Segment {
    UpdateArgs args;
    UpdateFn kernel;
    std::size_t group;  // index of its coefficients
    std::size_t grad_size, weight_size;  // bytes per element
};

// Segments must not overlap each other. The result does not depend on num_threads.
void run_step(const std::vector<Segment>& segments, const std::vector<Coefficients>& coefficients, int num_threads);

struct AdamHyper {
    double lr, beta1, beta2, eps, weight_decay;
    bool decoupled;
    long long step;  // the step being taken, from 1
    bool bias_correction, maximize;
};

Coefficients adam_coefficients(const AdamHyper& hyper, double grad_factor);

}  // namespace cpu_adam
