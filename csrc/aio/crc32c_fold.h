/* CRC-32C of one long run by carry-less multiplication. V. Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction", Intel, 2009.
 *
 * A run is a polynomial over GF(2). What is read so far is kept as a remainder of several vectors; to add the next
 * vectors, the remainder is multiplied by x^(distance in bits) modulo the CRC's polynomial. For 64 bits a and the
 * constant K = x^(e - 33) mod P, both reflected, the carry-less product in 128 bits is a * x^e.
 *
 * Included by crc32c.c alone, for x86-64. */
#include <immintrin.h>

#define PCLMUL_TARGET __attribute__((target("sse4.2,pclmul")))
#define VPCLMUL_TARGET __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq")))

struct fold {
    uint64_t low, high; /* for the halves of a lane: x^(bits + 64) and x^bits */
};
static struct fold by_16, by_64, by_256; /* bytes */

/* x^exponent modulo P, reflected. */
static uint32_t power_of_x(unsigned exponent) {
    uint32_t value = 0x80000000u;
    while (exponent--)
        value = value & 1 ? value >> 1 ^ 0x82f63b78u : value >> 1;
    return value;
}

static struct fold fold_by(unsigned nbytes) {
    return (struct fold){power_of_x(8 * nbytes + 64 - 33), power_of_x(8 * nbytes - 33)};
}

static void prepare_folds(void) {
    by_16 = fold_by(16);
    by_64 = fold_by(64);
    by_256 = fold_by(256);
}

PCLMUL_TARGET static inline __m128i lane_of(const struct fold* k) {
    return _mm_set_epi64x((long long)k->high, (long long)k->low);
}

PCLMUL_TARGET static inline __m128i folded(__m128i x, __m128i k, __m128i next) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next);
}

PCLMUL_TARGET static inline uint32_t crc_of_lane(__m128i x) {
    return (uint32_t)_mm_crc32_u64(_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(x)), (uint64_t)_mm_extract_epi64(x, 1));
}

/* Four lanes of 16 bytes. n is a multiple of 64, and at least that. */
PCLMUL_TARGET static uint32_t fold_128(uint32_t crc, const unsigned char* at, uint64_t n) {
    const __m128i *in = (const __m128i*)at, k = lane_of(&by_64), one = lane_of(&by_16);
    __m128i x0 = _mm_xor_si128(_mm_loadu_si128(in), _mm_cvtsi32_si128((int)crc));
    __m128i x1 = _mm_loadu_si128(in + 1), x2 = _mm_loadu_si128(in + 2), x3 = _mm_loadu_si128(in + 3);
    for (in += 4, n -= 64; n; in += 4, n -= 64) {
        x0 = folded(x0, k, _mm_loadu_si128(in));
        x1 = folded(x1, k, _mm_loadu_si128(in + 1));
        x2 = folded(x2, k, _mm_loadu_si128(in + 2));
        x3 = folded(x3, k, _mm_loadu_si128(in + 3));
    }
    return crc_of_lane(folded(folded(folded(x0, one, x1), one, x2), one, x3));
}

VPCLMUL_TARGET static inline __m512i folded_512(__m512i x, __m512i k, __m512i next) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), next,
                                     0x96); /* xor of three */
}

/* Four vectors of 64 bytes. n is a multiple of 256, and at least that. */
VPCLMUL_TARGET static uint32_t fold_512(uint32_t crc, const unsigned char* at, uint64_t n) {
    const __m128i one = lane_of(&by_16);
    const __m512i k = _mm512_broadcast_i32x4(lane_of(&by_256)), vector = _mm512_broadcast_i32x4(lane_of(&by_64));
    const __m512i first = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc));
    __m512i x0 = _mm512_xor_si512(_mm512_loadu_si512(at), first), x1 = _mm512_loadu_si512(at + 64);
    __m512i x2 = _mm512_loadu_si512(at + 128), x3 = _mm512_loadu_si512(at + 192);
    for (at += 256, n -= 256; n; at += 256, n -= 256) {
        x0 = folded_512(x0, k, _mm512_loadu_si512(at));
        x1 = folded_512(x1, k, _mm512_loadu_si512(at + 64));
        x2 = folded_512(x2, k, _mm512_loadu_si512(at + 128));
        x3 = folded_512(x3, k, _mm512_loadu_si512(at + 192));
    }
    x3 = folded_512(folded_512(folded_512(x0, vector, x1), vector, x2), vector, x3);
    __m128i lane = folded(_mm512_castsi512_si128(x3), one, _mm512_extracti32x4_epi32(x3, 1));
    lane = folded(lane, one, _mm512_extracti32x4_epi32(x3, 2));
    return crc_of_lane(folded(lane, one, _mm512_extracti32x4_epi32(x3, 3)));
}
