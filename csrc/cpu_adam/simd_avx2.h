// Vector policy for AVX2 with FMA and F16C. Include after the target pragma and simd_scalar.h, in an anonymous
// namespace.

struct Avx2 {
    using F = __m256;
    static constexpr bool kPairs = true;
    static constexpr int kWidth = 8;

    static inline F set1(float x) { return _mm256_set1_ps(x); }
    static inline F load(const float* p) { return _mm256_loadu_ps(p); }
    static inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
    static inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static inline F div(F a, F b) { return _mm256_div_ps(a, b); }
    static inline F sqrt(F a) { return _mm256_sqrt_ps(a); }
    static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static inline F maximum(F a, F b) {
        const F unordered = _mm256_cmp_ps(a, b, _CMP_UNORD_Q);
        return _mm256_blendv_ps(_mm256_max_ps(a, b), _mm256_add_ps(a, b), unordered);
    }
    static inline F abs(F a) { return _mm256_andnot_ps(set1(-0.0f), a); }
    static inline F copysign(F a, F b) { return _mm256_or_ps(abs(a), _mm256_and_ps(b, set1(-0.0f))); }
    static inline F larger(F a, F b) { return _mm256_max_ps(a, b); } // of numbers
    static inline F smaller(F a, F b) { return _mm256_min_ps(a, b); }
    static inline __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
    static inline F load_u8(const std::uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(p))); }
    static inline F load_s8(const std::uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(p))); }
    static inline void store_low_byte(std::uint8_t* p, F a) {
        const __m128i words = narrow(_mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0xFF)));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
    }
    static inline F sign(F a) { // zero and NaN stay
        const F zero = _mm256_setzero_ps();
        const F positive = _mm256_blendv_ps(a, set1(1.0f), _mm256_cmp_ps(a, zero, _CMP_GT_OQ));
        return _mm256_blendv_ps(positive, set1(-1.0f), _mm256_cmp_ps(a, zero, _CMP_LT_OQ));
    }
    static inline void stream_line(void* dst, const void* src) {
        const __m256i* from = static_cast<const __m256i*>(src);
        const __m256i low = _mm256_loadu_si256(from), high = _mm256_loadu_si256(from + 1);
        _mm256_stream_si256(static_cast<__m256i*>(dst), low);
        _mm256_stream_si256(static_cast<__m256i*>(dst) + 1, high);
    }
    static inline void stream_fence() { _mm_sfence(); }
    template <bool kBf16> static inline void stream_half(std::uint16_t* p, F x) {
        const __m128i h = kBf16 ? narrow(_mm256_srli_epi32(round_upper(x), 16))
                                : _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_stream_si128(reinterpret_cast<__m128i*>(p), h);
    }
    static inline F opaque(F a) {
        asm("" : "+x"(a));
        return a;
    }

    static inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    static inline void store128(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
    // The low halves of eight 32-bit integers that fit in 16 bits.
    static inline __m128i narrow(__m256i x) {
        return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    }

    static inline F load_bf16(const std::uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
    }
    static inline F load_fp16(const std::uint16_t* p) { return _mm256_cvtph_ps(load128(p)); }

    // Rounded to nearest even in the upper half of each 32 bits; the lower half is garbage.
    static inline __m256i round_upper(F x) {
        const __m256i u = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        const __m256i even = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
        const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
        return _mm256_blendv_epi8(even, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    }
    static inline F store_bf16(std::uint16_t* p, F x) {
        const __m256i h = _mm256_srli_epi32(round_upper(x), 16);
        store128(p, narrow(h));
        return _mm256_castsi256_ps(_mm256_slli_epi32(h, 16));
    }
    static inline F store_fp16(std::uint16_t* p, F x) {
        const __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        store128(p, h);
        return _mm256_cvtph_ps(h);
    }

    static inline F load_split(const std::uint16_t* hi, const std::int16_t* lo) {
        const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(hi)), 16);
        return _mm256_castsi256_ps(_mm256_add_epi32(high, _mm256_cvtepi16_epi32(load128(lo))));
    }
    static inline F off_tie(F x) { // see simd_scalar.h
        const __m256i u = _mm256_castps_si256(x);
        const __m256i tie =
            _mm256_cmpeq_epi32(_mm256_and_si256(u, _mm256_set1_epi32(0x1FFFF)), _mm256_set1_epi32(0x8000));
        return _mm256_castsi256_ps(_mm256_add_epi32(u, tie));
    }
    static inline void store_split(std::uint16_t* hi, std::int16_t* lo, F x) {
        x = off_tie(x);
        if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0, 0))
            x = guard(x);
        const __m256i u = _mm256_castps_si256(x);
        store128(hi, narrow(_mm256_srli_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x8000)), 16)));
        store128(lo, narrow(_mm256_and_si256(u, _mm256_set1_epi32(0xFFFF))));
    }
    // Two vectors: one look at both for NaNs and lower halves of 0x8000 costs less than off_tie and a look at each.
    static inline void store_split_pair(std::uint16_t* hi, std::int16_t* lo, F x, F y) {
        const __m256i u = _mm256_castps_si256(x), v = _mm256_castps_si256(y);
        const __m256i all = _mm256_set1_epi32(0xFFFF), half = _mm256_set1_epi32(0x8000);
        const __m256i low = narrow_pair(_mm256_and_si256(u, all), _mm256_and_si256(v, all));
        const __m256i tie = _mm256_cmpeq_epi16(low, _mm256_set1_epi16(INT16_MIN));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_UNORD_Q));
        if (__builtin_expect(_mm256_movemask_epi8(_mm256_or_si256(tie, nan)) != 0, 0))
            return store_split_each(hi, lo, x, y);
        const __m256i high = narrow_pair(_mm256_srli_epi32(_mm256_add_epi32(u, half), 16),
                                         _mm256_srli_epi32(_mm256_add_epi32(v, half), 16));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(hi), high);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lo), low);
    }
    static __attribute__((noinline, cold)) void store_split_each(std::uint16_t* hi, std::int16_t* lo, F x, F y) {
        store_split(hi, lo, x);
        store_split(hi + kWidth, lo + kWidth, y);
    }
    // The low halves of 16 integers of 32 bits that fit in 16 bits.
    static inline __m256i narrow_pair(__m256i x, __m256i y) {
        return _mm256_permute4x64_epi64(_mm256_packus_epi32(x, y), 0xD8);
    }
    static __attribute__((noinline, cold)) F guard(F x) {
        const __m256i u = _mm256_castps_si256(x), all = _mm256_set1_epi32(0x7FFFFFFF);
        const __m256i hi = _mm256_and_si256(_mm256_add_epi32(u, _mm256_set1_epi32(0x8000)), all);
        const __m256i shown = _mm256_cmpgt_epi32(hi, _mm256_set1_epi32(0x7F80FFFF));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m256i quiet = _mm256_or_si256(_mm256_andnot_si256(all, u), _mm256_set1_epi32(0x7FC00000));
        return _mm256_castsi256_ps(_mm256_blendv_epi8(u, quiet, _mm256_andnot_si256(shown, nan)));
    }

    // 16 bf16 as the fp32 values of even and odd elements: no shuffle is needed either way.
    struct Pair {
        F even, odd;
    };
    static inline __m256i upper() { return _mm256_set1_epi32(static_cast<int>(0xFFFF0000u)); }
    static inline Pair unpack(__m256i h) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(h, 16)), _mm256_castsi256_ps(_mm256_and_si256(h, upper()))};
    }
    static inline Pair load_pair(const std::uint16_t* p) {
        return unpack(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    // Only for sums of two bf16: their NaNs are quiet and have no payload in the lower half, so none can carry or
    // vanish.
    static inline F round_sum(F x) {
        const __m256i u = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        const __m256i sum = _mm256_add_epi32(odd, _mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)));
        return _mm256_castsi256_ps(_mm256_and_si256(sum, upper()));
    }
    static inline Pair store_sum_pair(std::uint16_t* p, Pair x) {
        const Pair y{round_sum(x.even), round_sum(x.odd)};
        const __m256i even = _mm256_srli_epi32(_mm256_castps_si256(y.even), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_or_si256(even, _mm256_castps_si256(y.odd)));
        return y;
    }
    struct PairSum {
        __m256d lane_[8]; // lanes 0 2 4 6, .. 24 26 28 30, 1 3 5 7, .. 25 27 29 31
        inline PairSum() {
            for (__m256d& sum : lane_)
                sum = _mm256_setzero_pd();
        }
        inline void add_squares(int part, Pair x) {
            add_squares_of(lane_[2 * part], lane_[2 * part + 1], x.even);
            add_squares_of(lane_[4 + 2 * part], lane_[5 + 2 * part], x.odd);
        }
        inline double total() const { // in the order of Scalar's Sum
            const __m256d even = _mm256_add_pd(_mm256_add_pd(lane_[0], lane_[2]), _mm256_add_pd(lane_[1], lane_[3]));
            const __m256d odd = _mm256_add_pd(_mm256_add_pd(lane_[4], lane_[6]), _mm256_add_pd(lane_[5], lane_[7]));
            return total_of(add_halves(even)) + total_of(add_halves(odd));
        }
    };
    // The upper half added to the lower one.
    static inline __m128d add_halves(__m256d x) {
        return _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
    }
    static inline double total_of(__m128d x) { return _mm_cvtsd_f64(x) + _mm_cvtsd_f64(_mm_unpackhi_pd(x, x)); }

    static inline void add_squares_of(__m256d& low, __m256d& high, F x) {
        const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
        const __m256d b = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        low = _mm256_fmadd_pd(a, a, low);
        high = _mm256_fmadd_pd(b, b, high);
    }

    struct Sum {
        __m256d lane[8];
        // Spelled out: an implicit constructor is compiled without the target pragma.
        inline Sum() {
            for (__m256d& sum : lane)
                sum = _mm256_setzero_pd();
        }
        inline void add_square(int part, F x) { add_squares_of(lane[2 * part], lane[2 * part + 1], x); }
        inline double total() const {
            const __m256d low = _mm256_add_pd(_mm256_add_pd(lane[0], lane[4]), _mm256_add_pd(lane[2], lane[6]));
            const __m256d high = _mm256_add_pd(_mm256_add_pd(lane[1], lane[5]), _mm256_add_pd(lane[3], lane[7]));
            return total_of(add_halves(_mm256_add_pd(low, high)));
        }
    };
};
