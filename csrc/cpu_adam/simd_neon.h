// Vector policy for 64-bit ARM (ASIMD is part of its baseline). Include after simd_scalar.h, in an anonymous namespace.

struct Neon {
    using F = float32x4_t;
    static constexpr bool kPairs = false;
    static constexpr int kWidth = 4;

    static inline F set1(float x) { return vdupq_n_f32(x); }
    static inline F load(const float* p) {
        return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)));
    }
    static inline void store(float* p, F x) { vst1q_u8(reinterpret_cast<std::uint8_t*>(p), vreinterpretq_u8_f32(x)); }
    static inline F add(F a, F b) { return vaddq_f32(a, b); }
    static inline F sub(F a, F b) { return vsubq_f32(a, b); }
    static inline F mul(F a, F b) { return vmulq_f32(a, b); }
    static inline F div(F a, F b) { return vdivq_f32(a, b); }
    static inline F sqrt(F a) { return vsqrtq_f32(a); }
    static inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static inline F maximum(F a, F b) { return vmaxq_f32(a, b); } // FMAX propagates NaN
    static inline F abs(F a) { return vabsq_f32(a); }
    static inline F copysign(F a, F b) { return vbslq_f32(vdupq_n_u32(0x80000000u), b, a); }
    static inline F larger(F a, F b) { return vmaxq_f32(a, b); } // of numbers
    static inline F smaller(F a, F b) { return vminq_f32(a, b); }
    static inline uint32x4_t load_bytes(const std::uint8_t* p) { // lane i holds byte i
        std::uint32_t packed;
        std::memcpy(&packed, p, sizeof(packed));
        return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(packed)))));
    }
    static inline F load_u8(const std::uint8_t* p) { return vcvtq_f32_u32(load_bytes(p)); }
    static inline F load_s8(const std::uint8_t* p) {
        return vcvtq_f32_s32(vshrq_n_s32(vreinterpretq_s32_u32(vshlq_n_u32(load_bytes(p), 24)), 24));
    }
    static inline void store_low_byte(std::uint8_t* p, F a) {
        const uint16x4_t words = vmovn_u32(vreinterpretq_u32_f32(a));
        const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
        const std::uint32_t packed = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
        std::memcpy(p, &packed, sizeof(packed));
    }
    static inline F sign(F a) { // zero and NaN stay
        const F positive = vbslq_f32(vcgtzq_f32(a), set1(1.0f), a);
        return vbslq_f32(vcltzq_f32(a), set1(-1.0f), positive);
    }
    static inline void stream_line(void* dst, const void* src) { std::memmove(dst, src, 64); }
    static inline void stream_fence() {}
    template <bool kBf16> static inline void stream_half(std::uint16_t* p, F x) {
        kBf16 ? store_bf16(p, x) : store_fp16(p, x);
    }
    static inline F opaque(F a) {
        asm("" : "+w"(a));
        return a;
    }

    static inline uint16x4_t load64(const void* p) {
        return vreinterpret_u16_u8(vld1_u8(static_cast<const std::uint8_t*>(p)));
    }
    static inline void store64(void* p, uint16x4_t x) {
        vst1_u8(static_cast<std::uint8_t*>(p), vreinterpret_u8_u16(x));
    }
    static inline F expand(uint16x4_t h) { return vreinterpretq_f32_u32(vshll_n_u16(h, 16)); }

    static inline F load_bf16(const std::uint16_t* p) { return expand(load64(p)); }
    static inline F load_fp16(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(load64(p))); }

    static inline F store_bf16(std::uint16_t* p, F x) {
        const uint32x4_t u = vreinterpretq_u32_f32(x), high = vshrq_n_u32(u, 16);
        const uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
        const uint32x4_t even = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16);
        const uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));
        const uint16x4_t h = vmovn_u32(vbslq_u32(vceqq_f32(x, x), even, quiet));
        store64(p, h);
        return expand(h);
    }
    static inline F store_fp16(std::uint16_t* p, F x) {
        const float16x4_t h = vcvt_f16_f32(x);
        store64(p, vreinterpret_u16_f16(h));
        return vcvt_f32_f16(h);
    }

    static inline F load_split(const std::uint16_t* hi, const std::int16_t* lo) {
        const int32x4_t low = vmovl_s16(vreinterpret_s16_u16(load64(lo)));
        return vreinterpretq_f32_u32(vaddq_u32(vshll_n_u16(load64(hi), 16), vreinterpretq_u32_s32(low)));
    }
    static inline F off_tie(F x) { // see simd_scalar.h
        const uint32x4_t u = vreinterpretq_u32_f32(x);
        const uint32x4_t tie = vceqq_u32(vandq_u32(u, vdupq_n_u32(0x1FFFF)), vdupq_n_u32(0x8000));
        return vreinterpretq_f32_u32(vaddq_u32(u, tie));
    }
    static inline void store_split(std::uint16_t* hi, std::int16_t* lo, F x) {
        x = off_tie(x);
        if (__builtin_expect(vminvq_u32(vceqq_f32(x, x)) == 0, 0))
            x = guard(x);
        const uint32x4_t u = vreinterpretq_u32_f32(x);
        store64(hi, vshrn_n_u32(vaddq_u32(u, vdupq_n_u32(0x8000)), 16));
        store64(lo, vmovn_u32(u));
    }
    static __attribute__((noinline, cold)) F guard(F x) {
        const uint32x4_t u = vreinterpretq_u32_f32(x), all = vdupq_n_u32(0x7FFFFFFF);
        const uint32x4_t hi = vandq_u32(vaddq_u32(u, vdupq_n_u32(0x8000)), all);
        const uint32x4_t hidden = vbicq_u32(vcleq_u32(hi, vdupq_n_u32(0x7F80FFFF)), vceqq_f32(x, x));
        const uint32x4_t quiet = vorrq_u32(vbicq_u32(u, all), vdupq_n_u32(0x7FC00000));
        return vreinterpretq_f32_u32(vbslq_u32(hidden, quiet, u));
    }

    struct Sum {
        float64x2_t lane[kSumLanes / 2] = {};
        inline void add_square(int part, F x) {
            const float64x2_t a = vcvt_f64_f32(vget_low_f32(x)), b = vcvt_high_f64_f32(x);
            lane[2 * part] = vfmaq_f64(lane[2 * part], a, a);
            lane[2 * part + 1] = vfmaq_f64(lane[2 * part + 1], b, b);
        }
        inline double total() const { // in the order of Scalar's
            float64x2_t s[kSumLanes / 2];
            for (int i = 0; i < kSumLanes / 2; ++i)
                s[i] = lane[i];
            for (int half = kSumLanes / 4; half > 0; half /= 2)
                for (int i = 0; i < half; ++i)
                    s[i] = vaddq_f64(s[i], s[i + half]);
            return vgetq_lane_f64(s[0], 0) + vgetq_lane_f64(s[0], 1);
        }
    };
};
