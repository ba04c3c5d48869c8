// Vector policy for AVX-512 (F, BW, DQ, VL), with the bf16 conversion instructions when kBf16Instructions.
// Include after the target pragma and simd_scalar.h, inside an anonymous namespace.

template <bool kBf16Instructions>
struct Avx512 {
    using F = __m512;
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
    static inline F opaque(F a) { asm("" : "+v"(a)); return a; }

    static inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static inline void store256(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
    static inline F expand(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }

    static inline F load_bf16(const std::uint16_t* p) { return expand(load256(p)); }
    static inline F load_fp16(const std::uint16_t* p) { return _mm512_cvtph_ps(load256(p)); }

    static inline __m256i round_with_integers(F x) {
        const __m512i u = _mm512_castps_si512(x), high = _mm512_srli_epi32(u, 16);
        const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        const __m512i even = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
        const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
        return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(even, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet));
    }
    static inline __m256i round_bf16(F x) {
#ifdef __AVX512BF16__
        if (kBf16Instructions) {
            // The instruction takes subnormals for zero; we, like torch, keep them.
            if (__builtin_expect(_mm512_fpclass_ps_mask(x, 0x20) == 0, 1)) {
                const __m256bh h = _mm512_cvtneps_pbh(x);
                __m256i result;
                __builtin_memcpy(&result, &h, sizeof(result));
                return result;
            }
        }
#endif
        return round_with_integers(x);
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
    static inline void store_split(std::uint16_t* hi, std::int16_t* lo, F x) {
        if (__builtin_expect(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0, 0)) x = guard(x);
        const __m512i u = _mm512_castps_si512(x);
        store256(hi, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16)));
        store256(lo, _mm512_cvtepi32_epi16(u));
    }
    static __attribute__((noinline, cold)) F guard(F x) {
        alignas(64) std::uint32_t u[16];
        _mm512_store_si512(u, _mm512_castps_si512(x));
        for (auto& element : u) element = split_guard(element);
        return _mm512_castsi512_ps(_mm512_load_si512(u));
    }

    struct Sum {
        __m512d low, high;
        // Spelled out: an implicit constructor is compiled without the target pragma.
        inline Sum() : low(_mm512_setzero_pd()), high(_mm512_setzero_pd()) {}
        inline void add_square(int, F x) {
            const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
            const __m512d b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
            low = _mm512_fmadd_pd(a, a, low);
            high = _mm512_fmadd_pd(b, b, high);
        }
        inline double total() const {
            double lane[kSumLanes];
            _mm512_storeu_pd(lane, low);
            _mm512_storeu_pd(lane + 8, high);
            return Scalar::sum_lanes(lane);
        }
    };
};
