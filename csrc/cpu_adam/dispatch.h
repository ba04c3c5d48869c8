// Which instruction set the kernels use on this CPU.
#pragma once

#include <string>
#include <vector>

#include "types.h"

namespace cpu_adam {

// Instruction sets of this build that this CPU and operating system can run, best last; "scalar" is always the first.
std::vector<std::string> available_capabilities();

// The best of them, or the one named by the environment variable DEEPOFFLOAD_CPU_CAPABILITY (read once).
// Throws std::invalid_argument when it names none of them.
const std::string& capability();
const KernelTable& kernels();

} // namespace cpu_adam
