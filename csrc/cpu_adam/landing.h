// Passes over one block: landing, norms, splitting, filling and copying.
#pragma once

#include <vector>

#include "exact_sum.h"
#include "types.h"

namespace cpu_adam {

ExactSum land(void* dst, const void* src, std::size_t n, DType dst_dtype, DType src_dtype, bool accumulate,
              int num_threads);
// dst = dst + scale * part for each part in order (without accumulate the first one starts: dst = scale * part).
ExactSum land_parts(float* dst, const std::vector<const void*>& parts, std::size_t n, DType dtype, float scale,
                    bool accumulate, int num_threads);
ExactSum sum_of_squares(const void* src, std::size_t n, DType dtype, int num_threads);
void split_fp32(const float* src, std::uint16_t* hi, std::int16_t* lo, std::size_t n, int num_threads);
void merge_fp32(const std::uint16_t* hi, const std::int16_t* lo, float* dst, std::size_t n, int num_threads);
// Blocks of kStateBlock elements, counted from src or codes on; absmax has one element for each.
void quantize(const float* src, void* codes, float* absmax, std::size_t n, bool is_signed, int num_threads);
void dequantize(const void* codes, const float* absmax, float* dst, std::size_t n, bool is_signed, int num_threads);
void fill_bytes(void* dst, std::size_t nbytes, int byte, int num_threads);
void copy_bytes(void* dst, const void* src, std::size_t nbytes, int num_threads); // overlapping: one thread, memmove

constexpr std::size_t dtype_size(DType dtype) { return dtype == DType::kFp32 ? 4 : 2; }

} // namespace cpu_adam
