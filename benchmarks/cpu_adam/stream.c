/* The Adam-shaped memory stream: four arrays read, three of them written in place, next to no arithmetic.
 *
 * What a host optimizer can at best reach on fp32 state. The second variant prefetches as far ahead as the kernels do; the
 * faster of the two is the limit that everything is compared with. The copy is what the first landing of a gradient is
 * next to its sum of squares: memory takes streams that are only written slower than ones written in place. Compiled by
 * run.py with -O3 -march=native -fopenmp. */
#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define BLOCK 32 /* floats: two cache lines */
#define AHEAD 512

void adam_stream(float *restrict p, float *restrict m, float *restrict v, const float *restrict g, size_t n, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (size_t i = 0; i < n; ++i) {
        const float x = g[i];
        p[i] = p[i] * 0.999f + x;
        m[i] = m[i] * 0.9f + x;
        v[i] = v[i] * 0.99f + x;
    }
}

void adam_stream_prefetch(float *restrict p, float *restrict m, float *restrict v, const float *restrict g, size_t n,
                          int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t block = 0; block < n / BLOCK; ++block) {
        const size_t i = block * BLOCK;
        for (size_t line = 0; line < BLOCK; line += 16) {
            __builtin_prefetch(g + i + AHEAD + line, 0, 3);
            __builtin_prefetch(p + i + AHEAD + line, 1, 3);
            __builtin_prefetch(m + i + AHEAD + line, 1, 3);
            __builtin_prefetch(v + i + AHEAD + line, 1, 3);
        }
#pragma omp simd
        for (size_t j = i; j < i + BLOCK; ++j) {
            const float x = g[j];
            p[j] = p[j] * 0.999f + x;
            m[j] = m[j] * 0.9f + x;
            v[j] = v[j] * 0.99f + x;
        }
    }
}

/* Both aligned to a cache line, nbytes a multiple of 4096. Past the caches where that is x86. */
void copy_stream(char *restrict to, const char *restrict from, size_t nbytes, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t page = 0; page < nbytes / 4096; ++page) {
        char *const d = to + page * 4096;
        const char *const s = from + page * 4096;
#if defined(__x86_64__)
        for (size_t i = 0; i < 4096; i += 64) {
            _mm_prefetch(s + i + 8192, _MM_HINT_NTA);
#if defined(__AVX512F__)
            _mm512_stream_si512((void *)(d + i), _mm512_load_si512(s + i));
#else
            for (size_t j = i; j < i + 64; j += 16)
                _mm_stream_si128((__m128i *)(d + j), _mm_load_si128((const __m128i *)(s + j)));
#endif
        }
#else
        memcpy(d, s, 4096);
#endif
    }
}
