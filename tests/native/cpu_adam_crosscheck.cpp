// Runs every kernel of every instruction set that this CPU has on the same inputs and compares all bytes with the
// scalar kernels'. Needs neither Python nor torch, so it can be cross-compiled and run under an emulator; prints one
// digest that is the same on every architecture. NaNs count as equal with any payload: architectures differ in
// it. Splitting is checked for every upper half of an fp32 number with the lower halves around the borders of rounding;
// with the argument "all" for all 2^32 numbers, which takes minutes (and nothing else is run).
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

#include "dispatch.h"
#include "hypers.h"
#include "kernels.h"

using namespace cpu_adam;

namespace {

struct Random {
    std::uint64_t state;
    std::uint32_t next() {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        return static_cast<std::uint32_t>(state >> 32);
    }
};

constexpr std::uint32_t kSpecial[] = {0x00000000, 0x80000000, 0x00000001, 0x80000003, 0x007FFFFF, 0x7F7FFFFF,
                                      0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFF800001,
                                      0x477FE000, 0x477FF000, 0x33000000, 0x387FFFFF, 0x3F808000, 0x3F818000};

// A number of ordinary size, or now and then a special one.
float draw(Random& random, bool special) {
    std::uint32_t bits = (random.next() & 0x807FFFFFu) | ((100u + random.next() % 40u) << 23);
    if (special && random.next() % 8 == 0)
        bits = kSpecial[random.next() % (sizeof(kSpecial) / sizeof(kSpecial[0]))];
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

std::uint32_t canonical32(std::uint32_t u) { return (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : u; }
std::uint16_t canonical16(std::uint16_t h, std::uint16_t infinity) { return (h & 0x7FFFu) > infinity ? 0x7FFFu : h; }

// All streams of one call; 16-bit streams hold bf16 unless `half`.
struct Streams {
    std::vector<float> master, state[kMaxStates];
    std::vector<std::uint32_t> grad; // room for any dtype
    std::vector<std::uint16_t> weight;
    std::vector<std::int16_t> remainder;

    Streams(std::size_t n, bool special) : grad(n), weight(n), remainder(n) {
        Random random{n * 2 + special};
        for (std::size_t i = 0; i < n; ++i) {
            master.push_back(draw(random, special));
            grad[i] = random.next() & 0xBFFFBFFFu;
            weight[i] = static_cast<std::uint16_t>(random.next());
            remainder[i] = static_cast<std::int16_t>(random.next());
            if (special && random.next() % 8 == 0)
                remainder[i] = INT16_MIN; // next to an odd weight: the tie that a split moves
        }
        for (auto& s : state)
            for (std::size_t i = 0; i < n; ++i)
                s.push_back(draw(random, special));
        for (float& x : state[1])
            x = x < 0 ? -x : x;
    }

    std::vector<std::uint32_t> canonical(WeightForm form) const {
        std::vector<std::uint32_t> words;
        auto add_floats = [&](const std::vector<float>& values) {
            for (const float& value : values) {
                std::uint32_t u;
                std::memcpy(&u, &value, 4);
                words.push_back(canonical32(u));
            }
        };
        add_floats(master);
        for (const auto& s : state)
            add_floats(s);
        const std::uint16_t infinity = form == WeightForm::kMasterFp16 ? 0x7C00 : 0x7F80;
        for (std::size_t i = 0; i < weight.size(); ++i) {
            const std::uint16_t h = canonical16(weight[i], infinity);
            words.push_back(h);
            words.push_back(h == 0x7FFF ? 0 : static_cast<std::uint16_t>(remainder[i]));
        }
        return words;
    }
};

std::uint64_t digest_of(std::uint64_t digest, const void* data, std::size_t nbytes) {
    for (std::size_t i = 0; i < nbytes; ++i)
        digest = (digest ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211ULL;
    return digest;
}

// 8-bit and bf16 states; the codes and scales are what the scalar quantizer makes of the streams' states.
std::uint64_t stored_updates(const KernelTable& table) {
    std::uint64_t digest = 14695981039346656037ULL;
    const Coefficients c = coefficients_of(AdamHyper{1e-3, 0.9, 0.999, 1e-8, 0.01, true, 3.0, true, false}, 0.37);
    for (int rule : {static_cast<int>(Rule::kAdam), static_cast<int>(Rule::kLion)})
        for (int form = 0; form < kNumWeightForms; ++form)
            for (int grad = 0; grad < kNumDTypes; ++grad)
                for (std::size_t n : {1, 3, 7, 16, 33, 255, 256, 257, 1000})
                    for (bool special : {false, true})
                        for (int dtype : {1, 2}) {
                            const UpdateFn update = table.update[rule][dtype][form][grad];
                            if (update == nullptr)
                                continue;
                            Streams s(n, special);
                            std::vector<std::uint16_t> states[2];
                            std::vector<float> absmax[2];
                            const bool whole = form == static_cast<int>(WeightForm::kFp32);
                            UpdateArgs a{s.grad.data(), s.weight.data(), s.remainder.data(), s.master.data(), {}, {}, n,
                                         false};
                            if (whole) {
                                a.weight = s.master.data();
                                a.master = nullptr;
                            }
                            for (int i = 0; i < 2; ++i) {
                                states[i].resize(n);
                                absmax[i].resize((n + kStateBlock - 1) / kStateBlock);
                                if (dtype == 2)
                                    table.quantize[i == 0](s.state[i].data(), states[i].data(), absmax[i].data(), n);
                                a.state[i] = states[i].data();
                                a.absmax[i] = absmax[i].data();
                            }
                            for (int step = 0; step < 2; ++step)
                                update(a, c);
                            auto words = s.canonical(static_cast<WeightForm>(form));
                            for (int i = 0; i < 2; ++i) {
                                if (dtype == 2)
                                    table.dequantize[i == 0](states[i].data(), absmax[i].data(), s.state[i].data(), n);
                                for (const std::uint16_t h : states[i])
                                    words.push_back(dtype == 2 ? h : canonical16(h, 0x7F80));
                            }
                            for (const std::uint32_t word : s.canonical(static_cast<WeightForm>(form)))
                                words.push_back(word);
                            digest = digest_of(digest, words.data(), words.size() * 4);
                        }
    return digest;
}

std::vector<Coefficients> hypers() {
    return {coefficients_of(AdamHyper{1e-3, 0.9, 0.999, 1e-8, 0.01, true, 3.0, true, false}, 0.37),
            coefficients_of(AdamHyper{1e-3, 0.3, 0.99, 1e-8, 0.01, false, 9.0, true, true}, 0.37),
            coefficients_of(LionHyper{1e-3, 0.9, 0.3, 0.1, false}, 0.37),
            coefficients_of(AdagradHyper{0.05, 0.01, 1e-10, 0.01, 3.0, false}, 0.37),
            coefficients_of(SgdHyper{0.05, 0.9, 0.0, 0.01, true, false, false}, 0.37)};
}

std::uint64_t updates(const KernelTable& table) {
    std::uint64_t digest = 14695981039346656037ULL;
    for (int rule = 0; rule < kNumRules; ++rule)
        for (int form = 0; form < kNumWeightForms; ++form)
            for (int grad = 0; grad < kNumDTypes; ++grad)
                for (const Coefficients& c : hypers())
                    for (std::size_t n : {1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 70, 1000})
                        for (bool special : {false, true}) {
                            Streams s(n, special);
                            const bool whole = form == static_cast<int>(WeightForm::kFp32);
                            UpdateArgs a{s.grad.data(), s.weight.data(), s.remainder.data(), s.master.data(), {}, {}, n,
                                         false};
                            if (whole)
                                a.weight = s.master.data();
                            for (int i = 0; i < kMaxStates; ++i)
                                a.state[i] = s.state[i].data();
                            if (whole)
                                a.master = nullptr;
                            table.update[rule][0][form][grad](a, c);
                            const auto words = s.canonical(static_cast<WeightForm>(form));
                            digest = digest_of(digest, words.data(), words.size() * 4);
                        }
    return digest;
}

std::uint64_t digest_of_sums(std::uint64_t digest, const double* sums, std::size_t n) {
    for (std::size_t block = 0; block * kSumBlock < n; ++block) {
        const double sum = sums[block] != sums[block] ? -1.0 : sums[block];
        digest = digest_of(digest, &sum, 8);
    }
    return digest;
}

std::uint64_t digest_of_floats(std::uint64_t digest, const std::vector<float>& values) {
    for (const float& value : values) {
        std::uint32_t u;
        std::memcpy(&u, &value, 4);
        u = canonical32(u);
        digest = digest_of(digest, &u, 4);
    }
    return digest;
}

constexpr std::size_t kPassSizes[] = {1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70, 255, 256, 257, 300, 5000};
constexpr std::size_t kMostSums = (5000 + kSumBlock - 1) / kSumBlock;

std::uint64_t landings(const KernelTable& table, std::size_t n, bool special) {
    std::uint64_t digest = 14695981039346656037ULL;
    double sums[kMostSums];
    for (int mode = 0; mode < 2; ++mode)
        for (int to = 0; to < kNumDTypes; ++to)
            for (int from = 0; from < kNumDTypes; ++from) {
                Streams s(n, special), d(n + 1, special);
                void* dst = to == 0 ? static_cast<void*>(d.master.data()) : d.grad.data();
                const void* src = from == 0 ? static_cast<const void*>(s.master.data()) : s.grad.data();
                table.land[mode][to][from](dst, src, n, sums);
                digest = digest_of_sums(digest, sums, n);
                if (to == 0) {
                    digest = digest_of_floats(digest, d.master);
                } else {
                    const auto* halves = static_cast<const std::uint16_t*>(dst);
                    for (std::size_t i = 0; i < n; ++i) {
                        const std::uint16_t h = canonical16(halves[i], to == 2 ? 0x7C00 : 0x7F80);
                        digest = digest_of(digest, &h, 2);
                    }
                }
                table.sum_of_squares[from](src, n, sums);
                digest = digest_of_sums(digest, sums, n);
            }
    return digest;
}

// In the modes that need no whole lines; streams_the_same() has the other one.
std::uint64_t landings_of_parts(const KernelTable& table, std::size_t n, bool special) {
    std::uint64_t digest = 14695981039346656037ULL;
    double sums[kMostSums];
    for (int mode = 0; mode < 2; ++mode)
        for (int from = 0; from < kNumDTypes; ++from)
            for (std::size_t count : {1, 2, 3, 8}) {
                std::vector<Streams> parts;
                const void* address[kPartsAtOnce];
                for (std::size_t part = 0; part < count; ++part)
                    parts.emplace_back(n + part, special);
                for (std::size_t part = 0; part < count; ++part)
                    address[part] =
                        from == 0 ? static_cast<const void*>(parts[part].master.data()) : parts[part].grad.data();
                Streams d(n + 1, special);
                table.land_parts[mode][from](d.master.data(), address, count, n, 1.0f / 3.0f, sums);
                digest = digest_of_sums(digest_of_floats(digest, d.master), sums, n);
            }
    return digest;
}

// What goes past the caches is what goes through them.
bool streams_the_same(const KernelTable& table, std::size_t n) {
    Streams s(n, true);
    const void* parts[] = {s.grad.data(), s.master.data()};
    const std::size_t room = n + 64;
    bool same = true;
    for (int from = 0; from < kNumDTypes; ++from) {
        double sums[2][kMostSums];
        std::vector<float> dst[2];
        for (LandMode mode : {LandMode::kReplace, LandMode::kStream}) {
            const int index = mode == LandMode::kStream;
            dst[index].assign(room, 1.0f);
            auto* to = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(dst[index].data()) + 63) / 64 * 64);
            table.land_parts[static_cast<int>(mode)][from](to, parts, 2, n, 0.25f, sums[index]);
            dst[index].assign(to, to + n);
        }
        same &= digest_of_floats(1, dst[0]) == digest_of_floats(1, dst[1]);
        same &= digest_of_sums(1, sums[0], n) == digest_of_sums(1, sums[1], n);
    }
    return same;
}

std::uint64_t passes(const KernelTable& table) {
    std::uint64_t digest = 14695981039346656037ULL;
    for (std::size_t n : kPassSizes)
        for (bool special : {false, true}) {
            const std::uint64_t digests[] = {landings(table, n, special), landings_of_parts(table, n, special),
                                             streams_the_same(table, n)};
            digest = digest_of(digest, digests, sizeof(digests));
            Streams s(n, special);
            std::vector<float> back(n);
            table.split(s.master.data(), s.weight.data(), s.remainder.data(), n);
            table.merge(s.weight.data(), s.remainder.data(), back.data(), n);
            digest = digest_of(digest, s.weight.data(), n * 2);
            digest = digest_of(digest, s.remainder.data(), n * 2);
            digest = digest_of(digest, back.data(), n * 4);
        }
    return digest;
}

std::uint64_t splits(const KernelTable& table, bool every) {
    std::vector<std::uint32_t> lower{0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF};
    if (every) {
        lower.resize(1u << 16);
        std::iota(lower.begin(), lower.end(), 0u);
    }
    const std::size_t n = lower.size();
    std::vector<float> numbers(n), back(n);
    std::vector<std::uint16_t> hi(n);
    std::vector<std::int16_t> lo(n);
    std::uint64_t digest = 14695981039346656037ULL;
    for (std::uint32_t upper = 0; upper < 1u << 16; ++upper) {
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint32_t bits = upper << 16 | lower[i];
            std::memcpy(&numbers[i], &bits, 4);
        }
        table.split(numbers.data(), hi.data(), lo.data(), n);
        table.merge(hi.data(), lo.data(), back.data(), n);
        for (std::size_t i = 0; i < n; ++i) {
            std::uint32_t merged;
            std::memcpy(&merged, &back[i], 4);
            const std::uint64_t halves = std::uint64_t{hi[i]} << 48 | std::uint64_t{static_cast<std::uint16_t>(lo[i])}
                                                                          << 32;
            digest = (digest ^ (halves | merged)) * 1099511628211ULL;
        }
    }
    return digest;
}

} // namespace

int main(int argc, char** argv) {
    const bool every = argc > 1 && std::strcmp(argv[1], "all") == 0;
    struct {
        const char* name;
        const KernelTable* table;
    } const all[] = {{"scalar", kernels_scalar()},
                     {"avx2", kernels_avx2()},
                     {"avx512", kernels_avx512()},
                     {"avx512_bf16", kernels_avx512_bf16()},
                     {"neon", kernels_neon()}};
    for (const std::string& name : available_capabilities())
        for (const auto& entry : all)
            if (name == entry.name) {
                const std::uint64_t others[] = {every ? 0 : updates(*entry.table),
                                                every ? 0 : stored_updates(*entry.table),
                                                every ? 0 : passes(*entry.table)};
                std::printf("%s %016llx", entry.name, static_cast<unsigned long long>(splits(*entry.table, every)));
                for (const std::uint64_t digest : others)
                    std::printf(" %016llx", static_cast<unsigned long long>(digest));
                std::printf("\n");
            }
    return 0;
}
