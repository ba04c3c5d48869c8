// Several callers at once on the own pool: for the thread sanitizer. Every caller lands and sums, on 1 to 4 threads,
// and must find what one thread finds. Needs neither Python nor an OpenMP runtime.
#include <cstdio>
#include <thread>
#include <vector>

#include "landing.h"
#include "threads.h"

using namespace cpu_adam;

namespace {

constexpr std::size_t kNumel = 300007;

bool caller(int number) {
    std::vector<float> src(kNumel), once(kNumel, 1.0f);
    for (std::size_t i = 0; i < kNumel; ++i)
        src[i] = static_cast<float>((i * 7 + static_cast<std::size_t>(number)) % 1000) * 0.25f;
    const ExactSum expected = land(once.data(), src.data(), kNumel, DType::kFp32, DType::kFp32, true, 1);
    bool same = true;
    for (int round = 0; round < 12; ++round) {
        const int threads = 1 + (round + number) % 4;
        std::vector<float> dst(kNumel, 1.0f);
        same &= land(dst.data(), src.data(), kNumel, DType::kFp32, DType::kFp32, true, threads) == expected;
        same &= dst == once && sum_of_squares(dst.data(), kNumel, DType::kFp32, threads) == expected;
        std::vector<float> added(kNumel, 1.0f);
        const std::vector<const void*> parts{src.data()};
        same &= land_parts(added.data(), parts, kNumel, DType::kFp32, 1.0f, true, threads) == expected && added == once;
    }
    return same;
}

} // namespace

int main() {
    bool same[3] = {};
    std::vector<std::thread> callers;
    for (int number = 0; number < 3; ++number)
        callers.emplace_back([&same, number] { same[number] = caller(number); });
    for (std::thread& thread : callers)
        thread.join();
    std::printf("%s: %s\n", threading_backend().c_str(), same[0] && same[1] && same[2] ? "same" : "DIFFERENT");
    return same[0] && same[1] && same[2] ? 0 : 1;
}
