// Adam with 8-bit states, in blocks of kStateBlock elements that share a scale. Same conditions as kernels.inc.h.
//
// A block stores absmax, the largest magnitude in it, in fp32, and for each element a code q: 0 to 255 for exp_avg_sq,
// -127 to 127 for exp_avg. Its value is sign(q) * (|q| / Q)^4 * absmax, Q = 255 or 127: fine steps near absmax, coarser
// ones down to 2.4e-10 (3.8e-9) of it, and +-absmax itself exactly. The code of x is the fourth root of |x| / absmax
// times Q, rounded to nearest even; one of a positive exp_avg_sq is at least 1, so that no element that has seen a
// gradient divides by epsilon alone. The update computes with the new fp32 moments and stores their codes last.

constexpr float kSmallestAbsmax = 0x1p-126f; // a block below it is stored as zeros: the inverse must be finite
constexpr float kRounding = 12582912.0f;     // 1.5 * 2^23: adding it leaves the rounded integer in the low bits

template <class V, bool kSigned> struct EightBit {
    using F = typename V::F;
    static constexpr float kTop = kSigned ? 127.0f : 255.0f;

    static inline F load(const std::uint8_t* p, F absmax) {
        const F root = V::mul(kSigned ? V::load_s8(p) : V::load_u8(p), V::set1(1.0f / kTop));
        const F square = V::mul(root, root);
        const F leading = kSigned ? V::mul(root, V::abs(root)) : square;
        return V::opaque(V::mul(V::mul(leading, square), absmax));
    }
    static inline void store(std::uint8_t* p, F x, F inverse) {
        const F magnitude = kSigned ? V::abs(x) : x;
        F root = V::sqrt(V::sqrt(V::mul(magnitude, inverse)));
        if (kSigned)
            root = V::copysign(root, x);
        else
            root = V::larger(root, V::smaller(V::mul(root, V::set1(0x1p40f)), V::set1(1.0f / kTop)));
        V::store_low_byte(p, V::fma(root, V::set1(kTop), V::set1(kRounding)));
    }

    static inline F larger_magnitude(F largest, F x) { return V::maximum(largest, kSigned ? V::abs(x) : x); }

    // The scale of a block from the largest magnitudes in each lane; a NaN or an infinity makes it NaN.
    static inline float scale(F lanes) {
        float lane[V::kWidth];
        V::store(lane, lanes);
        float largest = 0.0f;
        bool finite = true;
        for (const float x : lane) {
            finite = finite && x <= 3.4028234663852886e38f;
            largest = x > largest ? x : largest;
        }
        return !finite ? float_of(0x7FC00000u) : largest < kSmallestAbsmax ? 0.0f : largest;
    }

    // All of one block; `values` has kStateBlock elements. `absmax` need not be aligned, as no address need be.
    static inline void store_block(std::uint8_t* codes, float* absmax, const float* values, F lanes) {
        const float largest = scale(lanes);
        Scalar::store(absmax, largest);
        if (!(largest > 0.0f)) { // zeros, or a NaN, which the scale alone carries
            std::memset(codes, 0, kStateBlock);
            return;
        }
        const F inverse = V::set1(1.0f / largest);
        for (std::size_t i = 0; i < kStateBlock; i += V::kWidth)
            store(codes + i, V::load(values + i), inverse);
    }
};

template <class V, class R, WeightForm kForm, DType kGrad> struct EightBitUpdate {
    using F = typename V::F;
    using G = typename Element<kGrad>::Type;
    using W = Weight<kForm>;
    using WT = typename W::Type;
    using C = typename R::template Vectors<V>;
    using First = EightBit<V, true>;
    using Second = EightBit<V, false>;
    static_assert(R::kStates == 2, "exp_avg and exp_avg_sq");

    static __attribute__((flatten)) inline void block(const C& c, const UpdateArgs& a, const Cursor& w, std::size_t i) {
        std::uint8_t* const codes1 = static_cast<std::uint8_t*>(a.state[0]) + i;
        std::uint8_t* const codes2 = static_cast<std::uint8_t*>(a.state[1]) + i;
        float* const absmax1 = a.absmax[0] + i / kStateBlock;
        float* const absmax2 = a.absmax[1] + i / kStateBlock;
        const F scale1 = V::set1(Scalar::load(absmax1)), scale2 = V::set1(Scalar::load(absmax2));
        alignas(64) float first[kStateBlock], second[kStateBlock];
        F largest1 = V::set1(0.0f), largest2 = largest1;
        const auto updated = [&](std::size_t j) {
            F state[2] = {First::load(codes1 + j, scale1), Second::load(codes2 + j, scale2)};
            const F grad = Element<kGrad>::template load<V>(static_cast<const G*>(a.grad) + i + j);
            const F weight = R::template apply<V>(c, W::template load<V>(w, i + j), grad, state);
            V::store(first + j, state[0]);
            V::store(second + j, state[1]);
            largest1 = First::larger_magnitude(largest1, state[0]);
            largest2 = Second::larger_magnitude(largest2, state[1]);
            return weight;
        };
        if constexpr (V::kPairs && kForm == WeightForm::kSplitBf16)
            for (std::size_t j = 0; j < kStateBlock; j += 2 * V::kWidth) {
                const F weight = updated(j);
                W::template store_pair<V>(w, i + j, weight, updated(j + V::kWidth));
            }
        else
            for (std::size_t j = 0; j < kStateBlock; j += V::kWidth)
                W::template store<V>(w, i + j, updated(j));
        First::store_block(codes1, absmax1, first, largest1);
        Second::store_block(codes2, absmax2, second, largest2);
    }

    // Fewer elements than a block: the same arithmetic on copies, with zeros behind them.
    static void tail(const C& c, const UpdateArgs& a, std::size_t i) {
        const std::size_t n = a.n - i;
        G grad[kStateBlock] = {};
        WT weight[kStateBlock] = {};
        std::int16_t remainder[kStateBlock] = {};
        float master[kStateBlock] = {};
        std::uint8_t codes[2][kStateBlock] = {};
        std::uint8_t* const source[2] = {static_cast<std::uint8_t*>(a.state[0]) + i,
                                         static_cast<std::uint8_t*>(a.state[1]) + i};
        const std::size_t b = i / kStateBlock;
        const UpdateArgs t{grad, weight, remainder, master, {codes[0], codes[1]}, {a.absmax[0] + b, a.absmax[1] + b},
                           n,    false};
        std::memcpy(grad, static_cast<const G*>(a.grad) + i, n * sizeof(G));
        std::memcpy(weight, static_cast<WT*>(a.weight) + i, n * sizeof(WT));
        if (a.remainder)
            std::memcpy(remainder, a.remainder + i, n * sizeof(remainder[0]));
        if (a.master)
            std::memcpy(master, a.master + i, n * sizeof(float));
        for (int s = 0; s < 2; ++s)
            std::memcpy(codes[s], source[s], n);
        block(c, t, Cursor{weight, remainder, master}, 0);
        std::memcpy(static_cast<WT*>(a.weight) + i, weight, n * sizeof(WT));
        if (a.remainder)
            std::memcpy(a.remainder + i, remainder, n * sizeof(remainder[0]));
        if (a.master)
            std::memcpy(a.master + i, master, n * sizeof(float));
        for (int s = 0; s < 2; ++s)
            std::memcpy(source[s], codes[s], n);
    }

    static void run(const UpdateArgs& args, const Coefficients& coefficients) {
        const UpdateArgs a = args;
        const C c(coefficients);
        const Cursor w{a.weight, a.remainder, a.master};
        std::size_t i = 0;
        for (; i + kStateBlock <= a.n; i += kStateBlock)
            block(c, a, w, i);
        if (i < a.n)
            tail(c, a, i);
    }
};

template <class V, bool kSigned> void quantize_run(const float* src, void* codes, float* absmax, std::size_t n) {
    using E = EightBit<V, kSigned>;
    for (std::size_t i = 0; i < n; i += kStateBlock) {
        const std::size_t count = n - i < kStateBlock ? n - i : kStateBlock;
        float values[kStateBlock] = {};
        std::uint8_t block[kStateBlock];
        std::memcpy(values, src + i, count * sizeof(float));
        typename V::F largest = V::set1(0.0f);
        for (std::size_t j = 0; j < kStateBlock; j += V::kWidth)
            largest = E::larger_magnitude(largest, V::load(values + j));
        E::store_block(block, absmax + i / kStateBlock, values, largest);
        std::memcpy(static_cast<std::uint8_t*>(codes) + i, block, count);
    }
}

template <class V, bool kSigned>
void dequantize_run(const void* codes, const float* absmax, float* dst, std::size_t n) {
    using E = EightBit<V, kSigned>;
    for (std::size_t i = 0; i < n; i += kStateBlock) {
        const std::size_t count = n - i < kStateBlock ? n - i : kStateBlock;
        float values[kStateBlock];
        std::uint8_t block[kStateBlock] = {};
        std::memcpy(block, static_cast<const std::uint8_t*>(codes) + i, count);
        const typename V::F scale = V::set1(Scalar::load(absmax + i / kStateBlock));
        for (std::size_t j = 0; j < kStateBlock; j += V::kWidth)
            V::store(values + j, E::load(block + j, scale));
        std::memcpy(dst + i, values, count * sizeof(float));
    }
}
