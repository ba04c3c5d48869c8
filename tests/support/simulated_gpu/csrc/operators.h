// The operators that need kernels of their own: allocation, views, copies, and those that CPU kernels do not have.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "fallback.h"

namespace simgpu {

using OptionalTensor = std::optional<at::Tensor>;

inline c10::Device device_or_current(std::optional<c10::Device> device) {
    if (device && device->has_index()) {
        TORCH_CHECK(device->index() < Simulator::get().devices(), "there is no device ", *device);
        return *device;
    }
    return {kDevice, current_device()};
}

inline at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                        std::optional<c10::Device> device, std::optional<bool> pin_memory,
                        std::optional<c10::MemoryFormat> format) {
    TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
    const c10::DeviceGuard guard(device_or_current(device));
    return at::detail::empty_generic(sizes, c10::GetAllocator(kDevice),
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                     format);
}

inline at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                                std::optional<c10::Layout>, std::optional<c10::Device> device,
                                std::optional<bool> pin_memory) {
    TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
    const c10::DeviceGuard guard(device_or_current(device));
    return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kDevice),
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

inline const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes,
                                 std::optional<c10::MemoryFormat> format) {
    if (self.sizes() != sizes)
        self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    if (format)
        self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    resize_storage_for(self);
    return self;
}

inline at::Tensor& set_storage_(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                                c10::IntArrayRef strides) {
    at::native::checkSetStorage(self, std::move(storage), offset, sizes, strides);
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    if (strides.data() != nullptr)
        self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    else
        self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    resize_storage_for(self);
    return self;
}

inline at::Tensor& set_source_storage_(at::Tensor& self, at::Storage storage) {
    const auto size = static_cast<int64_t>(storage.nbytes() / self.element_size());
    return set_storage_(self, std::move(storage), 0, {size}, {});
}

inline at::Tensor& set_nothing_(at::Tensor& self) {
    const at::Tensor nothing = at::empty({0}, self.options());
    return set_storage_(self, nothing.storage(), 0, {0}, {});
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
    at::Tensor target = to;
    copy_(target, self, non_blocking);
    return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
    at::Tensor target = to;
    target.resize_(self.sizes());
    copy_(target, self, false);
    return to;
}

inline at::Scalar local_scalar_dense(const at::Tensor& self) {
    static const std::string name = "item";
    const int stream = current_stream(self.device().index());
    std::vector<Use> uses;
    add_uses(uses, self, false);
    Simulator::get().launch(stream, &name, uses);
    Simulator::get().synchronize_stream(stream);
    const KernelGuard guard;
    return at::native::_local_scalar_dense_cpu(alias(self, false));
}

inline void record_stream(at::Tensor& self, at::Stream stream) {
    const int index = stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
    Simulator::get().record_stream(const_cast<void*>(self.storage().data()), index);
}

// Whether `tensor.data = other` may be: between the CPU and the device too, as with CUDA, so that a module that moves
// to the device keeps its parameters.
inline bool may_become(const at::Tensor& self, const at::Tensor& other) {
    const auto known = [](const at::Tensor& tensor) { return tensor.is_cpu() || tensor.device().type() == kDevice; };
    return known(self) && known(other) && self.layout() == other.layout();
}

// ---- convolution: torch asks backends that it does not know for these two

// A kernel that is written with CPU tensors: notes what it reads, and brings the results to the device.
class HostKernel {
  public:
    HostKernel(const std::string& name, c10::Device device) : name_(Simulator::get().intern(name)), device_(device) {}

    at::Tensor in(const at::Tensor& tensor) {
        if (!tensor.defined())
            return tensor;
        add_uses(uses_, tensor, false);
        return alias(tensor, false);
    }

    OptionalTensor in(const OptionalTensor& tensor) { return tensor ? OptionalTensor(in(*tensor)) : std::nullopt; }

    void launch() { Simulator::get().launch(current_stream(device_.index()), name_, std::exchange(uses_, {})); }

    at::Tensor out(const at::Tensor& host) {
        if (!host.defined())
            return host;
        at::Tensor result = at::empty_strided(host.sizes(), host.strides(), host.options().device(device_));
        add_uses(uses_, result, true);
        launch();
        if (host.numel() > 0) {
            at::Tensor bytes = alias(result, true);
            copy_now(bytes, host);
        }
        return result;
    }

  private:
    const std::string* name_;
    c10::Device device_;
    std::vector<Use> uses_;
};

inline at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                              c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                              bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
    const c10::DeviceGuard on_device(input.device());
    HostKernel kernel("aten::convolution", input.device());
    const at::Tensor in = kernel.in(input), by = kernel.in(weight);
    const OptionalTensor added = kernel.in(bias);
    kernel.launch();
    const KernelGuard guard;
    return kernel.out(at::convolution(in, by, added, stride, padding, dilation, transposed, output_padding, groups));
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor>
convolution_backward(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
                     c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                     c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
    const c10::DeviceGuard on_device(input.device());
    HostKernel kernel("aten::convolution_backward", input.device());
    const at::Tensor by = kernel.in(gradient), in = kernel.in(input), weights = kernel.in(weight);
    const std::vector<int64_t> bias_sizes = {gradient.size(1)};
    kernel.launch();
    const KernelGuard guard;
    const auto [a, b, c] = at::convolution_backward(by, in, weights, c10::IntArrayRef(bias_sizes), stride, padding,
                                                    dilation, transposed, output_padding, groups, mask);
    return {kernel.out(a), kernel.out(b), kernel.out(c)};
}

// ---- attention: the same choice of kernel as on a CPU

inline int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                const OptionalTensor& mask, double dropout, bool causal, std::optional<double> scale,
                                bool grouped) {
    const bool wanted = query.requires_grad() || key.requires_grad() || value.requires_grad();
    const auto on_cpu = [](const at::Tensor& tensor) { return alias(tensor, false); };
    at::Tensor q = on_cpu(query), k = on_cpu(key), v = on_cpu(value);
    q.set_requires_grad(wanted);
    return at::_fused_sdp_choice(q, k, v, mask ? OptionalTensor(on_cpu(*mask)) : mask, dropout, causal, scale, grouped);
}

// ---- recurrent cells: torch asks GPUs for fused ones

inline at::Tensor gates_sum(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& c,
                            const OptionalTensor& d) {
    at::Tensor gates = a + b;
    if (c && c->defined())
        gates = gates + *c + *d;
    return gates;
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates,
                                                                const at::Tensor& hidden_gates, const at::Tensor& cx,
                                                                const OptionalTensor& input_bias,
                                                                const OptionalTensor& hidden_bias) {
    const auto gates = gates_sum(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1);
    const at::Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(),
                     out = gates[3].sigmoid();
    const at::Tensor cy = forget * cx + in * cell;
    return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const OptionalTensor& grad_hy,
                                                                         const OptionalTensor& grad_cy,
                                                                         const at::Tensor& cx, const at::Tensor& cy,
                                                                         const at::Tensor& workspace, bool has_bias) {
    const auto gates = workspace.chunk(4, 1);
    const at::Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
    const at::Tensor tanh = cy.tanh();
    const at::Tensor gh = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
    at::Tensor gc = gh * out * (1 - tanh * tanh);
    if (grad_cy && grad_cy->defined())
        gc = gc + *grad_cy;
    const at::Tensor gates_gradient = at::cat({gc * cell * in * (1 - in), gc * cx * forget * (1 - forget),
                                               gc * in * (1 - cell * cell), gh * tanh * out * (1 - out)},
                                              1);
    return {gates_gradient, gc * forget, has_bias ? gates_gradient.sum(0) : at::Tensor()};
}

inline std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                   const at::Tensor& hx, const OptionalTensor& input_bias,
                                                   const OptionalTensor& hidden_bias) {
    const bool biased = input_bias && input_bias->defined();
    const auto in = (biased ? input_gates + *input_bias : input_gates).chunk(3, 1);
    const auto hidden = (biased ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
    const at::Tensor reset = (in[0] + hidden[0]).sigmoid(), update = (in[1] + hidden[1]).sigmoid();
    const at::Tensor fresh = (in[2] + reset * hidden[2]).tanh();
    return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
gru_cell_backward(const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
    const auto saved = workspace.chunk(5, 1);
    const at::Tensor &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3], &hidden = saved[4];
    const at::Tensor g_update = grad_hy * (hx - fresh) * update * (1 - update);
    const at::Tensor g_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
    const at::Tensor g_reset = g_fresh * hidden * reset * (1 - reset);
    const at::Tensor g_in = at::cat({g_reset, g_update, g_fresh}, 1);
    const at::Tensor g_hidden = at::cat({g_reset, g_update, g_fresh * reset}, 1);
    return {g_in, g_hidden, grad_hy * update, has_bias ? g_in.sum(0) : at::Tensor(),
            has_bias ? g_hidden.sum(0) : at::Tensor()};
}

} // namespace simgpu
