// Exact sums of squares. A block of kSumBlock elements has one sum in double, whose order of operations is fixed; the
// sums of blocks are added up as integers. So the result knows neither where a parameter was cut between two blocks nor
// what was added first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cpu_adam {

// A non-negative fixed-point number that holds every sum of squares of fp32 numbers: the least of these is 2^-298, and
// the last bit of that as a double 2^-350; 2^46 of the largest are below 2^302.
class ExactSum {
  public:
    static constexpr int kUnitExponent = -352; // of the last bit
    static constexpr std::size_t kBytes = 88;
    static constexpr std::size_t kSumsPerCarry = std::size_t{1} << 30; // so many may be added between two carry()

    bool non_finite = false; // an infinity or NaN was added; it does not count in the number

    // A sum of squares in double.
    void add(double x) {
        std::uint64_t bits;
        std::memcpy(&bits, &x, sizeof(bits));
        const unsigned exponent = static_cast<unsigned>(bits >> 52) & 0x7FFu;
        if (exponent - 1u >= 0x7FEu) { // zero, or not finite: none of the sums is subnormal
            non_finite |= exponent != 0;
            return;
        }
        const std::uint64_t mantissa = (bits & ((std::uint64_t{1} << 52) - 1)) | std::uint64_t{1} << 52;
        const unsigned position = exponent - static_cast<unsigned>(1075 + kUnitExponent), shift = position % 32;
        const std::uint64_t low = (mantissa & 0xFFFFFFFFu) << shift, high = (mantissa >> 32) << shift;
        std::uint64_t* const limb = limb_ + position / 32;
        limb[0] += low & 0xFFFFFFFFu;
        limb[1] += (low >> 32) + (high & 0xFFFFFFFFu);
        limb[2] += high >> 32;
    }

    void add(const ExactSum& other) {
        for (int i = 0; i < kLimbs; ++i)
            limb_[i] += other.limb_[i];
        non_finite |= other.non_finite;
    }

    // Brings every limb below 2^32.
    void carry() {
        std::uint64_t over = 0;
        for (std::uint64_t& limb : limb_) {
            const std::uint64_t lower = over + (limb & 0xFFFFFFFFu);
            over = (lower >> 32) + (limb >> 32);
            limb = lower & 0xFFFFFFFFu;
        }
    }

    // Little endian; after carry().
    void write(unsigned char* bytes) const {
        for (int i = 0; i < kLimbs; ++i)
            for (int byte = 0; byte < 4; ++byte)
                bytes[4 * i + byte] = static_cast<unsigned char>(limb_[i] >> (8 * byte));
    }

    bool operator==(const ExactSum& other) const { // after carry()
        return std::memcmp(limb_, other.limb_, sizeof(limb_)) == 0 && non_finite == other.non_finite;
    }

  private:
    static constexpr int kLimbs = 22;
    std::uint64_t limb_[kLimbs] = {}; // of 32 bits, with room for carries
};

} // namespace cpu_adam
