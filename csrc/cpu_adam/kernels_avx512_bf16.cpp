// Kernels for avx512 with instructions for bf16.
#define CPU_ADAM_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"
#define CPU_ADAM_SIMD "simd_avx512.h"
#define CPU_ADAM_POLICY Avx512
#define CPU_ADAM_TABLE kernels_avx512_bf16
#define CPU_ADAM_BF16_INSTRUCTIONS
#include "kernels_x86.inc.h"
