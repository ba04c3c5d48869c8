// One table of kernels per instruction set; nullptr where this build has none.
#pragma once

#include "types.h"

namespace cpu_adam {

const KernelTable* kernels_scalar();
const KernelTable* kernels_avx2();
const KernelTable* kernels_avx512();
const KernelTable* kernels_avx512_bf16();
const KernelTable* kernels_neon();

} // namespace cpu_adam
