// What torch asks of a device in addition to its operators: devices, streams, events, generators and pinned memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "fallback.h"

namespace simgpu {

// Default streams have the id 0, the others their number among all.
inline c10::Stream to_torch(int index, c10::DeviceIndex device) {
    const bool is_default = index < Simulator::get().devices();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), is_default ? 0 : index);
}

inline int from_torch(const c10::Stream& stream) {
    return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
}

struct Event {
    VersionRef version;
};

struct DeviceGuardImpl final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kDevice; }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override { return {kDevice, current_device()}; }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() < deviceCount(), "there is no device ", device);
        uncheckedSetDevice(device);
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.has_index())
            current_device() = device.index();
    }
    c10::Stream getStream(c10::Device device) const override {
        const c10::DeviceIndex index = device.has_index() ? device.index() : current_device();
        return to_torch(current_stream(index), index);
    }
    c10::Stream getDefaultStream(c10::Device device) const override { return to_torch(device.index(), device.index()); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream getNewStream(c10::Device device, int) const override {
        const c10::DeviceIndex index = device.has_index() ? device.index() : current_device();
        return to_torch(Simulator::get().new_stream(index), index);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        const c10::Stream before = getStream(stream.device());
        current_stream(stream.device_index()) = from_torch(stream);
        return before;
    }
    void* getStreamNativeHandle(const c10::Stream stream) const override {
        return reinterpret_cast<void*>(static_cast<intptr_t>(from_torch(stream)));
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (*event == nullptr)
            *event = new Event();
        static_cast<Event*>(*event)->version = Simulator::get().record(from_torch(stream));
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event != nullptr)
            Simulator::get().wait(from_torch(stream), static_cast<Event*>(event)->version);
    }
    bool queryEvent(void* event) const override {
        return event == nullptr || Simulator::get().query(static_cast<Event*>(event)->version);
    }
    c10::DeviceIndex deviceCount() const noexcept override {
        return static_cast<c10::DeviceIndex>(Simulator::get().devices());
    }
    bool queryStream(const c10::Stream& stream) const override {
        return Simulator::get().query_stream(from_torch(stream));
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        Simulator::get().synchronize_stream(from_torch(stream));
    }
    void synchronizeEvent(void* event) const override {
        if (event != nullptr)
            Simulator::get().synchronize(static_cast<Event*>(event)->version);
    }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        Simulator::get().synchronize_device(device < 0 ? current_device() : device);
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        Simulator::get().record_stream(data.get(), from_torch(stream));
    }
    double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
        const auto &from = *static_cast<Event*>(first)->version, &to = *static_cast<Event*>(second)->version;
        TORCH_CHECK(from.done && to.done, "both events must be over before the time between them is asked for");
        return std::chrono::duration<double, std::milli>(to.time - from.time).count();
    }
};

inline void Allocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
    Simulator::get().record_stream(data.get(), from_torch(stream));
}

// Page-locked memory from torch: ordinary pages that are noted as pinned. Copies keep what they use until they are
// done.
struct PinnedAllocator final : at::HostAllocator {
    c10::DataPtr allocate(size_t size_bytes) override {
        if (size_bytes == 0)
            return {nullptr, nullptr, &give_back, c10::Device(c10::kCPU)};
        void* data = std::aligned_alloc(4096, (size_bytes + 4095) / 4096 * 4096);
        const auto begin = reinterpret_cast<uint64_t>(data);
        if (data != nullptr && !Simulator::get().pinned.add(begin, begin + size_bytes)) {
            std::free(data);
            data = nullptr;
        }
        TORCH_CHECK(data != nullptr, "no page-locked memory for ", size_bytes, " bytes");
        return {data, data, &give_back, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
    bool record_event(void*, void*, c10::Stream) override { return true; }
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}

  private:
    static void give_back(void* data) {
        if (data != nullptr)
            Simulator::get().pinned.remove(reinterpret_cast<uint64_t>(data));
        std::free(data);
    }
};

inline PinnedAllocator& pinned_allocator() {
    static auto* allocator = new PinnedAllocator();
    return *allocator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return Simulator::get().devices() > 0; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(Simulator::get().devices()); }
    void setCurrentDevice(c10::DeviceIndex device) const override { DeviceGuardImpl().setDevice({kDevice, device}); }
    c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        const c10::DeviceIndex before = current_device();
        if (device >= 0)
            setCurrentDevice(device);
        return before;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
    at::Device getDeviceFromPtr(void* data) const override { return {kDevice, Simulator::get().device_of(data)}; }
    bool isPinnedPtr(const void* data) const override {
        return Simulator::get().pinned.contains(reinterpret_cast<uint64_t>(data));
    }
    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override {
        return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size_bytes) const override {
        resize_storage(storage, size_bytes);
    }
};

} // namespace simgpu
