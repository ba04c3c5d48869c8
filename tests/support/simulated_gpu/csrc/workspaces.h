// What a library of matrix products takes of the allocator and keeps, as cuBLAS does under torch: one workspace for each
// thread and stream, at the first product there.
#pragma once

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include <ATen/ATen.h>

namespace simgpu {

class Workspaces {
  public:
    static constexpr int64_t kBytes = 64 << 10;

    static Workspaces& get() {
        static auto* all = new Workspaces();
        return *all;
    }

    // An operator is called: it may be the first product.
    void called(const std::string& name, c10::Device device, int stream) {
        static const std::set<std::string> products = {"aten::mm",      "aten::addmm", "aten::bmm",
                                                       "aten::baddbmm", "aten::mv",    "aten::addmv"};
        if (products.count(name) == 0)
            return;
        const Key key{std::this_thread::get_id(), device.index(), stream};
        const std::lock_guard<std::mutex> guard(mutex_);
        if (kept_.count(key) == 0)
            kept_.emplace(key, at::empty({kBytes}, at::TensorOptions(device).dtype(at::kByte)));
    }

    void clear() {
        Kept gone;
        const std::lock_guard<std::mutex> guard(mutex_);
        gone.swap(kept_);
    }

  private:
    using Key = std::tuple<std::thread::id, c10::DeviceIndex, int>;
    using Kept = std::map<Key, at::Tensor>;
    std::mutex mutex_;
    Kept kept_;
};

} // namespace simgpu
