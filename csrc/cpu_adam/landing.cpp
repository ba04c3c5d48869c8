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
constexpr std::size_t kPartsPerCarry = 4096;
static_assert(kPartsPerCarry * kChunksPerTask * kSumsPerChunk <= ExactSum::kSumsPerCarry, "no limb overflows");

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

// Adds the sums that pass(begin, count, sums) gives for the blocks of each chunk. They are added exactly, so it does
// not matter which thread has computed which. done() is called after several chunks, by their thread.
template <class Pass, class Done>
ExactSum chunk_sums(std::size_t n, int num_threads, const Pass& pass, const Done& done) {
    const std::size_t num_chunks = (n + kChunk - 1) / kChunk;
    const std::size_t share = num_chunks / (4 * static_cast<std::size_t>(num_threads));
    const std::size_t chunks = std::min(std::max(share, std::size_t{1}), kChunksPerTask);
    std::vector<ExactSum> parts((num_chunks + chunks - 1) / chunks);
    pieces(n, chunks * kChunk, num_threads, [&](std::size_t begin, std::size_t count) {
        ExactSum sum; // on this thread's stack: neighbours in `parts` share cache lines
        for (std::size_t i = begin; i < begin + count; i += kChunk) {
            const std::size_t numel = std::min(kChunk, begin + count - i);
            double sums[kSumsPerChunk] = {};
            pass(i, numel, sums);
            for (std::size_t block = 0; block * kSumBlock < numel; ++block)
                sum.add(sums[block]);
        }
        parts[begin / (chunks * kChunk)] = sum;
        done();
    });
    for (std::size_t i = 1; i < parts.size(); ++i) {
        parts[0].add(parts[i]);
        if (i % kPartsPerCarry == 0)
            parts[0].carry();
    }
    parts[0].carry();
    return parts[0];
}

// Whether a block that is only written goes past the caches.
bool is_streamed(const void* dst, std::size_t nbytes) {
    return nbytes >= kStreamBytes && reinterpret_cast<std::uintptr_t>(dst) % 64 == 0;
}

} // namespace

ExactSum land(void* dst, const void* src, std::size_t n, DType dst_dtype, DType src_dtype, bool accumulate,
              int num_threads) {
    const std::size_t dst_size = dtype_size(dst_dtype), src_size = dtype_size(src_dtype);
    const LandMode replace = is_streamed(dst, n * dst_size) ? LandMode::kStream : LandMode::kReplace;
    const LandMode mode = accumulate ? LandMode::kAdd : replace;
    const LandFn kernel =
        kernels().land[static_cast<int>(mode)][static_cast<int>(dst_dtype)][static_cast<int>(src_dtype)];
    return chunk_sums(
        n, num_threads,
        [&](std::size_t begin, std::size_t count, double* sums) {
            kernel(static_cast<char*>(dst) + begin * dst_size, static_cast<const char*>(src) + begin * src_size, count,
                   sums);
        },
        [mode] {
            if (mode == LandMode::kStream)
                stream_fence();
        });
}

ExactSum land_parts(float* dst, const std::vector<const void*>& parts, std::size_t n, DType dtype, float scale,
                    bool accumulate, int num_threads) {
    const auto& table = kernels().land_parts;
    const auto kernel = [&](LandMode mode) { return table[static_cast<int>(mode)][static_cast<int>(dtype)]; };
    const LandPartsFn add = kernel(LandMode::kAdd);
    const bool at_once = parts.size() <= kPartsAtOnce;
    const bool streamed = at_once && !accumulate && is_streamed(dst, n * sizeof(float));
    const LandPartsFn first = kernel(accumulate ? LandMode::kAdd : streamed ? LandMode::kStream : LandMode::kReplace);
    const std::size_t size = dtype_size(dtype);
    return chunk_sums(
        n, num_threads,
        [&](std::size_t begin, std::size_t count, double* sums) {
            // More parts than a cache has ways come in groups; the chunk of dst stays in a cache meanwhile.
            for (std::size_t part = 0; part < parts.size(); part += kPartsAtOnce) {
                const void* address[kPartsAtOnce];
                const std::size_t group = std::min(kPartsAtOnce, parts.size() - part);
                for (std::size_t i = 0; i < group; ++i)
                    address[i] = static_cast<const char*>(parts[part + i]) + begin * size;
                (part == 0 ? first : add)(dst + begin, address, group, count, scale, sums);
            }
        },
        [streamed] {
            if (streamed)
                stream_fence();
        });
}

ExactSum sum_of_squares(const void* src, std::size_t n, DType dtype, int num_threads) {
    const SumFn kernel = kernels().sum_of_squares[static_cast<int>(dtype)];
    const std::size_t size = dtype_size(dtype);
    return chunk_sums(
        n, num_threads,
        [&](std::size_t begin, std::size_t count, double* sums) {
            kernel(static_cast<const char*>(src) + begin * size, count, sums);
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
