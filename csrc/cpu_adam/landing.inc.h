// Landing: dst = src or dst + src or dst + scale * parts, and the sums of squares of the blocks of what dst then holds.
// Included by kernels.inc.h. The caller fences stores past the caches.

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

static_assert(kUnroll == kSumLanes, "each step adds one element to each lane");
static_assert(kSumBlock % kUnroll == 0, "a block is whole steps");

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

    static inline void lines(D* dst, const S* src, typename V::Sum& sum) {
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
    template <class PairSum> static inline void paired(D* dst, const S* src, PairSum& sum) {
        prefetch_both(dst, src);
        for (std::size_t j = 0; j < kUnroll; j += 2 * V::kWidth) {
            typename V::Pair x = V::load_pair(src + j);
            if constexpr (kCopy) {
                if constexpr (!kStream)
                    std::memmove(dst + j, src + j, 2 * V::kWidth * sizeof(D));
            } else {
                const typename V::Pair y = V::load_pair(dst + j);
                x = V::store_sum_pair(dst + j, {V::add(y.even, x.even), V::add(y.odd, x.odd)});
            }
            sum.add_squares(static_cast<int>(j / (2 * V::kWidth)), x);
        }
        if constexpr (kStream)
            stream(dst, src);
    }

    // A whole block; its sum of squares.
    static inline double block(D* dst, const S* src) {
        if constexpr (V::kPairs && kDst == DType::kBf16 && kSrc == DType::kBf16) {
            typename V::PairSum sum;
            for (std::size_t i = 0; i < kSumBlock; i += kUnroll)
                paired(dst + i, src + i, sum);
            return sum.total();
        } else {
            typename V::Sum sum;
            for (std::size_t i = 0; i < kSumBlock; i += kUnroll)
                lines(dst + i, src + i, sum);
            return sum.total();
        }
    }

    // The last one, of fewer elements: zeros for the rest change no sum.
    static double short_block(D* dst, const S* src, std::size_t n) {
        typename V::Sum sum;
        std::size_t i = 0;
        for (; i + kUnroll <= n; i += kUnroll)
            lines(dst + i, src + i, sum);
        if (i < n) {
            D d[kUnroll] = {};
            S s[kUnroll] = {};
            std::memcpy(d, dst + i, (n - i) * sizeof(D));
            std::memcpy(s, src + i, (n - i) * sizeof(S));
            lanes<false>(d, s, sum);
            std::memcpy(dst + i, d, (n - i) * sizeof(D));
        }
        return sum.total();
    }

    static void run(void* dst_address, const void* src_address, std::size_t n, double* sums) {
        D* dst = static_cast<D*>(dst_address);
        const S* src = static_cast<const S*>(src_address);
        std::size_t i = 0;
        for (; i + kSumBlock <= n; i += kSumBlock)
            *sums++ = block(dst + i, src + i);
        if (i < n)
            *sums = short_block(dst + i, src + i, n - i);
    }
};

// ---- parts of several ranks: dst = dst + scale * part, in order, in one pass over dst ----

template <class V, DType kSrc, LandMode kMode> struct LandParts {
    using F = typename V::F;
    using S = typename Element<kSrc>::Type;
    static constexpr int kVectors = static_cast<int>(kUnroll) / V::kWidth;

    struct Parts {
        const void* const* address;
        std::size_t count;
        F scale;
        inline const S* at(std::size_t part, std::size_t i) const { return static_cast<const S*>(address[part]) + i; }
    };

    // kUnroll elements from dst and from parts at i.
    static inline void lanes(float* dst, const Parts& parts, std::size_t i, typename V::Sum& sum) {
        F x[kVectors];
        std::size_t part = 0;
        if constexpr (kMode == LandMode::kAdd) {
            for (int v = 0; v < kVectors; ++v)
                x[v] = V::load(dst + v * V::kWidth);
        } else {
            const S* const first = parts.at(part++, i);
            for (int v = 0; v < kVectors; ++v)
                x[v] = V::mul(Element<kSrc>::template load<V>(first + v * V::kWidth), parts.scale);
        }
        for (; part < parts.count; ++part) {
            const S* const src = parts.at(part, i);
            for (int v = 0; v < kVectors; ++v)
                x[v] = V::fma(Element<kSrc>::template load<V>(src + v * V::kWidth), parts.scale, x[v]);
        }
        for (int v = 0; v < kVectors; ++v) {
            V::store(dst + v * V::kWidth, x[v]);
            sum.add_square(v, x[v]);
        }
    }

    static inline void lines(float* dst, const Parts& parts, std::size_t i, typename V::Sum& sum) {
        for (std::size_t part = 0; part < parts.count; ++part)
            prefetch_far<false>(parts.at(part, i));
        if constexpr (kMode == LandMode::kStream) {
            alignas(64) float result[kUnroll];
            lanes(result, parts, i, sum);
            for (std::size_t j = 0; j < kUnroll; j += 16)
                V::stream_line(dst + j, result + j);
        } else {
            prefetch_far<true>(dst);
            lanes(dst, parts, i, sum);
        }
    }

    // n elements, fewer than kUnroll, at i.
    static void tail(float* dst, const Parts& parts, std::size_t i, std::size_t n, typename V::Sum& sum) {
        float d[kUnroll] = {};
        S copies[kPartsAtOnce][kUnroll] = {};
        const void* address[kPartsAtOnce];
        for (std::size_t part = 0; part < parts.count; ++part) {
            std::memcpy(copies[part], parts.at(part, i), n * sizeof(S));
            address[part] = copies[part];
        }
        std::memcpy(d, dst, n * sizeof(float));
        lanes(d, Parts{address, parts.count, parts.scale}, 0, sum);
        std::memcpy(dst, d, n * sizeof(float));
    }

    static __attribute__((flatten)) void run(float* dst, const void* const* address, std::size_t count, std::size_t n,
                                             float scale, double* sums) {
        const Parts parts{address, count, V::set1(scale)};
        std::size_t i = 0;
        while (i < n) {
            const std::size_t end = i + kSumBlock < n ? i + kSumBlock : n;
            typename V::Sum sum;
            for (; i + kUnroll <= end; i += kUnroll)
                lines(dst + i, parts, i, sum);
            if (i < end) {
                tail(dst + i, parts, i, end - i, sum);
                i = end;
            }
            *sums++ = sum.total();
        }
    }
};

template <class V, DType kSrc> struct SumOfSquares {
    using S = typename Element<kSrc>::Type;

    static inline void lanes(const S* src, typename V::Sum& sum) {
        for (int part = 0; part < kSumLanes / V::kWidth; ++part)
            sum.add_square(part, Element<kSrc>::template load<V>(src + part * V::kWidth));
    }

    static void run(const void* address, std::size_t n, double* sums) {
        const S* src = static_cast<const S*>(address);
        std::size_t i = 0;
        while (i < n) {
            const std::size_t end = i + kSumBlock < n ? i + kSumBlock : n;
            typename V::Sum sum;
            for (; i + kUnroll <= end; i += kUnroll) {
                prefetch_far<false>(src + i);
                lanes(src + i, sum);
            }
            if (i < end) {
                S s[kUnroll] = {};
                std::memcpy(s, src + i, (end - i) * sizeof(S));
                lanes(s, sum);
                i = end;
            }
            *sums++ = sum.total();
        }
    }
};
