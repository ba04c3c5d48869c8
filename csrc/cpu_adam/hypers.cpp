#include "hypers.h"

#include <cmath>

namespace cpu_adam {
namespace {

Lerp lerp_of(double beta) {
    const double weight = 1.0 - beta;
    const auto rounded = static_cast<float>(weight);
    return {rounded, static_cast<float>(1.0 - weight), rounded >= 0.5f};
}

Coefficients common(double grad_factor, bool maximize, double step_size, double decoupled_decay, double l2) {
    Coefficients c{};
    c.grad_factor = static_cast<float>(maximize ? -grad_factor : grad_factor);
    c.weight_factor = static_cast<float>(1.0 - decoupled_decay);
    c.l2 = static_cast<float>(l2);
    c.neg_step_size = static_cast<float>(-step_size);
    return c;
}

} // namespace

Coefficients coefficients_of(const AdamHyper& h, double grad_factor) {
    const double correction1 = h.bias_correction ? 1.0 - std::pow(h.beta1, h.step) : 1.0;
    const double correction2 = h.bias_correction ? 1.0 - std::pow(h.beta2, h.step) : 1.0;
    Coefficients c = common(grad_factor, h.maximize, h.lr / correction1, h.decoupled ? h.lr * h.weight_decay : 0.0,
                            h.decoupled ? 0.0 : h.weight_decay);
    c.eps = static_cast<float>(h.eps);
    c.lerp1 = lerp_of(h.beta1);
    c.beta2 = static_cast<float>(h.beta2);
    c.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
    c.root_correction2 = static_cast<float>(std::sqrt(correction2));
    c.folded_neg_step = static_cast<float>(-h.lr / correction1 * std::sqrt(correction2));
    c.folded_eps = static_cast<float>(h.eps * std::sqrt(correction2));
    return c;
}

Coefficients coefficients_of(const LionHyper& h, double grad_factor) {
    Coefficients c = common(grad_factor, h.maximize, h.lr, h.lr * h.weight_decay, 0.0);
    c.lerp1 = lerp_of(h.beta1);
    c.lerp2 = lerp_of(h.beta2);
    return c;
}

Coefficients coefficients_of(const AdagradHyper& h, double grad_factor) {
    Coefficients c = common(grad_factor, h.maximize, h.lr / (1.0 + (h.step - 1.0) * h.lr_decay), 0.0, h.weight_decay);
    c.eps = static_cast<float>(h.eps);
    return c;
}

Coefficients coefficients_of(const SgdHyper& h, double grad_factor) {
    Coefficients c = common(grad_factor, h.maximize, h.lr, 0.0, h.weight_decay);
    c.momentum = static_cast<float>(h.momentum);
    c.one_minus_dampening = static_cast<float>(1.0 - h.dampening);
    c.nesterov = h.nesterov;
    c.first = h.first;
    return c;
}

} // namespace cpu_adam
