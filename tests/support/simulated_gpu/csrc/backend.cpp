// A simulated GPU as torch's PrivateUse1 device; the Python package above this folder says what it promises.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "operators.h"
#include "runtime.h"

namespace simgpu {

static Allocator device_allocator;
REGISTER_ALLOCATOR(kDevice, &device_allocator)
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &pinned_allocator())
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuardImpl)

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("as_strided", &at::native::as_strided_tensorimpl);
    m.impl("view", &at::native::view);
    m.impl("_reshape_alias", &at::native::_reshape_alias);
    m.impl("unfold", &at::native::unfold);
    m.impl("resize_", &resize_);
    m.impl("set_.source_Storage", &set_source_storage_);
    m.impl("set_.source_Storage_storage_offset", &set_storage_);
    m.impl("set_.source_Tensor", &at::native::set_tensor_);
    m.impl("set_", &set_nothing_);
    m.impl("copy_", &copy_);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &local_scalar_dense);
    m.impl("record_stream", &record_stream);
    m.impl("_has_compatible_shallow_copy_type", &may_become);
    m.impl("convolution_overrideable", &convolution);
    m.impl("convolution_backward_overrideable", &convolution_backward);
    m.impl("_thnn_fused_lstm_cell", &lstm_cell);
    m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
    m.impl("_thnn_fused_gru_cell", &gru_cell);
    m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
    // Composite elsewhere, with kernels of their own on the CPU: the same ones here, for the same bits.
    for (const char* name :
         {"native_layer_norm", "native_group_norm", "_stack", "_stack.out", "addr", "addr.out", "any.dims",
          "any.dims_out", "all.dims", "all.dims_out", "linalg__powsum", "silu_backward", "mish_backward"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// A sparse tensor is a pair of dense ones: what only puts them together or takes them apart works on any device.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
    m.impl("_sparse_coo_tensor_with_dims_and_tensors", &at::native::new_with_dims_and_tensor_sparse_symint);
    m.impl("_sparse_coo_tensor_with_dims", &at::native::new_with_dims_sparse);
    m.impl("empty.memory_format", &at::native::empty_sparse);
    m.impl("_indices", &at::native::_indices_sparse);
    m.impl("_values", &at::native::_values_sparse);
    m.impl("indices", &at::native::indices_sparse);
    m.impl("values", &at::native::values_sparse);
    m.impl("_nnz", &at::native::_nnz_sparse);
    m.impl("is_coalesced", &at::native::is_coalesced_sparse);
    m.impl("_coalesced_", &at::native::_coalesced_sparse_);
    m.impl("sparse_dim", &at::native::sparse_dim_sparse);
    m.impl("dense_dim", &at::native::dense_dim_sparse);
    m.impl("sparse_resize_", &at::native::sparse_resize_);
    m.impl("sparse_resize_and_clear_", &at::native::sparse_resize_and_clear_);
    m.impl("clone", &at::native::clone_sparse);
    m.impl("copy_", &at::native::copy_sparse_wrapper_);
    m.impl("copy_sparse_to_sparse_", &at::native::copy_sparse_);
    m.impl("zero_", &at::native::zero_sparse_);
    m.impl("_has_compatible_shallow_copy_type", &may_become);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

} // namespace simgpu

namespace at::autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
    AT_FORALL_LOWER_PRECISION_FP(LOWER)
    AT_FORALL_FP32(FULL)
    AT_FORALL_FP32_SET_OPT_DTYPE(FULL_DTYPE)
    AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
    AT_FORALL_PROMOTE(WIDEST)
}
} // namespace at::autocast

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simgpu::choose_attention);
}

PYBIND11_MODULE(SIMGPU_MODULE, module) {
    using namespace simgpu;
    using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
    const auto simulator = []() -> Simulator& { return Simulator::get(); };

    module.def("open", [=](int devices, uint64_t memory_bytes) {
        TORCH_CHECK(simulator().devices() == 0, "the simulated GPU is open already");
        simulator().open(devices, memory_bytes);
        at::RegisterPrivateUse1HooksInterface(new Hooks());
    });
    module.def("device_count", [=] { return simulator().devices(); });
    module.def(
        "set",
        [=](const std::string& mode, uint64_t seed, double delay_max_s, bool check) {
            const Mode chosen = mode == "late" ? Mode::late : mode == "random" ? Mode::random : Mode::eager;
            simulator().set({chosen, check, seed, delay_max_s});
        },
        Release());
    module.def("clear_workspaces", [] { Workspaces::get().clear(); }, Release());
    module.def("reset", [=] { simulator().reset(); }, Release());
    module.def("pending", [=] { return simulator().pending(); }, Release());
    module.def("noted_ranges", [=] { return simulator().noted_ranges(); }, Release());
    module.def("stream_count", [=] { return simulator().stream_count(); }, Release());
    module.def(
        "pin", [=](uint64_t begin, uint64_t size) { return simulator().pinned.add(begin, begin + size); }, Release());
    module.def("unpin", [=](uint64_t begin) { return simulator().pinned.remove(begin); }, Release());
    module.def("limit_pinned", [=](uint64_t bytes) { simulator().pinned.limit(bytes); });
    const auto generator = [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); };
    module.def("seed", [=](int device, uint64_t seed) { generator(device).set_current_seed(seed); });
    module.def("initial_seed", [=](int device) { return generator(device).current_seed(); });
    module.def("generator_state", [=](int device) {
        const at::Tensor state = generator(device).get_state();
        return pybind11::bytes(static_cast<const char*>(state.const_data_ptr()), state.nbytes());
    });
    module.def("set_generator_state", [=](int device, const std::string& bytes) {
        at::Tensor state = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
        std::memcpy(state.data_ptr(), bytes.data(), bytes.size());
        generator(device).set_state(state);
    });
    module.def(
        "memory",
        [=](int device) {
            Simulator::Guard guard(simulator());
            const DeviceMemory& memory = simulator().memory(static_cast<c10::DeviceIndex>(device));
            const MemoryStatistics& now = memory.statistics;
            return std::map<std::string, uint64_t>{
                {"allocated_bytes", now.allocated_bytes},
                {"allocated_peak_bytes", now.allocated_peak_bytes},
                {"reserved_bytes", now.reserved_bytes},
                {"reserved_peak_bytes", now.reserved_peak_bytes},
                {"allocations", now.allocations},
                {"frees", now.frees},
                {"retries", now.retries},
                {"out_of_memory", now.out_of_memory},
                {"size_bytes", memory.size_bytes()},
            };
        },
        Release());
    module.def(
        "reset_peak", [=](int device) { device_allocator.resetPeakStats(static_cast<c10::DeviceIndex>(device)); },
        Release());
    module.def(
        "set_memory_fraction",
        [=](double fraction, int device) {
            Simulator::Guard guard(simulator());
            simulator().memory(static_cast<c10::DeviceIndex>(device)).fraction = fraction;
        },
        Release());
    module.def(
        "empty_cache", [=](int device) { simulator().empty_cache(static_cast<c10::DeviceIndex>(device)); }, Release());
}
