// Kernels for avx2. The standard headers come before the pragma: their inline functions are shared with other objects.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "simd_scalar.h"

namespace cpu_adam {
namespace {
#include "simd_avx2.h"

// After the policy.
#include "kernels.inc.h"
} // namespace

const KernelTable* kernels_avx2() {
    static const KernelTable table = make_table<Avx2>();
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
const KernelTable* kernels_avx2() { return nullptr; }
} // namespace cpu_adam

#endif
