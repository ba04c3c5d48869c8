#include "landing.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cpu_adam {
namespace {

constexpr std::size_t kBytesPerTask = std::size_t{1} << 18;
constexpr std::size_t kChunksPerTask = 16;

// Makes stores past the caches visible to the thread that waits for this one. Waiting for them to drain takes as long
// as several KiB do, so this is not done for every chunk.
void stream_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Calls pass(begin, count) over n items in pieces of `piece`, in parallel.
template <class Pass> void pieces(std::size_t n, std::size_t piece, int num_threads, const Pass& pass) {
    parallel_for((n + piece - 1) / piece, num_threads, [&](std::size_t index) {
        const std::size_t begin = index * piece;
        pass(begin, std::min(piece, n - begin));
    });
}

// Adds what pass(begin, count) returns for each chunk, in chunk order, no matter which thread computed it. done() is
// called after several chunks, by their thread.
template <class Pass, class Done>
double chunk_sums(std::size_t n, int num_threads, const Pass& pass, const Done& done) {
    std::vector<double> sums((n + kSumChunk - 1) / kSumChunk);
    const std::size_t share = sums.size() / (4 * static_cast<std::size_t>(num_threads));
    const std::size_t chunks = std::min(std::max(share, std::size_t{1}), kChunksPerTask);
    pieces(n, chunks * kSumChunk, num_threads, [&](std::size_t begin, std::size_t count) {
        for (std::size_t i = begin; i < begin + count; i += kSumChunk)
            sums[i / kSumChunk] = pass(i, std::min(kSumChunk, begin + count - i));
        done();
    });
    double total = 0.0;
    for (const double sum : sums)
        total += sum;
    return total;
}

} // namespace

double land(void* dst, const void* src, std::size_t n, DType dst_dtype, DType src_dtype, bool accumulate,
            int num_threads) {
    const std::size_t dst_size = dtype_size(dst_dtype), src_size = dtype_size(src_dtype);
    const bool aligned = reinterpret_cast<std::uintptr_t>(dst) % 64 == 0;
    const LandMode replace = n * dst_size >= kStreamBytes && aligned ? LandMode::kStream : LandMode::kReplace;
    const LandMode mode = accumulate ? LandMode::kAdd : replace;
    const LandFn kernel =
        kernels().land[static_cast<int>(mode)][static_cast<int>(dst_dtype)][static_cast<int>(src_dtype)];
    return chunk_sums(
        n, num_threads,
        [&](std::size_t begin, std::size_t count) {
            return kernel(static_cast<char*>(dst) + begin * dst_size, static_cast<const char*>(src) + begin * src_size,
                          count);
        },
        [mode] {
            if (mode == LandMode::kStream)
                stream_fence();
        });
}

double sum_of_squares(const void* src, std::size_t n, DType dtype, int num_threads) {
    const SumFn kernel = kernels().sum_of_squares[static_cast<int>(dtype)];
    const std::size_t size = dtype_size(dtype);
    return chunk_sums(
        n, num_threads,
        [&](std::size_t begin, std::size_t count) {
            return kernel(static_cast<const char*>(src) + begin * size, count);
        },
        [] {});
}

void split_fp32(const float* src, std::uint16_t* hi, std::int16_t* lo, std::size_t n, int num_threads) {
    const SplitFn kernel = kernels().split;
    pieces(n, kBytesPerTask / 4, num_threads,
           [&](std::size_t begin, std::size_t count) { kernel(src + begin, hi + begin, lo + begin, count); });
}

void merge_fp32(const std::uint16_t* hi, const std::int16_t* lo, float* dst, std::size_t n, int num_threads) {
    const MergeFn kernel = kernels().merge;
    pieces(n, kBytesPerTask / 4, num_threads,
           [&](std::size_t begin, std::size_t count) { kernel(hi + begin, lo + begin, dst + begin, count); });
}

void quantize(const float* src, void* codes, float* absmax, std::size_t n, bool is_signed, int num_threads) {
    const QuantizeFn kernel = kernels().quantize[is_signed];
    pieces(n, kBytesPerTask / 4, num_threads, [&](std::size_t begin, std::size_t count) {
        kernel(src + begin, static_cast<char*>(codes) + begin, absmax + begin / kStateBlock, count);
    });
}

void dequantize(const void* codes, const float* absmax, float* dst, std::size_t n, bool is_signed, int num_threads) {
    const DequantizeFn kernel = kernels().dequantize[is_signed];
    pieces(n, kBytesPerTask / 4, num_threads, [&](std::size_t begin, std::size_t count) {
        kernel(static_cast<const char*>(codes) + begin, absmax + begin / kStateBlock, dst + begin, count);
    });
}

void fill_bytes(void* dst, std::size_t nbytes, int byte, int num_threads) {
    pieces(nbytes, kBytesPerTask, num_threads,
           [&](std::size_t begin, std::size_t count) { std::memset(static_cast<char*>(dst) + begin, byte, count); });
}

void copy_bytes(void* dst, const void* src, std::size_t nbytes, int num_threads) {
    char* to = static_cast<char*>(dst);
    const char* from = static_cast<const char*>(src);
    if (to < from + nbytes && from < to + nbytes) {
        std::memmove(to, from, nbytes);
        return;
    }
    pieces(nbytes, kBytesPerTask, num_threads,
           [&](std::size_t begin, std::size_t count) { std::memcpy(to + begin, from + begin, count); });
}

} // namespace cpu_adam
