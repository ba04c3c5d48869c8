// Plain data shared by the binding, the drivers and the kernels of every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpu_adam {

enum class DType : int { kFp32 = 0, kBf16 = 1, kFp16 = 2 };
constexpr int kNumDTypes = 3;

// What the weight of one segment consists of. `kFp32` and `kBf16` have one stream that is read and written; the others
// have an fp32 value next to a bf16 or fp16 stream. A master without a compute copy is `kFp32` on the master.
enum class WeightForm : int { kFp32 = 0, kSplitBf16 = 1, kMasterBf16 = 2, kMasterFp16 = 3, kBf16 = 4 };
constexpr int kNumWeightForms = 5;

// What the states of a rule are stored in. kEightBit: one byte each, in blocks that share a scale (eight_bit.inc.h).
enum class StateDType : int { kFp32 = 0, kBf16 = 1, kEightBit = 2 };
constexpr int kNumStateDTypes = 3;
constexpr std::size_t kStateBlock = 256; // elements that share a scale

constexpr std::size_t state_size(StateDType dtype) {
    return dtype == StateDType::kFp32 ? 4 : dtype == StateDType::kBf16 ? 2 : 1;
}

// Landing: dst = src, dst = dst + src, or dst = src past the caches (dst aligned to 64 bytes).
enum class LandMode : int { kReplace, kAdd, kStream };
constexpr int kNumLandModes = 3;

enum class Rule : int { kAdam, kAdamAmsgrad, kLion, kAdagrad, kSgd, kSgdMomentum };
constexpr int kNumRules = 6;
constexpr int kMaxStates = 3;

// Weight of torch.lerp, which starts from the nearer end: from the new value when the weight is at least one half.
struct Lerp {
    float weight, rest;
    bool from_new;
};

// Scalars of one parameter group, derived in double and rounded once to float, as torch does for fp32 tensors. A rule
// reads those that it has.
struct Coefficients {
    float grad_factor;   // unscale * clip, negative when maximizing
    float weight_factor; // 1 - lr * weight_decay when decoupled, else 1
    float l2;            // weight_decay when coupled, else 0
    float neg_step_size; // -lr, over bias_correction1 in Adam, decayed in Adagrad
    float eps;
    Lerp lerp1, lerp2; // 1 - beta1, and 1 - beta2 in Lion
    float beta2;
    float one_minus_beta2;
    float root_correction2;            // sqrt(bias_correction2)
    float folded_neg_step, folded_eps; // both times root_correction2
    float momentum;
    float one_minus_dampening;
    bool nesterov;
    bool first; // SGD: the momentum buffer has no value yet
};

// One contiguous piece of a parameter: `n` elements at each non-null address.
struct UpdateArgs {
    const void* grad;
    void* weight;            // float for kFp32, else 16-bit
    std::int16_t* remainder; // kSplitBf16 only
    float* master;           // kMaster* only
    void* state[kMaxStates];
    float* absmax[kMaxStates]; // kEightBit only: one for each block of the state
    std::size_t n;
    bool stream; // kMaster*: write the copy past the caches where it is aligned to 64 bytes
};

// A stream of this size would push all else out of the caches, and be gone from them before it is read.
constexpr std::size_t kStreamBytes = std::size_t{1} << 22;

// Sums of squares are taken over blocks of this many elements, counted from the start of the parameter, and each block
// has 32 double lanes (element i goes to lane i % 32), which are added in one order. The sums of blocks are added
// exactly (exact_sum.h): the result depends on neither threads nor instruction set, nor on where a parameter is cut
// between two blocks. The last block may be shorter.
constexpr std::size_t kSumBlock = 4096; // with 256, a landing from memory took up to 1.2 times as long
constexpr int kSumLanes = 32;
constexpr std::size_t kChunk = 16384; // the most elements that a landing kernel is called with: whole blocks
constexpr std::size_t kSumsPerChunk = kChunk / kSumBlock;
constexpr std::size_t kPartsAtOnce = 8; // more streams than that do not fit in the ways of a level-one cache

using UpdateFn = void (*)(const UpdateArgs&, const Coefficients&);
// `sums` gets the sum of squares of each block of what dst then holds, or src.
using LandFn = void (*)(void* dst, const void* src, std::size_t n, double* sums);
using SumFn = void (*)(const void* src, std::size_t n, double* sums);
// dst = dst + scale * part for each part in order, every one rounded once; count is at most kPartsAtOnce.
using LandPartsFn = void (*)(float* dst, const void* const* parts, std::size_t count, std::size_t n, float scale,
                             double* sums);
using SplitFn = void (*)(const float* src, std::uint16_t* hi, std::int16_t* lo, std::size_t n);
using MergeFn = void (*)(const std::uint16_t* hi, const std::int16_t* lo, float* dst, std::size_t n);
// n is counted from the start of a block.
using QuantizeFn = void (*)(const float* src, void* codes, float* absmax, std::size_t n);
using DequantizeFn = void (*)(const void* codes, const float* absmax, float* dst, std::size_t n);

struct KernelTable {
    // [rule][state dtype][form][gradient dtype]; nullptr where a rule has no such states
    UpdateFn update[kNumRules][kNumStateDTypes][kNumWeightForms][kNumDTypes];
    LandFn land[kNumLandModes][kNumDTypes][kNumDTypes]; // [mode][dst dtype][src dtype]
    LandPartsFn land_parts[kNumLandModes][kNumDTypes];  // [mode][dtype of the parts]
    SumFn sum_of_squares[kNumDTypes];
    SplitFn split;
    MergeFn merge;
    QuantizeFn quantize[2]; // [signed]
    DequantizeFn dequantize[2];
};

} // namespace cpu_adam
