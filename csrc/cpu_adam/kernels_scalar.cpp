// Kernels in portable C++: the reference, and the fallback on CPUs without a vector path.
#include "kernels.h"

#include <cmath>
#include <cstring>

#include "simd_scalar.h"

namespace cpu_adam {
namespace {
#include "kernels.inc.h"
} // namespace

const KernelTable* kernels_scalar() {
    static const KernelTable table = make_table<Scalar>();
    return &table;
}

} // namespace cpu_adam
