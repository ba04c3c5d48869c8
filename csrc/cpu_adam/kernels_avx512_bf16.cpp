// Kernels for avx512_bf16. The standard headers come before the pragma: their inline functions are shared with other
// objects.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
// GCC bug 105593: its own _mm512_undefined_epi32
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))),   \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#endif

#define CPU_ADAM_BF16_INSTRUCTIONS
#include "simd_scalar.h"

namespace cpu_adam {
namespace {
#include "simd_avx512.h"

// After the policy.
#include "kernels.inc.h"
} // namespace

const KernelTable* kernels_avx512_bf16() {
    static const KernelTable table = make_table<Avx512>();
    return &table;
}

} // namespace cpu_adam

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace cpu_adam {
const KernelTable* kernels_avx512_bf16() { return nullptr; }
} // namespace cpu_adam

#endif
