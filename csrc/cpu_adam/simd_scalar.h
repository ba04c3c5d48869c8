// Vector policy of width one in portable C++: the reference of every other policy, bit for bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#define CPU_ADAM_SCALAR_REGISTER "+x"
#elif defined(__aarch64__)
#define CPU_ADAM_SCALAR_REGISTER "+w"
#else
#define CPU_ADAM_SCALAR_REGISTER "+m"
#endif

namespace {

inline std::uint32_t bits_of(float x) {
    std::uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}
inline float float_of(std::uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

// Round to nearest even; a NaN stays one: quiet, sign and upper payload kept (as the CPU's own instructions do).
inline std::uint16_t bf16_of(float x) {
    const std::uint32_t u = bits_of(x);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return static_cast<std::uint16_t>((u >> 16) | 0x40u);
    return static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

inline float float_of_bf16(std::uint16_t h) { return float_of(static_cast<std::uint32_t>(h) << 16); }

inline std::uint16_t fp16_of(float x) {
    const std::uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u)
        return static_cast<std::uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
    if (magnitude >= 0x477FF000u)
        return static_cast<std::uint16_t>(sign | 0x7C00u); // rounds past 65504, or infinite
    if (magnitude < 0x38800000u) { // subnormal: the addition aligns and rounds the mantissa to even at 2^-24
        const std::uint32_t rounded = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
        return static_cast<std::uint16_t>(sign | rounded);
    }
    const std::uint32_t rebased = magnitude - (112u << 23);
    return static_cast<std::uint16_t>(sign | ((rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13));
}

inline float float_of_fp16(std::uint16_t h) {
    const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1Fu;
    const std::uint32_t mantissa = h & 0x3FFu;
    if (exponent == 0x1F) // infinite, or a NaN, which is quieted
        return float_of(sign | 0x7F800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return float_of(sign | bits_of(magnitude));
    }
    return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// How a master x is split: hi is x rounded to the nearest bf16, ties to even, and lo = x - (hi << 16), modulo 2^32, a
// signed 16-bit integer. An even hi owns both ties next to it, 65,537 masters with remainders from -0x8000 to +0x8000,
// and the last of them has no code. So that master, the tie that rounds towards zero, is moved towards zero by one
// unit in its last place first: it then rounds to the same hi, and every other one is split without loss. Without that
// tie, to round half up is to round half to even, which saves the look at the last bit of hi.
inline std::uint32_t off_tie(std::uint32_t u) { return u - ((u & 0x1FFFFu) == 0x8000u ? 1u : 0u); }

// A NaN whose rounded upper half would be an infinity or a zero becomes the canonical quiet NaN of its sign, so that
// the bf16 weight always shows it. For what off_tie has returned.
inline std::uint32_t split_guard(std::uint32_t u) {
    const bool nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    const bool shown = (((u + 0x8000u) >> 16) & 0x7FFFu) > 0x7F80u;
    return nan && !shown ? (u & 0x80000000u) | 0x7FC00000u : u;
}

struct Scalar {
    using F = float;
    static constexpr bool kPairs = false;
    static constexpr int kWidth = 1;

    static inline F set1(float x) { return x; }
    static inline F load(const float* p) {
        F x;
        std::memcpy(&x, p, 4);
        return x;
    }
    static inline void store(float* p, F x) { std::memcpy(p, &x, 4); }
    static inline F add(F a, F b) { return a + b; }
    static inline F sub(F a, F b) { return a - b; }
    static inline F mul(F a, F b) { return a * b; }
    static inline F div(F a, F b) { return a / b; }
    static inline F sqrt(F a) { return std::sqrt(a); }
    static inline F fma(F a, F b, F c) { return std::fma(a, b, c); }
    static inline F maximum(F a, F b) { return a != a || b != b ? a + b : (a > b ? a : b); }
    static inline F abs(F a) { return float_of(bits_of(a) & 0x7FFFFFFFu); }
    static inline F copysign(F a, F b) { return float_of((bits_of(a) & 0x7FFFFFFFu) | (bits_of(b) & 0x80000000u)); }
    static inline F larger(F a, F b) { return a > b ? a : b; } // of numbers
    static inline F smaller(F a, F b) { return a < b ? a : b; }
    static inline F load_u8(const std::uint8_t* p) { return static_cast<float>(*p); }
    static inline F load_s8(const std::uint8_t* p) { return static_cast<float>(static_cast<std::int8_t>(*p)); }
    static inline void store_low_byte(std::uint8_t* p, F a) { *p = static_cast<std::uint8_t>(bits_of(a)); }
    static inline F sign(F a) { return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a; } // zero and NaN stay
    static inline void stream_line(void* dst, const void* src) { std::memmove(dst, src, 64); }
    static inline void stream_fence() {}
    template <bool kBf16> static inline void stream_half(std::uint16_t* p, F x) {
        kBf16 ? store_bf16(p, x) : store_fp16(p, x);
    }
    static inline F opaque(F a) {
        asm("" : CPU_ADAM_SCALAR_REGISTER(a));
        return a;
    }

    static inline F load_bf16(const std::uint16_t* p) { return float_of_bf16(load16(p)); }
    static inline F load_fp16(const std::uint16_t* p) { return float_of_fp16(load16(p)); }
    static inline F store_bf16(std::uint16_t* p, F x) {
        const std::uint16_t h = bf16_of(x);
        std::memcpy(p, &h, 2);
        return float_of_bf16(h);
    }
    static inline F store_fp16(std::uint16_t* p, F x) {
        const std::uint16_t h = fp16_of(x);
        std::memcpy(p, &h, 2);
        return float_of_fp16(h);
    }
    static inline F load_split(const std::uint16_t* hi, const std::int16_t* lo) {
        const auto low = static_cast<std::int16_t>(load16(reinterpret_cast<const std::uint16_t*>(lo)));
        return float_of((static_cast<std::uint32_t>(load16(hi)) << 16) +
                        static_cast<std::uint32_t>(static_cast<std::int32_t>(low)));
    }
    static inline void store_split(std::uint16_t* hi, std::int16_t* lo, F x) {
        const std::uint32_t u = split_guard(off_tie(bits_of(x)));
        const auto h = static_cast<std::uint16_t>((u + 0x8000u) >> 16), l = static_cast<std::uint16_t>(u);
        std::memcpy(hi, &h, 2);
        std::memcpy(lo, &l, 2);
    }

    struct Sum {
        double lane[cpu_adam::kSumLanes] = {};
        inline void add_square(int part, F x) {
            const double d = x;
            lane[part] = std::fma(d, d, lane[part]);
        }
        // The one order in which all policies add lanes: the upper half to the lower one, until one is left.
        inline double total() const {
            double s[cpu_adam::kSumLanes];
            for (int i = 0; i < cpu_adam::kSumLanes; ++i)
                s[i] = lane[i];
            for (int half = cpu_adam::kSumLanes / 2; half > 0; half /= 2)
                for (int i = 0; i < half; ++i)
                    s[i] += s[i + half];
            return s[0];
        }
    };

  private:
    static inline std::uint16_t load16(const std::uint16_t* p) {
        std::uint16_t h;
        std::memcpy(&h, p, 2);
        return h;
    }
};

} // namespace
