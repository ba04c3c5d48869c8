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

// ---- landing: dst = src or dst + src, and the sum of squares of what dst then holds. The caller fences stores past
// the caches. ----

// Bytes ahead: a page and more, for hardware prefetchers stop at the end of one. With two streams and less arithmetic
// than the updates, 1 KiB ahead measured slower than none.
#ifndef CPU_ADAM_LAND_PREFETCH
#define CPU_ADAM_LAND_PREFETCH 8192
#endif

// The lines of the next kUnroll elements of a stream, as far ahead as that.
template <bool kWrite, class T> inline void prefetch_far(const T* p) {
    for (std::size_t offset = 0; offset < kUnroll * sizeof(T); offset += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(p) + CPU_ADAM_LAND_PREFETCH + offset, kWrite ? 1 : 0, 3);
}

static_assert(kUnroll == kSumLanes, "a block adds one element to each lane");

template <class V, DType kDst, DType kSrc, LandMode kMode> struct Land {
    using F = typename V::F;
    using D = typename Element<kDst>::Type;
    using S = typename Element<kSrc>::Type;
    static constexpr bool kAccumulate = kMode == LandMode::kAdd;
    static constexpr bool kCopy = !kAccumulate && kDst == kSrc; // the bits are kept, also those of a NaN
    static constexpr bool kStream = kMode == LandMode::kStream;

    template <bool kStreamed> static inline void lanes(D* dst, const S* src, typename V::Sum& sum) {
        for (int part = 0; part < kSumLanes / V::kWidth; ++part) {
            const int j = part * V::kWidth;
            F x = Element<kSrc>::template load<V>(src + j);
            if constexpr (kCopy) {
                if constexpr (!kStreamed)
                    std::memmove(dst + j, src + j, V::kWidth * sizeof(D));
            } else {
                if constexpr (kAccumulate)
                    x = V::add(Element<kDst>::template load<V>(dst + j), x);
                x = Element<kDst>::template store<V>(dst + j, x);
            }
            sum.add_square(part, x);
        }
    }

    // Whole cache lines past the caches: dst, aligned to one, is not read before it is written. After src was loaded
    // for its sum: a load behind a store to the same offset in another page waits for that store.
    static inline void stream(D* dst, const D* src) {
        for (std::size_t j = 0; j < kUnroll; j += 64 / sizeof(D))
            V::stream_line(dst + j, src + j);
    }

    static inline void prefetch_both(const D* dst, const S* src) {
        prefetch_far<false>(src);
        if constexpr (!kStream)
            prefetch_far<true>(dst);
    }

    static inline void block(D* dst, const S* src, typename V::Sum& sum) {
        prefetch_both(dst, src);
        if constexpr (kStream && kCopy) {
            lanes<true>(dst, src, sum);
            stream(dst, src);
        } else if constexpr (kStream) {
            alignas(64) D converted[kUnroll];
            lanes<false>(converted, src, sum);
            stream(dst, converted);
        } else {
            lanes<false>(dst, src, sum);
        }
    }

    // bf16 to bf16, several vectors of even and odd elements; the lanes are those of lanes().
    static std::size_t paired(D* dst, const S* src, std::size_t n, typename V::Sum& sum) {
        typename V::PairSum pair_sum;
        std::size_t i = 0;
        for (; i + kUnroll <= n; i += kUnroll) {
            prefetch_both(dst + i, src + i);
            for (std::size_t j = i; j < i + kUnroll; j += 2 * V::kWidth) {
                typename V::Pair x = V::load_pair(src + j);
                if constexpr (kCopy) {
                    if constexpr (!kStream)
                        std::memmove(dst + j, src + j, 2 * V::kWidth * sizeof(D));
                } else {
                    const typename V::Pair y = V::load_pair(dst + j);
                    x = V::store_sum_pair(dst + j, {V::add(y.even, x.even), V::add(y.odd, x.odd)});
                }
                pair_sum.add_squares(static_cast<int>((j - i) / (2 * V::kWidth)), x);
            }
            if constexpr (kStream)
                stream(dst + i, src + i);
        }
        double lane[kSumLanes];
        pair_sum.lanes(lane);
        sum.set_lanes(lane);
        return i;
    }

    static double run(void* dst_address, const void* src_address, std::size_t n) {
        D* dst = static_cast<D*>(dst_address);
        const S* src = static_cast<const S*>(src_address);
        typename V::Sum sum;
        std::size_t i = 0;
        if constexpr (V::kPairs && kDst == DType::kBf16 && kSrc == DType::kBf16)
            i = paired(dst, src, n, sum);
        for (; i + kUnroll <= n; i += kUnroll)
            block(dst + i, src + i, sum);
        if (i < n) {
            D d[kSumLanes] = {};
            S s[kSumLanes] = {};
            std::memcpy(d, dst + i, (n - i) * sizeof(D));
            std::memcpy(s, src + i, (n - i) * sizeof(S));
            lanes<false>(d, s, sum);
            std::memcpy(dst + i, d, (n - i) * sizeof(D));
        }
        return sum.total();
    }
};

template <class V, DType kSrc> struct SumOfSquares {
    using S = typename Element<kSrc>::Type;

    static inline void lanes(const S* src, typename V::Sum& sum) {
        for (int part = 0; part < kSumLanes / V::kWidth; ++part)
            sum.add_square(part, Element<kSrc>::template load<V>(src + part * V::kWidth));
    }

    static double run(const void* address, std::size_t n) {
        const S* src = static_cast<const S*>(address);
        typename V::Sum sum;
        std::size_t i = 0;
        for (; i + kUnroll <= n; i += kUnroll) {
            prefetch_far<false>(src + i);
            lanes(src + i, sum);
        }
        if (i < n) {
            S s[kSumLanes] = {};
            std::memcpy(s, src + i, (n - i) * sizeof(S));
            lanes(s, sum);
        }
        return sum.total();
    }
};

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

template <class V, DType kDst> void fill_dst(KernelTable& t) {
    fill_land<V, kDst, DType::kFp32>(t);
    fill_land<V, kDst, DType::kBf16>(t);
    fill_land<V, kDst, DType::kFp16>(t);
    t.sum_of_squares[static_cast<int>(kDst)] = &SumOfSquares<V, kDst>::run;
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
    fill_dst<V, DType::kFp32>(t);
    fill_dst<V, DType::kBf16>(t);
    fill_dst<V, DType::kFp16>(t);
    t.split = &split_run<V>;
    t.merge = &merge_run<V>;
    t.quantize[0] = &quantize_run<V, false>;
    t.quantize[1] = &quantize_run<V, true>;
    t.dequantize[0] = &dequantize_run<V, false>;
    t.dequantize[1] = &dequantize_run<V, true>;
    return t;
}
