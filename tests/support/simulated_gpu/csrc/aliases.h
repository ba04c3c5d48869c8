// CPU tensors over the bytes of device tensors, by which CPU kernels compute for the simulated GPU; and what is copied.
#pragma once

#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/FunctionTraits.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "lifetimes.h"

namespace simgpu {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

inline c10::DeviceIndex& current_device() {
    thread_local c10::DeviceIndex device = 0;
    return device;
}

// Every thread has its own current streams, beginning with the default ones, whose numbers are their devices'.
inline int& current_stream(c10::DeviceIndex device) {
    thread_local std::vector<int> streams;
    while (streams.size() <= static_cast<size_t>(device))
        streams.push_back(static_cast<int>(streams.size()));
    return streams[device];
}

// CPU kernels that are called from here are to see plain CPU tensors and nothing else of torch.
class KernelGuard {
  public:
    KernelGuard()
        : guard_(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                 c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastPrivateUse1,
                                      c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})) {}

  private:
    c10::impl::ExcludeDispatchKeyGuard guard_;
};

inline c10::Storage alias_storage(const c10::Storage& storage, bool write) {
    c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
    const bool device = storage.device_type() == kDevice;
    const void* data = write && impl.nbytes() > 0 ? impl.mutable_data() : impl.data();
    void* bytes = device ? Simulator::get().space.shadow(data) : const_cast<void*>(data);
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), impl.nbytes(),
                                                 c10::DataPtr(bytes, c10::Device(c10::kCPU)), c10::GetCPUAllocator(),
                                                 /*resizable=*/true);
}

inline at::Tensor tensor_on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number())
        tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensor._set_conj(like.is_conj());
    tensor._set_neg(like.is_neg());
    return tensor;
}

inline at::Tensor alias(const at::Tensor& tensor, bool write) {
    return tensor_on(alias_storage(tensor.storage(), write), c10::DispatchKey::CPU, tensor);
}

// The address ranges a strided tensor has bytes in; one for all, and not exact, where they would be very many.
inline std::vector<Range> ranges(const at::Tensor& tensor, bool& exact) {
    constexpr int64_t kMany = 64;
    exact = true;
    if (tensor.numel() == 0)
        return {};
    const auto item = static_cast<int64_t>(tensor.element_size());
    const auto first = reinterpret_cast<uint64_t>(tensor.storage().unsafeGetStorageImpl()->data()) +
                       static_cast<uint64_t>(tensor.storage_offset() * item);
    std::vector<std::pair<int64_t, int64_t>> dims; // (stride in bytes, size)
    int64_t last = item;
    for (int64_t i = 0; i < tensor.dim(); ++i)
        if (tensor.size(i) > 1 && tensor.stride(i) != 0) {
            dims.emplace_back(tensor.stride(i) * item, tensor.size(i));
            last += tensor.stride(i) * item * (tensor.size(i) - 1);
        }
    std::sort(dims.begin(), dims.end());
    int64_t run = item, count = 1;
    size_t inner = 0;
    while (inner < dims.size() && dims[inner].first == run)
        run *= dims[inner++].second;
    for (size_t i = inner; i < dims.size(); ++i)
        count *= dims[i].second;
    if (count > kMany) {
        exact = false;
        return {{first, first + static_cast<uint64_t>(last)}};
    }
    std::vector<Range> found;
    for (int64_t i = 0; i < count; ++i) {
        uint64_t at = first;
        int64_t rest = i;
        for (size_t dim = inner; dim < dims.size(); ++dim) {
            at += static_cast<uint64_t>(rest % dims[dim].second * dims[dim].first);
            rest /= dims[dim].second;
        }
        found.push_back({at, at + static_cast<uint64_t>(run)});
    }
    return found;
}

inline void add_uses(std::vector<Use>& uses, const at::Tensor& tensor, bool write) {
    bool exact = true;
    std::optional<HostOwner> owner;
    if (tensor.device().type() != kDevice)
        owner = tensor.storage().getWeakStorageImpl();
    for (const Range& range : ranges(tensor, exact))
        uses.push_back({range, write, owner, exact});
}

inline uint64_t hash(const std::vector<Range>& host) {
    uint64_t value = 0x9E3779B97F4A7C15;
    const auto mix = [&value](uint64_t word) { value = (value ^ word) * 0xFF51AFD7ED558CCD, value ^= value >> 32; };
    for (const Range& range : host) {
        uint64_t at = range.begin, word = 0;
        for (; at + sizeof(word) <= range.end; at += sizeof(word)) {
            std::memcpy(&word, reinterpret_cast<const void*>(at), sizeof(word));
            mix(word);
        }
        word = 0;
        std::memcpy(&word, reinterpret_cast<const void*>(at), range.end - at);
        mix(word);
    }
    return value;
}

// Of CPU tensors.
inline void copy_now(at::Tensor& to, const at::Tensor& from) {
    KernelGuard guard;
    const bool same = to.dtype() == from.dtype() && to.sizes() == from.sizes() && to.strides() == from.strides() &&
                      to.is_non_overlapping_and_dense() && to.is_conj() == from.is_conj() &&
                      to.is_neg() == from.is_neg();
    if (same)
        std::memmove(to.data_ptr(), from.const_data_ptr(), to.nbytes());
    else
        at::native::copy_(to, from, false);
}

inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
    static const std::string to_device = "copy host to device", to_host = "copy device to host",
                             within = "copy device to device", between = "copy between devices", plain = "aten::copy_";
    if (self.is_same(source))
        return self;
    KernelGuard guard;
    at::Tensor from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
    if (self.numel() == 0)
        return self;
    Simulator& simulator = Simulator::get();
    const bool down = self.device().type() == kDevice, up = from.device().type() == kDevice;
    if (!up && (from.dtype() != self.dtype() || !from.is_contiguous()))
        from = from.to(self.dtype()).contiguous(); // on the host, as CUDA does before such a copy
    std::vector<Use> uses;
    add_uses(uses, from, false);
    add_uses(uses, self, true);
    Task task{Task::Kind::work, nullptr, nullptr, {}, std::move(uses), {}, 0, {}};
    task.run = [to = alias(self, true), from_alias = alias(from, false)]() mutable { copy_now(to, from_alias); };
    if (!(down && up)) {
        const at::Tensor& host = down ? from : self;
        bool exact = true;
        for (const Range& range : ranges(host, exact))
            TORCH_CHECK(simulator.pinned.is_one_kind(range.begin, range.end),
                        "simulated GPU: invalid argument: host memory of a copy is pinned in part, or in parts");
        task.watched = [parts = ranges(host, exact)] { return hash(parts); };
        if (!exact)
            task.watched = nullptr;
        task.keep = {host.storage()};
        task.name = down ? &to_device : &to_host;
        simulator.enqueue(current_stream((down ? self : from).device().index()), std::move(task), !non_blocking);
        return self;
    }
    const int stream = current_stream(from.device().index()), other = current_stream(self.device().index());
    if (self.device() != from.device()) {
        task.name = &between;
        simulator.wait(stream, simulator.record(other));
        simulator.enqueue(stream, std::move(task), false);
        simulator.wait(other, simulator.record(stream));
    } else if (non_blocking) {
        task.name = &within;
        simulator.enqueue(stream, std::move(task), false);
    } else {
        simulator.launch(stream, &plain, task.uses);
        task.run();
    }
    return self;
}

// ---- allocation

struct Allocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t size_bytes) override {
        const c10::DeviceIndex device = current_device();
        void* data = nullptr;
        if (size_bytes > 0)
            data = Simulator::get().allocate(device, size_bytes, current_stream(device));
        return {data, data, &give_back, c10::Device(kDevice, device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void* to, const void* from, size_t count) const override {
        static const std::string name = "clone of a storage";
        Simulator& simulator = Simulator::get();
        const auto a = reinterpret_cast<uint64_t>(from), b = reinterpret_cast<uint64_t>(to);
        simulator.launch(current_stream(simulator.device_of(to)), &name,
                         {{{a, a + count}, false}, {{b, b + count}, true}});
        std::memcpy(simulator.space.shadow(to), simulator.space.shadow(from), count);
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {
        for (int device = 0; device < Simulator::get().devices(); ++device)
            Simulator::get().empty_cache(static_cast<c10::DeviceIndex>(device));
    }
    void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        Simulator::Guard guard(Simulator::get());
        const MemoryStatistics& now = Simulator::get().memory(device).statistics;
        c10::CachingDeviceAllocator::DeviceStats stats;
        const auto set = [](c10::CachingAllocator::StatArray& to, uint64_t current, uint64_t peak) {
            to[0].current = static_cast<int64_t>(current);
            to[0].peak = static_cast<int64_t>(peak);
        };
        set(stats.allocated_bytes, now.allocated_bytes, now.allocated_peak_bytes);
        set(stats.reserved_bytes, now.reserved_bytes, now.reserved_peak_bytes);
        stats.num_alloc_retries = static_cast<int64_t>(now.retries);
        stats.num_ooms = static_cast<int64_t>(now.out_of_memory);
        stats.num_device_alloc = static_cast<int64_t>(now.allocations);
        stats.num_device_free = static_cast<int64_t>(now.frees);
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex device) override {
        Simulator::Guard guard(Simulator::get());
        MemoryStatistics& now = Simulator::get().memory(device).statistics;
        now.allocated_peak_bytes = now.allocated_bytes;
        now.reserved_peak_bytes = now.reserved_bytes;
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        Simulator::Guard guard(Simulator::get());
        const DeviceMemory& memory = Simulator::get().memory(device);
        return {memory.size_bytes() - memory.statistics.reserved_bytes, memory.size_bytes()};
    }

  private:
    static void give_back(void* data) { Simulator::get().free(data); }
};

inline void resize_storage(const c10::Storage& storage, size_t size_bytes) {
    TORCH_CHECK(storage.resizable(), "trying to resize storage that is not resizable");
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr fresh = c10::GetAllocator(kDevice)->allocate(size_bytes);
    const size_t kept_bytes = std::min(size_bytes, storage.nbytes());
    if (kept_bytes > 0)
        c10::GetAllocator(kDevice)->copy_data(fresh.get(), storage.data(), kept_bytes);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(size_bytes);
}

inline void resize_storage_for(const at::Tensor& tensor) {
    const size_t needed_bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                                 tensor.element_size(), tensor.storage_offset());
    if (tensor.numel() > 0 && needed_bytes > tensor.storage().nbytes())
        resize_storage(tensor.storage(), needed_bytes);
}

} // namespace simgpu
