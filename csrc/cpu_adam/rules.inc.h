// The update rules: from weight, gradient and states to the new weight and states. Same conditions as kernels.inc.h.

template <class V> struct LerpVectors {
    typename V::F weight, neg_rest;
    bool from_new;

    explicit inline LerpVectors(const Lerp& lerp)
        : weight(V::set1(lerp.weight)), neg_rest(V::set1(-lerp.rest)), from_new(lerp.from_new) {}
    inline typename V::F operator()(typename V::F old_value, typename V::F new_value) const {
        const typename V::F difference = V::sub(new_value, old_value);
        return from_new ? V::fma(difference, neg_rest, new_value) : V::fma(difference, weight, old_value);
    }
};

// What all rules do first with weight and gradient: scale, add the coupled decay; shrink by the decoupled one.
template <class V> struct CommonVectors {
    typename V::F grad_factor, weight_factor, l2, neg_step, eps;
    bool coupled;

    explicit inline CommonVectors(const Coefficients& c)
        : grad_factor(V::set1(c.grad_factor)), weight_factor(V::set1(c.weight_factor)), l2(V::set1(c.l2)),
          neg_step(V::set1(c.neg_step_size)), eps(V::set1(c.eps)), coupled(c.l2 != 0.0f) {}
    inline typename V::F gradient(typename V::F weight, typename V::F grad) const {
        const typename V::F g = V::opaque(V::mul(grad, grad_factor));
        return coupled ? V::fma(l2, weight, g) : g;
    }
    inline typename V::F decayed(typename V::F weight) const { return V::opaque(V::mul(weight, weight_factor)); }
};

// torch.optim.Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019; Reddi et al. 2018). States: exp_avg,
// exp_avg_sq, max_exp_avg_sq. kFolded: bias_correction2 is multiplied into step size and epsilon, which saves one of
// the divisions that bound it on narrow streams; not torch's order, so the last bits of the change differ.
template <bool kAmsgrad, bool kFolded = false> struct AdamRule {
    static constexpr int kStates = kAmsgrad ? 3 : 2;

    template <class V> struct Vectors : CommonVectors<V> {
        LerpVectors<V> lerp1;
        typename V::F beta2, one_minus_beta2, root_correction2;

        explicit inline Vectors(const Coefficients& c)
            : CommonVectors<V>(c), lerp1(c.lerp1), beta2(V::set1(c.beta2)), one_minus_beta2(V::set1(c.one_minus_beta2)),
              root_correction2(V::set1(c.root_correction2)) {
            if (kFolded) {
                this->neg_step = V::set1(c.folded_neg_step);
                this->eps = V::set1(c.folded_eps);
            }
        }
    };

    template <class V>
    static inline typename V::F apply(const Vectors<V>& c, typename V::F weight, typename V::F grad,
                                      typename V::F* state) {
        using F = typename V::F;
        const F g = c.gradient(weight, grad);
        const F m = state[0] = c.lerp1(state[0], g);
        const F v = state[1] = V::fma(V::mul(c.one_minus_beta2, g), g, V::mul(c.beta2, state[1]));
        F second = v;
        if (kAmsgrad)
            second = state[kStates - 1] = V::maximum(state[kStates - 1], v);
        const F root = V::sqrt(second);
        const F denom = V::add(kFolded ? root : V::div(root, c.root_correction2), c.eps);
        return V::add(c.decayed(weight), V::div(V::mul(c.neg_step, m), denom));
    }
};

// Lion (Chen et al. 2023, algorithm 2). State: exp_avg.
struct LionRule {
    static constexpr int kStates = 1;

    template <class V> struct Vectors : CommonVectors<V> {
        LerpVectors<V> lerp1, lerp2;

        explicit inline Vectors(const Coefficients& c) : CommonVectors<V>(c), lerp1(c.lerp1), lerp2(c.lerp2) {}
    };

    template <class V>
    static inline typename V::F apply(const Vectors<V>& c, typename V::F weight, typename V::F grad,
                                      typename V::F* state) {
        const typename V::F g = c.gradient(weight, grad);
        const typename V::F direction = V::sign(c.lerp1(state[0], g));
        state[0] = c.lerp2(state[0], g);
        return V::fma(c.neg_step, direction, c.decayed(weight));
    }
};

// torch.optim.Adagrad (Duchi et al. 2011). State: sum.
struct AdagradRule {
    static constexpr int kStates = 1;

    template <class V> using Vectors = CommonVectors<V>;

    template <class V>
    static inline typename V::F apply(const CommonVectors<V>& c, typename V::F weight, typename V::F grad,
                                      typename V::F* state) {
        const typename V::F g = c.gradient(weight, grad);
        state[0] = V::fma(g, g, state[0]);
        const typename V::F std = V::add(V::sqrt(state[0]), c.eps);
        return V::add(c.decayed(weight), V::div(V::mul(c.neg_step, g), std));
    }
};

// torch.optim.SGD. State: momentum_buffer.
template <bool kMomentum> struct SgdRule {
    static constexpr int kStates = kMomentum ? 1 : 0;

    template <class V> struct Vectors : CommonVectors<V> {
        typename V::F momentum, one_minus_dampening;
        bool nesterov, first;

        explicit inline Vectors(const Coefficients& c)
            : CommonVectors<V>(c), momentum(V::set1(c.momentum)), one_minus_dampening(V::set1(c.one_minus_dampening)),
              nesterov(c.nesterov), first(c.first) {}
    };

    template <class V>
    static inline typename V::F apply(const Vectors<V>& c, typename V::F weight, typename V::F grad,
                                      typename V::F* state) {
        using F = typename V::F;
        F g = c.gradient(weight, grad);
        if constexpr (kMomentum) {
            const F kept = V::mul(state[0], c.momentum);
            const F buffer = state[0] = c.first ? g : V::fma(c.one_minus_dampening, g, kept);
            g = c.nesterov ? V::fma(c.momentum, buffer, g) : buffer;
        } else {
            (void)state;
        }
        return V::fma(c.neg_step, g, c.decayed(weight));
    }
};
