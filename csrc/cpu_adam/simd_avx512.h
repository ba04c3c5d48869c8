// Vector policy for AVX-512 (F, BW, DQ, VL); with CPU_ADAM_BF16_INSTRUCTIONS defined, also for AVX512_BF16.
// Include after the target pragma and simd_scalar.h, inside an anonymous namespace. (A macro of our own: g++ before 13
// does not define __AVX512BF16__ for a target pragma.)

struct Avx512 {
    using F = __m512;
    static constexpr bool kPairs = true;
    static constexpr int kWidth = 16;

    static inline F set1(float x) { return _mm512_set1_ps(x); }
    static inline F load(const float* p) { return _mm512_loadu_ps(p); }
    static inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
    static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
    static inline F sqrt(F a) { return _mm512_sqrt_ps(a); }
    static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static inline F maximum(F a, F b) {
        const __mmask16 unordered = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
        return _mm512_mask_add_ps(_mm512_max_ps(a, b), unordered, a, b);
    }
    static inline F abs(F a) { return _mm512_abs_ps(a); }
    static inline F copysign(F a, F b) { return _mm512_or_ps(abs(a), _mm512_and_ps(b, set1(-0.0f))); }
    static inline F larger(F a, F b) { return _mm512_max_ps(a, b); } // of numbers
    static inline F smaller(F a, F b) { return _mm512_min_ps(a, b); }
    static inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    static inline F load_u8(const std::uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load128(p))); }
    static inline F load_s8(const std::uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(p))); }
    static inline void store_low_byte(std::uint8_t* p, F a) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_castps_si512(a)));
    }
    static inline F sign(F a) { // zero and NaN stay
        const F positive = _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_GT_OQ), set1(1.0f));
        return _mm512_mask_mov_ps(positive, _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_LT_OQ), set1(-1.0f));
    }
    static inline void stream_line(void* dst, const void* src) {
        _mm512_stream_si512(static_cast<__m512i*>(dst), _mm512_loadu_si512(src));
    }
    static inline void stream_fence() { _mm_sfence(); }
    template <bool kBf16> static inline void stream_half(std::uint16_t* p, F x) {
        const int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), kBf16 ? round_bf16(x) : _mm512_cvtps_ph(x, nearest));
    }
    static inline F opaque(F a) {
        asm("" : "+v"(a));
        return a;
    }

    static inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static inline void store256(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
    static inline F expand(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }

    static inline F load_bf16(const std::uint16_t* p) { return expand(load256(p)); }
    static inline F load_fp16(const std::uint16_t* p) { return _mm512_cvtph_ps(load256(p)); }

    // Rounded to nearest even in the upper half of each 32 bits; the lower half is garbage.
    static inline __m512i round_upper(F x) {
        const __m512i u = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        const __m512i even = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
        return _mm512_mask_or_epi32(even, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
    }
    static inline __m256i round_bf16(F x) {
#ifdef CPU_ADAM_BF16_INSTRUCTIONS
        // The instruction takes subnormals for zero; we, like torch, keep them.
        if (__builtin_expect(_mm512_fpclass_ps_mask(x, 0x20) == 0, 1)) {
            const __m256bh h = _mm512_cvtneps_pbh(x);
            __m256i result;
            __builtin_memcpy(&result, &h, sizeof(result));
            return result;
        }
#endif
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_upper(x), 16));
    }
    static inline F store_bf16(std::uint16_t* p, F x) {
        const __m256i h = round_bf16(x);
        store256(p, h);
        return expand(h);
    }
    static inline F store_fp16(std::uint16_t* p, F x) {
        const __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        store256(p, h);
        return _mm512_cvtph_ps(h);
    }

    static inline F load_split(const std::uint16_t* hi, const std::int16_t* lo) {
        const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(hi)), 16);
        return _mm512_castsi512_ps(_mm512_add_epi32(high, _mm512_cvtepi16_epi32(load256(lo))));
    }
    static inline F off_tie(F x) { // see simd_scalar.h
        const __m512i u = _mm512_castps_si512(x);
        const __mmask16 tie =
            _mm512_cmpeq_epi32_mask(_mm512_and_si512(u, _mm512_set1_epi32(0x1FFFF)), _mm512_set1_epi32(0x8000));
        return _mm512_castsi512_ps(_mm512_mask_sub_epi32(u, tie, u, _mm512_set1_epi32(1)));
    }
    static inline void store_split(std::uint16_t* hi, std::int16_t* lo, F x) {
        x = off_tie(x);
        if (__builtin_expect(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0, 0))
            x = guard(x);
        const __m512i u = _mm512_castps_si512(x);
        store256(hi, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16)));
        store256(lo, _mm512_cvtepi32_epi16(u));
    }
    // Two vectors: one look at both for NaNs and lower halves of 0x8000 costs less than off_tie and a look at each.
    static inline void store_split_pair(std::uint16_t* hi, std::int16_t* lo, F x, F y) {
        const __m512i u = _mm512_castps_si512(x), v = _mm512_castps_si512(y), half = _mm512_set1_epi32(0x8000);
        const __m512i low = _mm512_permutex2var_epi16(u, every_other(0), v);
        const __mmask32 tie = _mm512_cmpeq_epi16_mask(low, _mm512_set1_epi16(INT16_MIN));
        if (__builtin_expect(!_kortestz_mask32_u8(tie, _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q)), 0))
            return store_split_each(hi, lo, x, y);
        _mm512_storeu_si512(lo, low);
        _mm512_storeu_si512(
            hi, _mm512_permutex2var_epi16(_mm512_add_epi32(u, half), every_other(1), _mm512_add_epi32(v, half)));
    }
    // The 16-bit elements first, first + 2, ... of two vectors.
    static inline __m512i every_other(int first) {
        const __m512i from_zero = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30,
                                                   28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        return _mm512_add_epi16(from_zero, _mm512_set1_epi16(static_cast<short>(first)));
    }
    static __attribute__((noinline, cold)) void store_split_each(std::uint16_t* hi, std::int16_t* lo, F x, F y) {
        store_split(hi, lo, x);
        store_split(hi + kWidth, lo + kWidth, y);
    }
    static __attribute__((noinline, cold)) F guard(F x) {
        const __m512i u = _mm512_castps_si512(x), all = _mm512_set1_epi32(0x7FFFFFFF);
        const __m512i hi = _mm512_and_si512(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), all);
        const __mmask16 hidden = _mm512_mask_cmp_epi32_mask(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), hi,
                                                            _mm512_set1_epi32(0x7F80FFFF), _MM_CMPINT_LE);
        const __m512i quiet = _mm512_or_si512(_mm512_andnot_si512(all, u), _mm512_set1_epi32(0x7FC00000));
        return _mm512_castsi512_ps(_mm512_mask_mov_epi32(u, hidden, quiet));
    }

    // 32 bf16 as the fp32 values of even and odd elements: no shuffle is needed either way.
    struct Pair {
        F even, odd;
    };
    static inline __m512i upper() { return _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)); }
    static inline Pair unpack(__m512i h) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(h, 16)), _mm512_castsi512_ps(_mm512_and_si512(h, upper()))};
    }
    static inline Pair load_pair(const std::uint16_t* p) { return unpack(_mm512_loadu_si512(p)); }
    // Only for sums of two bf16: their NaNs are quiet and have no payload in the lower half, so none can carry or
    // vanish.
    static inline F round_sum(F x) {
        const __m512i u = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        const __m512i sum = _mm512_add_epi32(odd, _mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)));
        return _mm512_castsi512_ps(_mm512_and_si512(sum, upper()));
    }
    static inline Pair store_sum_pair(std::uint16_t* p, Pair x) {
        const Pair y{round_sum(x.even), round_sum(x.odd)};
        const __m512i even = _mm512_srli_epi32(_mm512_castps_si512(y.even), 16);
        _mm512_storeu_si512(p, _mm512_or_si512(even, _mm512_castps_si512(y.odd)));
        return y;
    }
    struct PairSum {
        __m512d lane_[4]; // lanes 0, 2, .. 14; 16, .. 30; 1, 3, .. 15; 17, .. 31
        inline PairSum() {
            for (__m512d& sum : lane_)
                sum = _mm512_setzero_pd();
        }
        inline void add_squares(int, Pair x) {
            add_squares_of(lane_[0], lane_[1], x.even);
            add_squares_of(lane_[2], lane_[3], x.odd);
        }
        inline double total() const { // in the order of Scalar's Sum
            const __m256d even = add_halves(_mm512_add_pd(lane_[0], lane_[1]));
            const __m256d odd = add_halves(_mm512_add_pd(lane_[2], lane_[3]));
            return total_of(add_halves(even)) + total_of(add_halves(odd));
        }
    };
    // The upper half added to the lower one.
    static inline __m256d add_halves(__m512d x) {
        return _mm256_add_pd(_mm512_castpd512_pd256(x), _mm512_extractf64x4_pd(x, 1));
    }
    static inline __m128d add_halves(__m256d x) {
        return _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
    }
    static inline double total_of(__m128d x) { return _mm_cvtsd_f64(x) + _mm_cvtsd_f64(_mm_unpackhi_pd(x, x)); }

    static inline void add_squares_of(__m512d& low, __m512d& high, F x) {
        const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
        const __m512d b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        low = _mm512_fmadd_pd(a, a, low);
        high = _mm512_fmadd_pd(b, b, high);
    }

    struct Sum {
        __m512d lane[4];
        // Spelled out: an implicit constructor is compiled without the target pragma.
        inline Sum() {
            for (__m512d& sum : lane)
                sum = _mm512_setzero_pd();
        }
        inline void add_square(int part, F x) { add_squares_of(lane[2 * part], lane[2 * part + 1], x); }
        inline double total() const {
            const __m512d eight = _mm512_add_pd(_mm512_add_pd(lane[0], lane[2]), _mm512_add_pd(lane[1], lane[3]));
            return total_of(add_halves(add_halves(eight)));
        }
    };
};
