// The frame of the kernels for one x86 instruction set. Included once by each kernels_*.cpp, which says:
// CPU_ADAM_TARGET: the instruction sets, as the target attribute spells them
// CPU_ADAM_SIMD: the header with the policy; CPU_ADAM_POLICY: its class
// CPU_ADAM_TABLE: the function that gives the table, a null pointer on other processors
// The standard headers come before the pragma: their inline functions are shared with other objects.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>

#define CPU_ADAM_PRAGMA_OF(text) _Pragma(#text)
#define CPU_ADAM_PRAGMA(text) CPU_ADAM_PRAGMA_OF(text)

#if defined(__clang__)
CPU_ADAM_PRAGMA(clang attribute push(__attribute__((target(CPU_ADAM_TARGET))), apply_to = function))
#else
// GCC bug 105593: its own _mm512_undefined_epi32
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
CPU_ADAM_PRAGMA(GCC target(CPU_ADAM_TARGET))
#endif

#include "simd_scalar.h"

namespace cpu_adam {
namespace {
#include CPU_ADAM_SIMD

// After the policy.
#include "kernels.inc.h"
} // namespace

const KernelTable* CPU_ADAM_TABLE() {
    static const KernelTable table = make_table<CPU_ADAM_POLICY>();
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
const KernelTable* CPU_ADAM_TABLE() { return nullptr; }
} // namespace cpu_adam

#endif
