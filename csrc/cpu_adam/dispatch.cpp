#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>

#include "kernels.h"

namespace cpu_adam {
namespace {

struct Choice {
    std::string name;
    const KernelTable* table;
};

std::vector<Choice> supported() {
    std::vector<Choice> choices{{"scalar", kernels_scalar()}};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx2)
        choices.push_back({"avx2", kernels_avx2()});
    if (avx512)
        choices.push_back({"avx512", kernels_avx512()});
    if (avx512 && __builtin_cpu_supports("avx512bf16"))
        choices.push_back({"avx512_bf16", kernels_avx512_bf16()});
#elif defined(__aarch64__)
    choices.push_back({"neon", kernels_neon()});
#endif
    return choices;
}

Choice choose() {
    const std::vector<Choice> choices = supported();
    const char* wanted = std::getenv("DEEPOFFLOAD_CPU_CAPABILITY");
    if (wanted == nullptr || *wanted == '\0')
        return choices.back();
    std::string names;
    for (const Choice& choice : choices) {
        if (choice.name == wanted)
            return choice;
        names += (names.empty() ? "" : ", ") + choice.name;
    }
    throw std::invalid_argument("DEEPOFFLOAD_CPU_CAPABILITY is '" + std::string(wanted) +
                                "', which this CPU or build does not have; set it to one of " + names +
                                ", or unset it");
}

const Choice& chosen() {
    static const Choice choice = choose();
    return choice;
}

} // namespace

std::vector<std::string> available_capabilities() {
    std::vector<std::string> names;
    for (const Choice& choice : supported())
        names.push_back(choice.name);
    return names;
}

const std::string& capability() { return chosen().name; }

const KernelTable& kernels() { return *chosen().table; }

} // namespace cpu_adam
