// What streams are given to do, and how they do it.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include "clocks.h"

namespace simgpu {

enum class Mode { late, random, eager };

struct Settings {
    Mode mode = Mode::late;
    bool check = true;
    uint64_t seed = 0;
    double delay_max_s = 0.002;
};

// What an event stands for once it was recorded: all that its stream had been given by then.
struct Version {
    int stream;
    bool done;
    Clock clock;
    std::chrono::steady_clock::time_point time;
};
using VersionRef = std::shared_ptr<Version>;

struct Task {
    enum class Kind { work, wait, record };
    Kind kind;
    const std::string* name;
    VersionRef version;                // of wait and record
    std::function<void()> run;         // of work; must not need Python
    std::vector<Use> uses;             // of work
    std::function<uint64_t()> watched; // a hash of host bytes that nobody may change before the work is done
    uint64_t expected = 0;
    std::vector<c10::Storage> keep; // host memory that must not go away before the work is done
};

struct Stream {
    int index;
    c10::DeviceIndex device;
    std::deque<Task> queue;
    Clock clock;
};

} // namespace simgpu
