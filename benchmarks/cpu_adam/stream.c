/* The Adam-shaped memory stream: four arrays read, three of them written in place, next to no arithmetic.
 *
 * What a host optimizer can at best reach on fp32 state. The second variant prefetches as far ahead as the kernels do; the
 * faster of the two is the limit that everything is compared with. Compiled by run.py with -O3 -march=native -fopenmp. */
#include <stddef.h>

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
