// The module: binding of the passes over blocks. Arguments are checked, then the GIL is released. Addresses are
// integers.
#include <string>
#include <vector>

#include "arguments.h"
#include "dispatch.h"
#include "landing.h"
#include "threads.h"

namespace cpu_adam {
namespace {

py::tuple with_flag(const ExactSum& sum) {
    unsigned char bytes[ExactSum::kBytes];
    sum.write(bytes);
    return py::make_tuple(py::bytes(reinterpret_cast<const char*>(bytes), sizeof(bytes)), sum.non_finite);
}

py::tuple py_land(const py::int_& dst, const py::int_& src, const py::int_& numel, const py::int_& dst_dtype,
                  const py::int_& src_dtype, bool accumulate, long long num_threads) {
    void* const to = address_of<void>(dst, "dst");
    const void* const from = address_of<const void>(src, "src");
    const std::size_t n = count_of(numel, "numel");
    const DType to_dtype = dtype_of(dst_dtype, "dst_dtype"), from_dtype = dtype_of(src_dtype, "src_dtype");
    const int threads = threads_of(num_threads);
    kernels(); // a wrong DEEPOFFLOAD_CPU_CAPABILITY is reported with the GIL held
    ExactSum sum;
    {
        const py::gil_scoped_release release;
        sum = land(to, from, n, to_dtype, from_dtype, accumulate, threads);
    }
    return with_flag(sum);
}

py::tuple py_land_parts(const py::int_& dst, const py::sequence& parts, const py::int_& numel, const py::int_& dtype,
                        const py::object& scale, bool accumulate, long long num_threads) {
    auto* const to = address_of<float>(dst, "dst");
    if (parts.empty())
        refuse("parts is empty: at least one address is needed");
    std::vector<const void*> from;
    for (std::size_t i = 0; i < parts.size(); ++i)
        from.push_back(address_of<const void>(parts[i], Name("parts", i)));
    const std::size_t n = count_of(numel, "numel");
    const DType type = dtype_of(dtype, "dtype");
    const auto factor = static_cast<float>(number_of(scale, "scale", 0x1p-126, 0x1p127)); // normal in fp32
    const int threads = threads_of(num_threads);
    kernels();
    ExactSum sum;
    {
        const py::gil_scoped_release release;
        sum = land_parts(to, from, n, type, factor, accumulate, threads);
    }
    return with_flag(sum);
}

py::tuple py_sum_of_squares(const py::int_& src, const py::int_& numel, const py::int_& dtype, long long num_threads) {
    const void* const from = address_of<const void>(src, "src");
    const std::size_t n = count_of(numel, "numel");
    const DType type = dtype_of(dtype, "dtype");
    const int threads = threads_of(num_threads);
    kernels();
    ExactSum sum;
    {
        const py::gil_scoped_release release;
        sum = sum_of_squares(from, n, type, threads);
    }
    return with_flag(sum);
}

void py_split(const py::int_& src, const py::int_& hi, const py::int_& lo, const py::int_& numel,
              long long num_threads) {
    const float* const from = address_of<const float>(src, "src");
    auto* const high = address_of<std::uint16_t>(hi, "hi");
    auto* const low = address_of<std::int16_t>(lo, "lo");
    const std::size_t n = count_of(numel, "numel");
    const int threads = threads_of(num_threads);
    kernels();
    const py::gil_scoped_release release;
    split_fp32(from, high, low, n, threads);
}

void py_merge(const py::int_& hi, const py::int_& lo, const py::int_& dst, const py::int_& numel,
              long long num_threads) {
    const auto* const high = address_of<const std::uint16_t>(hi, "hi");
    const auto* const low = address_of<const std::int16_t>(lo, "lo");
    float* const to = address_of<float>(dst, "dst");
    const std::size_t n = count_of(numel, "numel");
    const int threads = threads_of(num_threads);
    kernels();
    const py::gil_scoped_release release;
    merge_fp32(high, low, to, n, threads);
}

void py_quantize(const py::int_& src, const py::int_& codes, const py::int_& absmax, const py::int_& numel,
                 bool is_signed, long long num_threads) {
    const float* const from = address_of<const float>(src, "src");
    void* const to = address_of<void>(codes, "codes");
    float* const scales = address_of<float>(absmax, "absmax");
    const std::size_t n = count_of(numel, "numel");
    const int threads = threads_of(num_threads);
    kernels();
    const py::gil_scoped_release release;
    quantize(from, to, scales, n, is_signed, threads);
}

void py_dequantize(const py::int_& codes, const py::int_& absmax, const py::int_& dst, const py::int_& numel,
                   bool is_signed, long long num_threads) {
    const void* const from = address_of<const void>(codes, "codes");
    const float* const scales = address_of<const float>(absmax, "absmax");
    float* const to = address_of<float>(dst, "dst");
    const std::size_t n = count_of(numel, "numel");
    const int threads = threads_of(num_threads);
    kernels();
    const py::gil_scoped_release release;
    dequantize(from, scales, to, n, is_signed, threads);
}

void py_fill(const py::int_& dst, const py::int_& nbytes, int byte, long long num_threads) {
    void* const to = address_of<void>(dst, "dst");
    const std::size_t n = count_of(nbytes, "nbytes");
    if (byte < 0 || byte > 255)
        refuse("byte = " + std::to_string(byte) + " must be from 0 to 255");
    const int threads = threads_of(num_threads);
    const py::gil_scoped_release release;
    fill_bytes(to, n, byte, threads);
}

void py_copy(const py::int_& dst, const py::int_& src, const py::int_& nbytes, long long num_threads) {
    void* const to = address_of<void>(dst, "dst");
    const void* const from = address_of<const void>(src, "src");
    const std::size_t n = count_of(nbytes, "nbytes");
    const int threads = threads_of(num_threads);
    const py::gil_scoped_release release;
    copy_bytes(to, from, n, threads);
}

} // namespace
} // namespace cpu_adam

PYBIND11_MODULE(_cpu_adam, m) {
    using namespace cpu_adam;
    m.doc() = "Host kernels of deepoffload; use deepoffload.native.cpu_adam, which documents them.";
    bind_steps(m);
    m.def("land", &py_land);
    m.def("land_parts", &py_land_parts);
    m.def("sum_of_squares", &py_sum_of_squares);
    m.def("split_fp32", &py_split);
    m.def("merge_fp32", &py_merge);
    m.def("quantize", &py_quantize);
    m.def("dequantize", &py_dequantize);
    m.def("fill", &py_fill);
    m.def("copy", &py_copy);
    m.def("capability", [] { return capability(); });
    m.def("available_capabilities", [] {
        py::list names;
        for (const std::string& name : available_capabilities())
            names.append(name);
        return names;
    });
    m.def("threading_backend", &threading_backend);
}
