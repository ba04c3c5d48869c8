// Kernels for avx2.
#define CPU_ADAM_TARGET "avx2,fma,f16c"
#define CPU_ADAM_SIMD "simd_avx2.h"
#define CPU_ADAM_POLICY Avx2
#define CPU_ADAM_TABLE kernels_avx2
#include "kernels_x86.inc.h"
