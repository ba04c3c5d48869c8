// Every operator that has no kernel of its own here: called with CPU tensors over the same bytes.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/SparseTensorUtils.h>

#include "aliases.h"
#include "workspaces.h"

namespace simgpu {

// A CPU generator under the device's name, so that the device draws what a CPU would draw with the same seed.
class DeviceGenerator final : public c10::GeneratorImpl {
  public:
    explicit DeviceGenerator(c10::DeviceIndex device)
        : GeneratorImpl(c10::Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          inner(at::detail::createCPUGenerator()) {}

    static c10::DeviceType device_type() { return kDevice; }
    void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
    void set_offset(uint64_t) override { TORCH_CHECK(false, "the simulated GPU's generator has no offset"); }
    uint64_t get_offset() const override { return 0; }
    uint64_t current_seed() const override { return inner.current_seed(); }
    uint64_t seed() override { return inner.seed(); }
    void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return inner.unsafeGetGeneratorImpl()->get_state();
    }

    at::Generator inner;

  private:
    DeviceGenerator* clone_impl() const override {
        auto* copy = new DeviceGenerator(device().index());
        copy->inner = inner.clone();
        return copy;
    }
};

inline const at::Generator& default_generator(c10::DeviceIndex device) {
    static const auto* generators = [] {
        auto* all = new std::vector<at::Generator>();
        for (int i = 0; i < Simulator::get().devices(); ++i)
            all->push_back(at::make_generator<DeviceGenerator>(static_cast<c10::DeviceIndex>(i)));
        return all;
    }();
    return generators->at(device < 0 ? current_device() : device);
}

inline at::Generator& inner_generator(const at::Generator& generator) {
    return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// Operators that draw without taking a generator draw from the CPU's default one: lend it the device's state.
class BorrowedState {
  public:
    explicit BorrowedState(c10::DeviceIndex device)
        : inner_(inner_generator(default_generator(device))), saved_(at::detail::getDefaultCPUGenerator().get_state()) {
        cpu().set_state(inner_.get_state());
    }
    ~BorrowedState() {
        inner_.set_state(cpu().get_state());
        cpu().set_state(saved_);
    }
    BorrowedState(const BorrowedState&) = delete;
    BorrowedState& operator=(const BorrowedState&) = delete;

  private:
    static at::Generator cpu() { return at::detail::getDefaultCPUGenerator(); }
    at::Generator& inner_;
    at::Tensor saved_;
};

class Call {
  public:
    Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
        : op_(op), schema_(op.schema()), stack_(stack), first_(stack.size() - schema_.arguments().size()) {}

    void run() {
        find_device();
        const c10::DeviceGuard on_device(device_);
        // What the kernel gives back is made into device tensors before the arguments are let go.
        const std::vector<c10::IValue> arguments(stack_.begin() + static_cast<std::ptrdiff_t>(first_), stack_.end());
        const bool draws = op_.hasTag(at::Tag::nondeterministic_seeded);
        bool took_generator = false;
        for (size_t i = 0; i < arguments.size(); ++i)
            take(i, draws, took_generator);
        Simulator& simulator = Simulator::get();
        stream_ = current_stream(device_.index());
        name_ = simulator.intern(schema_.name());
        Workspaces::get().called(schema_.name(), device_, stream_);
        simulator.launch(stream_, name_, uses_);
        {
            const KernelGuard guard;
            std::optional<BorrowedState> state;
            if (draws && !took_generator)
                state.emplace(device_.index());
            op_.callBoxed(&stack_);
        }
        for (const Entry& entry : entries_)
            if (entry.write)
                write_back(entry);
        bool host_result = false;
        for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); ++i)
            host_result = give(stack_[i]) || host_result;
        if (host_result)
            simulator.synchronize_stream(stream_);
    }

  private:
    struct Entry {
        at::Tensor original, alias;
        bool write;
    };

    template <class Each> void for_each_tensor(const Each& each) const {
        for (size_t i = first_; i < stack_.size(); ++i) {
            const c10::IValue& value = stack_[i];
            if (value.isTensor()) {
                each(value.toTensor());
            } else if (value.isTensorList()) {
                for (const at::Tensor& tensor : value.toTensorVector())
                    each(tensor);
            } else if (value.isOptionalTensorList()) {
                for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
                    if (tensor)
                        each(*tensor);
            }
        }
    }

    // The device of the tensors, which must all be on one, as CUDA asks for; numbers may come from the CPU.
    void find_device() {
        static const std::set<std::string> host_too = {"aten::index",
                                                       "aten::_unsafe_index",
                                                       "aten::_index_put_impl_",
                                                       "aten::index_put",
                                                       "aten::index_put_",
                                                       "aten::_unsafe_index_put",
                                                       "aten::_pack_padded_sequence",
                                                       "aten::_pack_padded_sequence_backward"};
        std::optional<c10::Device> found, host;
        for_each_tensor([&](const at::Tensor& tensor) {
            if (!tensor.defined())
                return;
            if (tensor.device().type() != kDevice) {
                if (tensor.dim() > 0 && host_too.count(schema_.name()) == 0)
                    host = tensor.device();
                return;
            }
            TORCH_CHECK(!found || *found == tensor.device(),
                        "Expected all tensors to be on the same device, but found ", *found, " and ", tensor.device(),
                        " in ", schema_.name());
            found = tensor.device();
        });
        TORCH_CHECK(!found || !host, "Expected all tensors to be on the same device, but found ", *found, " and ",
                    *host, " in ", schema_.name());
        for (size_t i = first_; i < stack_.size() && !found; ++i)
            if (stack_[i].isDevice() && stack_[i].toDevice().type() == kDevice)
                found = stack_[i].toDevice();
        device_ = found.value_or(c10::Device(kDevice, current_device()));
        if (!device_.has_index())
            device_ = c10::Device(kDevice, current_device());
    }

    void take(size_t i, bool draws, bool& took_generator) {
        c10::IValue& value = stack_[first_ + i];
        const c10::AliasInfo* info = schema_.arguments()[i].alias_info();
        const bool write = info != nullptr && info->isWrite();
        if (value.isTensor()) {
            value = to_cpu(value.toTensor(), write);
        } else if (value.isTensorList()) {
            std::vector<at::Tensor> list = value.toTensorVector();
            for (at::Tensor& tensor : list)
                tensor = to_cpu(tensor, write);
            value = c10::IValue(std::move(list));
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
                list.push_back(tensor ? std::optional<at::Tensor>(to_cpu(*tensor, write)) : std::nullopt);
            value = c10::IValue(std::move(list));
        } else if (value.isDevice()) {
            value = c10::IValue(c10::Device(c10::kCPU));
        } else if (value.isGenerator() || (draws && value.isNone() && takes_generator(i))) {
            const at::Generator generator =
                value.isGenerator() ? value.toGenerator() : default_generator(device_.index());
            TORCH_CHECK(generator.device().type() == kDevice, "Expected a '", device_, "' generator device but found '",
                        generator.device(), "'");
            value = c10::IValue(inner_generator(generator));
            took_generator = true;
        }
    }

    bool takes_generator(size_t i) const {
        const std::string type = schema_.arguments()[i].type()->str();
        return type.find("Generator") != std::string::npos;
    }

    at::Tensor to_cpu(const at::Tensor& tensor, bool write) {
        if (!tensor.defined() || tensor.device().type() != kDevice)
            return tensor;
        at::Tensor result;
        if (tensor.is_sparse()) {
            const KernelGuard guard;
            const at::Tensor indices = to_cpu(tensor._indices(), false), values = to_cpu(tensor._values(), write);
            result = at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes());
            result._coalesced_(tensor.is_coalesced());
        } else {
            add_uses(uses_, tensor, write);
            result = tensor_on(storage_for(tensor.storage(), write), c10::DispatchKey::CPU, tensor);
        }
        entries_.push_back({tensor, result, write});
        return result;
    }

    c10::Storage storage_for(const c10::Storage& storage, bool write) {
        for (const auto& [original, alias] : storages_)
            if (original.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
                if (write && storage.nbytes() > 0)
                    storage.mutable_data(); // refused by storages that are not to be changed
                return alias;
            }
        storages_.emplace_back(storage, alias_storage(storage, write));
        return storages_.back().second;
    }

    // An out= argument that the kernel has resized.
    void write_back(const Entry& entry) {
        const KernelGuard guard;
        const at::Tensor &original = entry.original, &alias = entry.alias;
        if (original.is_sparse()) {
            const at::Tensor indices = to_device(alias._indices()), values = to_device(alias._values());
            auto* impl = at::sparse::get_sparse_impl(original);
            impl->resize_and_clear_(alias.sparse_dim(), alias.dense_dim(), alias.sizes());
            at::sparse::alias_into_sparse(original, indices, values);
            impl->set_coalesced(alias.is_coalesced());
            return;
        }
        const void* before = Simulator::get().space.shadow(original.storage().data());
        const bool moved = alias.storage().data() != before;
        if (!moved && alias.sizes() == original.sizes() && alias.strides() == original.strides())
            return;
        original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
        if (!moved)
            return;
        resize_storage_for(original);
        write(original, alias);
    }

    void write(const at::Tensor& result, const at::Tensor& host) {
        if (host.numel() == 0)
            return;
        std::vector<Use> uses;
        add_uses(uses, result, true);
        Simulator::get().launch(stream_, name_, uses);
        at::Tensor bytes = simgpu::alias(result, true);
        copy_now(bytes, host);
    }

    at::Tensor to_device(const at::Tensor& tensor) {
        if (!tensor.defined() || tensor.device().type() != c10::kCPU)
            return tensor;
        for (const Entry& entry : entries_)
            if (entry.alias.is_same(tensor))
                return entry.original;
        if (tensor.is_sparse()) {
            const at::Tensor indices = to_device(tensor._indices()), values = to_device(tensor._values());
            at::Tensor result = at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes());
            result._coalesced_(tensor.is_coalesced());
            return result;
        }
        for (const auto& [original, alias] : storages_)
            if (alias.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl())
                return tensor_on(original, c10::DispatchKey::PrivateUse1, tensor);
        const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
        at::Tensor result = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(device_));
        write(result, dense);
        return result;
    }

    // Whether the result is known to the host.
    bool give(c10::IValue& value) {
        const KernelGuard guard;
        if (value.isTensor()) {
            value = to_device(value.toTensor());
        } else if (value.isTensorList()) {
            std::vector<at::Tensor> list = value.toTensorVector();
            for (at::Tensor& tensor : list)
                tensor = to_device(tensor);
            value = c10::IValue(std::move(list));
        } else {
            return !value.isNone();
        }
        return false;
    }

    const c10::OperatorHandle& op_;
    const c10::FunctionSchema& schema_;
    torch::jit::Stack& stack_;
    size_t first_;
    c10::Device device_{kDevice, 0};
    int stream_ = 0;
    const std::string* name_ = nullptr;
    std::vector<Use> uses_;
    std::vector<Entry> entries_;
    std::vector<std::pair<c10::Storage, c10::Storage>> storages_; // of the device, and its alias
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(); }

} // namespace simgpu
