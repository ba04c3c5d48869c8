// From the settings of a parameter group, in double, to the coefficients that its rule reads, in float.
#pragma once

#include "types.h"

namespace cpu_adam {

struct AdamHyper {
    double lr, beta1, beta2, eps, weight_decay;
    bool decoupled;
    double step; // the step being taken, from 1
    bool bias_correction, maximize;
};
struct LionHyper {
    double lr, beta1, beta2, weight_decay;
    bool maximize;
};
struct AdagradHyper {
    double lr, lr_decay, eps, weight_decay, step;
    bool maximize;
};
struct SgdHyper {
    double lr, momentum, dampening, weight_decay;
    bool nesterov, first, maximize;
};

Coefficients coefficients_of(const AdamHyper& hyper, double grad_factor);
Coefficients coefficients_of(const LionHyper& hyper, double grad_factor);
Coefficients coefficients_of(const AdagradHyper& hyper, double grad_factor);
Coefficients coefficients_of(const SgdHyper& hyper, double grad_factor);

} // namespace cpu_adam
