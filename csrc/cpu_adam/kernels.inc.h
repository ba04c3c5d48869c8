// The kernels, written once over a vector policy `V` (simd_*.h) and compiled once per instruction set.
//
// Include after the target pragma, inside an anonymous namespace: nothing here may be shared between object files, or
// the linker could pick an AVX-512 copy for a machine without it. A product that feeds an addition is either an
// explicit fma or rounded first behind V::opaque, so that no compiler or flag contracts it: all instruction sets give
// the same bits. Which of the two, and the order of operations, is that of torch's vectorised CPU kernels.

template <DType kType> struct Element;
template <> struct Element<DType::kFp32> {
    using Type = float;
    template <class V> static inline typename V::F load(const Type* p) { return V::load(p); }
    template <class V> static inline typename V::F store(Type* p, typename V::F x) {
        V::store(p, x);
        return x;
    }
};
template <> struct Element<DType::kBf16> {
    using Type = std::uint16_t;
    template <class V> static inline typename V::F load(const Type* p) { return V::load_bf16(p); }
    template <class V> static inline typename V::F store(Type* p, typename V::F x) { return V::store_bf16(p, x); }
};
template <> struct Element<DType::kFp16> {
    using Type = std::uint16_t;
    template <class V> static inline typename V::F load(const Type* p) { return V::load_fp16(p); }
    template <class V> static inline typename V::F store(Type* p, typename V::F x) { return V::store_fp16(p, x); }
};

// ---- weight forms: how the fp32 value is read, and everything that is written ----

struct Cursor {
    void* weight;
    std::int16_t* remainder;
    float* master;
};

template <WeightForm kForm> struct Weight;
template <> struct Weight<WeightForm::kFp32> {
    using Type = float;
    template <class V> static inline typename V::F load(const Cursor& c, std::size_t i) {
        return V::load(static_cast<float*>(c.weight) + i);
    }
    template <class V> static inline void store(const Cursor& c, std::size_t i, typename V::F x) {
        V::store(static_cast<float*>(c.weight) + i, x);
    }
};
template <> struct Weight<WeightForm::kSplitBf16> {
    using Type = std::uint16_t;
    template <class V> static inline typename V::F load(const Cursor& c, std::size_t i) {
        return V::load_split(static_cast<std::uint16_t*>(c.weight) + i, c.remainder + i);
    }
    template <class V> static inline void store(const Cursor& c, std::size_t i, typename V::F x) {
        V::store_split(static_cast<std::uint16_t*>(c.weight) + i, c.remainder + i, x);
    }
    template <class V> static inline void store_pair(const Cursor& c, std::size_t i, typename V::F x, typename V::F y) {
        V::store_split_pair(static_cast<std::uint16_t*>(c.weight) + i, c.remainder + i, x, y);
    }
};
template <DType kCopy> struct MasterWeight {
    using Type = std::uint16_t;
    template <class V> static inline typename V::F load(const Cursor& c, std::size_t i) {
        return V::load(c.master + i);
    }
    template <class V> static inline void store(const Cursor& c, std::size_t i, typename V::F x) {
        V::store(c.master + i, x);
        Element<kCopy>::template store<V>(static_cast<std::uint16_t*>(c.weight) + i, x);
    }
    template <class V> static inline void stream(const Cursor& c, std::size_t i, typename V::F x) {
        V::store(c.master + i, x);
        V::template stream_half<kCopy == DType::kBf16>(static_cast<std::uint16_t*>(c.weight) + i, x);
    }
};
template <> struct Weight<WeightForm::kMasterBf16> : MasterWeight<DType::kBf16> {};
template <> struct Weight<WeightForm::kMasterFp16> : MasterWeight<DType::kFp16> {};
template <> struct Weight<WeightForm::kBf16> {
    using Type = std::uint16_t;
    template <class V> static inline typename V::F load(const Cursor& c, std::size_t i) {
        return V::load_bf16(static_cast<std::uint16_t*>(c.weight) + i);
    }
    template <class V> static inline void store(const Cursor& c, std::size_t i, typename V::F x) {
        V::store_bf16(static_cast<std::uint16_t*>(c.weight) + i, x);
    }
};

#include "rules.inc.h"

#ifndef CPU_ADAM_PREFETCH
#define CPU_ADAM_PREFETCH 1024 // elements ahead; 512 and 768 measured slower for bf16 on Zen 5, other distances alike
#endif
constexpr std::size_t kUnroll = 32; // elements: two cache lines of fp32, one of bf16

template <class T, bool kWrite> inline void prefetch(const T* p) {
    for (std::size_t offset = 0; offset < kUnroll; offset += 64 / sizeof(T))
        __builtin_prefetch(p + CPU_ADAM_PREFETCH + offset, kWrite ? 1 : 0, 3);
}

template <class V, class R, StateDType kState, WeightForm kForm, DType kGrad> struct Update {
    using F = typename V::F;
    using SE = Element<kState == StateDType::kFp32 ? DType::kFp32 : DType::kBf16>;
    using ST = typename SE::Type;
    using G = typename Element<kGrad>::Type;
    using W = Weight<kForm>;
    using WT = typename W::Type;

    using C = typename R::template Vectors<V>;
    static constexpr bool kMaster = kForm == WeightForm::kMasterBf16 || kForm == WeightForm::kMasterFp16;
    static constexpr int kSlots = R::kStates > 0 ? R::kStates : 1; // an array has at least one element

    static constexpr bool kPairs = V::kPairs && kForm == WeightForm::kSplitBf16;

    // Updates the states and returns the new weight.
    static inline F updated(const C& c, const UpdateArgs& a, const Cursor& w, std::size_t i) {
        F state[kSlots];
        for (int s = 0; s < R::kStates; ++s)
            state[s] = SE::template load<V>(static_cast<ST*>(a.state[s]) + i);
        const F grad = Element<kGrad>::template load<V>(static_cast<const G*>(a.grad) + i);
        const F weight = R::template apply<V>(c, W::template load<V>(w, i), grad, state);
        for (int s = 0; s < R::kStates; ++s)
            SE::template store<V>(static_cast<ST*>(a.state[s]) + i, state[s]);
        return weight;
    }

    template <bool kStreamed = false>
    static inline void vector(const C& c, const UpdateArgs& a, const Cursor& w, std::size_t i) {
        const F weight = updated(c, a, w, i);
        if constexpr (kStreamed)
            W::template stream<V>(w, i, weight);
        else
            W::template store<V>(w, i, weight);
    }

    static inline void pair(const C& c, const UpdateArgs& a, const Cursor& w, std::size_t i) {
        const F first = updated(c, a, w, i), second = updated(c, a, w, i + V::kWidth);
        W::template store_pair<V>(w, i, first, second);
    }

    template <bool kStreamed> static inline void prefetch_all(const UpdateArgs& a, std::size_t i) {
        prefetch<G, false>(static_cast<const G*>(a.grad) + i);
        for (int s = 0; s < R::kStates; ++s)
            prefetch<ST, true>(static_cast<ST*>(a.state[s]) + i);
        if (kForm == WeightForm::kSplitBf16)
            prefetch<std::int16_t, true>(a.remainder + i);
        if (kMaster)
            prefetch<float, true>(a.master + i);
        if (!kStreamed)
            prefetch<WT, true>(static_cast<WT*>(a.weight) + i);
    }

    // Fewer elements than a vector: the same arithmetic on copies, so that nothing outside the segment is touched.
    static void tail(const C& c, const UpdateArgs& a, std::size_t i) {
        const std::size_t n = a.n - i;
        G grad[V::kWidth] = {};
        WT weight[V::kWidth] = {};
        std::int16_t remainder[V::kWidth] = {};
        float master[V::kWidth] = {};
        ST state[kSlots][V::kWidth] = {};
        UpdateArgs t{grad, weight, remainder, master, {}, {}, n, false};
        std::memcpy(grad, static_cast<const G*>(a.grad) + i, n * sizeof(G));
        std::memcpy(weight, static_cast<WT*>(a.weight) + i, n * sizeof(WT));
        if (a.remainder)
            std::memcpy(remainder, a.remainder + i, n * sizeof(remainder[0]));
        if (a.master)
            std::memcpy(master, a.master + i, n * sizeof(float));
        for (int s = 0; s < R::kStates; ++s) {
            t.state[s] = state[s];
            std::memcpy(state[s], static_cast<ST*>(a.state[s]) + i, n * sizeof(ST));
        }
        vector(c, t, Cursor{weight, remainder, master}, 0);
        std::memcpy(static_cast<WT*>(a.weight) + i, weight, n * sizeof(WT));
        if (a.remainder)
            std::memcpy(a.remainder + i, remainder, n * sizeof(remainder[0]));
        if (a.master)
            std::memcpy(a.master + i, master, n * sizeof(float));
        for (int s = 0; s < R::kStates; ++s)
            std::memcpy(static_cast<ST*>(a.state[s]) + i, state[s], n * sizeof(ST));
    }

    // Flat: the compiler's budget for inlining ends before a file that has all kernels does.
    template <bool kStreamed>
    static __attribute__((flatten)) inline std::size_t blocks(const C& c, const UpdateArgs& a, const Cursor& w) {
        std::size_t i = 0;
        for (; i + kUnroll <= a.n; i += kUnroll) {
            prefetch_all<kStreamed>(a, i);
            if constexpr (kPairs)
                for (std::size_t j = 0; j < kUnroll; j += 2 * V::kWidth)
                    pair(c, a, w, i + j);
            else
                for (std::size_t j = 0; j < kUnroll; j += V::kWidth)
                    vector<kStreamed>(c, a, w, i + j);
        }
        return i;
    }

    static void run(const UpdateArgs& args, const Coefficients& coefficients) {
        const UpdateArgs a = args;
        const C c(coefficients);
        const Cursor w{a.weight, a.remainder, a.master};
        std::size_t i;
        if (kMaster && a.stream && reinterpret_cast<std::uintptr_t>(a.weight) % 64 == 0) {
            i = blocks<kMaster>(c, a, w);
            V::stream_fence();
        } else {
            i = blocks<false>(c, a, w);
        }
        for (; i + V::kWidth <= a.n; i += V::kWidth)
            vector(c, a, w, i);
        if (i < a.n)
            tail(c, a, i);
    }
};

#include "eight_bit.inc.h"

#include "landing.inc.h"

// ---- split and merge of fp32 into bf16 and a 16-bit remainder ----

template <class V>
__attribute__((flatten)) void split_run(const float* src, std::uint16_t* hi, std::int16_t* lo, std::size_t n) {
    std::size_t i = 0;
    if constexpr (V::kPairs)
        for (; i + 2 * V::kWidth <= n; i += 2 * V::kWidth)
            V::store_split_pair(hi + i, lo + i, V::load(src + i), V::load(src + i + V::kWidth));
    for (; i + V::kWidth <= n; i += V::kWidth)
        V::store_split(hi + i, lo + i, V::load(src + i));
    if (i == n)
        return;
    float s[V::kWidth] = {};
    std::uint16_t h[V::kWidth];
    std::int16_t l[V::kWidth];
    std::memcpy(s, src + i, (n - i) * sizeof(float));
    V::store_split(h, l, V::load(s));
    std::memcpy(hi + i, h, (n - i) * sizeof(h[0]));
    std::memcpy(lo + i, l, (n - i) * sizeof(l[0]));
}

template <class V> void merge_run(const std::uint16_t* hi, const std::int16_t* lo, float* dst, std::size_t n) {
    std::size_t i = 0;
    for (; i + V::kWidth <= n; i += V::kWidth)
        V::store(dst + i, V::load_split(hi + i, lo + i));
    if (i == n)
        return;
    float d[V::kWidth];
    std::uint16_t h[V::kWidth] = {};
    std::int16_t l[V::kWidth] = {};
    std::memcpy(h, hi + i, (n - i) * sizeof(h[0]));
    std::memcpy(l, lo + i, (n - i) * sizeof(l[0]));
    V::store(d, V::load_split(h, l));
    std::memcpy(dst + i, d, (n - i) * sizeof(float));
}

// ---- the table ----

template <class V, class R, StateDType kState, WeightForm kForm> void fill_form(KernelTable& t, Rule rule) {
    UpdateFn* row = t.update[static_cast<int>(rule)][static_cast<int>(kState)][static_cast<int>(kForm)];
    if constexpr (kState == StateDType::kEightBit) {
        row[static_cast<int>(DType::kFp32)] = &EightBitUpdate<V, R, kForm, DType::kFp32>::run;
        row[static_cast<int>(DType::kBf16)] = &EightBitUpdate<V, R, kForm, DType::kBf16>::run;
        row[static_cast<int>(DType::kFp16)] = &EightBitUpdate<V, R, kForm, DType::kFp16>::run;
    } else {
        row[static_cast<int>(DType::kFp32)] = &Update<V, R, kState, kForm, DType::kFp32>::run;
        row[static_cast<int>(DType::kBf16)] = &Update<V, R, kState, kForm, DType::kBf16>::run;
        row[static_cast<int>(DType::kFp16)] = &Update<V, R, kState, kForm, DType::kFp16>::run;
    }
}

template <class V, class R, StateDType kState = StateDType::kFp32> void fill_rule(KernelTable& t, Rule rule) {
    fill_form<V, R, kState, WeightForm::kFp32>(t, rule);
    fill_form<V, R, kState, WeightForm::kSplitBf16>(t, rule);
    fill_form<V, R, kState, WeightForm::kMasterBf16>(t, rule);
    fill_form<V, R, kState, WeightForm::kMasterFp16>(t, rule);
    fill_form<V, R, kState, WeightForm::kBf16>(t, rule);
}

template <class V, DType kDst, DType kSrc> void fill_land(KernelTable& t) {
    const auto set = [&t](LandMode mode, LandFn kernel) {
        t.land[static_cast<int>(mode)][static_cast<int>(kDst)][static_cast<int>(kSrc)] = kernel;
    };
    set(LandMode::kReplace, &Land<V, kDst, kSrc, LandMode::kReplace>::run);
    set(LandMode::kAdd, &Land<V, kDst, kSrc, LandMode::kAdd>::run);
    set(LandMode::kStream, &Land<V, kDst, kSrc, LandMode::kStream>::run);
}

template <class V, DType kDst> void fill_passes(KernelTable& t) {
    fill_land<V, kDst, DType::kFp32>(t);
    fill_land<V, kDst, DType::kBf16>(t);
    fill_land<V, kDst, DType::kFp16>(t);
    t.sum_of_squares[static_cast<int>(kDst)] = &SumOfSquares<V, kDst>::run;
    const auto set_parts = [&t](LandMode mode, LandPartsFn kernel) {
        t.land_parts[static_cast<int>(mode)][static_cast<int>(kDst)] = kernel;
    };
    set_parts(LandMode::kReplace, &LandParts<V, kDst, LandMode::kReplace>::run);
    set_parts(LandMode::kAdd, &LandParts<V, kDst, LandMode::kAdd>::run);
    set_parts(LandMode::kStream, &LandParts<V, kDst, LandMode::kStream>::run);
}

template <class V> KernelTable make_table() {
    KernelTable t{};
    fill_rule<V, AdamRule<false>>(t, Rule::kAdam);
    fill_rule<V, AdamRule<false, true>, StateDType::kBf16>(t, Rule::kAdam);
    fill_rule<V, AdamRule<false, true>, StateDType::kEightBit>(t, Rule::kAdam);
    fill_rule<V, AdamRule<true>>(t, Rule::kAdamAmsgrad);
    fill_rule<V, LionRule>(t, Rule::kLion);
    fill_rule<V, LionRule, StateDType::kBf16>(t, Rule::kLion);
    fill_rule<V, AdagradRule>(t, Rule::kAdagrad);
    fill_rule<V, SgdRule<false>>(t, Rule::kSgd);
    fill_rule<V, SgdRule<true>>(t, Rule::kSgdMomentum);
    fill_passes<V, DType::kFp32>(t);
    fill_passes<V, DType::kBf16>(t);
    fill_passes<V, DType::kFp16>(t);
    t.split = &split_run<V>;
    t.merge = &merge_run<V>;
    t.quantize[0] = &quantize_run<V, false>;
    t.quantize[1] = &quantize_run<V, true>;
    t.dequantize[0] = &dequantize_run<V, false>;
    t.dequantize[1] = &dequantize_run<V, true>;
    return t;
}
