// Kernels for 64-bit ARM.
#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include <cmath>
#include <cstring>

#include "simd_scalar.h"

namespace cpu_adam {
namespace {
#include "simd_neon.h"

// After the policy.
#include "kernels.inc.h"
} // namespace

const KernelTable* kernels_neon() {
    static const KernelTable table = make_table<Neon>();
    return &table;
}

} // namespace cpu_adam

#else

namespace cpu_adam {
const KernelTable* kernels_neon() { return nullptr; }
} // namespace cpu_adam

#endif
