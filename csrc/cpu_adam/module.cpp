// Binding: checks every argument, releases the GIL, calls the drivers. Addresses are plain integers.
#include <pybind11/pybind11.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "landing.h"
#include "step.h"
#include "threads.h"

namespace py = pybind11;

namespace cpu_adam {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

unsigned long long unsigned_of(PyObject* object, const std::string& name) {
    const unsigned long long value = PyLong_Check(object) ? PyLong_AsUnsignedLongLong(object) : 0;
    if (PyErr_Occurred() != nullptr || !PyLong_Check(object)) {
        PyErr_Clear();
        refuse(name + " = " + std::string(py::str(py::repr(object))) + " is not a non-negative 64-bit integer");
    }
    return value;
}

template <class T>
T* address_of(const py::handle& object, const std::string& name) {
    auto* const address = reinterpret_cast<T*>(static_cast<std::uintptr_t>(unsigned_of(object.ptr(), name)));
    if (address == nullptr) refuse(name + " is 0: an address is needed here");
    return address;
}

std::size_t count_of(const py::handle& object, const std::string& name) {
    const unsigned long long value = unsigned_of(object.ptr(), name);
    if (value == 0 || value > (1ULL << 46)) refuse(name + " = " + std::to_string(value) + " must be from 1 to 2**46");
    return static_cast<std::size_t>(value);
}

DType dtype_of(const py::handle& object, const std::string& name) {
    const unsigned long long value = unsigned_of(object.ptr(), name);
    if (value >= static_cast<unsigned long long>(kNumDTypes))
        refuse(name + " = " + std::to_string(value) + " is not a DType (FP32 = 0, BF16 = 1, FP16 = 2)");
    return static_cast<DType>(value);
}

int threads_of(long long num_threads) {
    if (num_threads < 1 || num_threads > 4096)
        refuse("num_threads = " + std::to_string(num_threads) + " must be from 1 to 4096");
    return static_cast<int>(num_threads);
}

// Fields of the Python named tuple `Segment`, in its order.
enum SegmentField { kNumel, kHyperIndex, kGrad, kGradDtype, kWeight, kWeightDtype, kRemainder, kMaster, kExpAvg, kExpAvgSq,
                    kMaxExpAvgSq, kNumSegmentFields };
const char* const kSegmentFieldNames[] = {"numel", "hyper_index", "grad", "grad_dtype", "weight", "weight_dtype", "remainder",
                                          "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"};

class SegmentReader {
public:
    SegmentReader(const py::handle& object, std::size_t index) : prefix_("segments[" + std::to_string(index) + "]") {
        if (!PyTuple_Check(object.ptr()) || PyTuple_GET_SIZE(object.ptr()) != kNumSegmentFields)
            refuse(prefix_ + " is not a Segment (" + std::to_string(kNumSegmentFields) + " fields)");
        tuple_ = object.ptr();
    }
    py::handle operator[](SegmentField field) const { return PyTuple_GET_ITEM(tuple_, field); }
    std::string name(SegmentField field) const { return prefix_ + "." + kSegmentFieldNames[field]; }
    template <class T>
    T* address(SegmentField field) const { return address_of<T>((*this)[field], name(field)); }
    bool absent(SegmentField field) const { return unsigned_of((*this)[field].ptr(), name(field)) == 0; }
    DType dtype(SegmentField field) const { return dtype_of((*this)[field], name(field)); }

private:
    std::string prefix_;
    PyObject* tuple_;
};

// StateLayout of the Python side.
enum class Layout : int { kFp32 = 0, kSplitBf16 = 1, kMaster = 2 };

WeightForm read_weight(const SegmentReader& in, Layout layout, UpdateArgs& a) {
    if (layout == Layout::kMaster) {
        a.master = in.address<float>(kMaster);
        if (in.absent(kWeight)) {  // no compute copy: the master is all there is
            a.weight = a.master;
            a.master = nullptr;
            return WeightForm::kFp32;
        }
        a.weight = in.address<void>(kWeight);
        const DType copy = in.dtype(kWeightDtype);
        if (copy == DType::kFp32)
            refuse(in.name(kWeightDtype) + " = FP32: a compute copy beside the master is BF16 or FP16; pass weight = 0 for none");
        return copy == DType::kBf16 ? WeightForm::kMasterBf16 : WeightForm::kMasterFp16;
    }
    const bool split = layout == Layout::kSplitBf16;
    a.weight = in.address<void>(kWeight);
    if (in.dtype(kWeightDtype) != (split ? DType::kBf16 : DType::kFp32))
        refuse(in.name(kWeightDtype) + (split ? " must be BF16 in the layout SPLIT_BF16" : " must be FP32 in the layout FP32"));
    if (split) a.remainder = in.address<std::int16_t>(kRemainder);
    return split ? WeightForm::kSplitBf16 : WeightForm::kFp32;
}

Segment read_segment(const SegmentReader& in, Layout layout, const std::vector<bool>& amsgrad) {
    Segment segment{};
    UpdateArgs& a = segment.args;
    a.n = count_of(in[kNumel], in.name(kNumel));
    segment.group = static_cast<std::size_t>(unsigned_of(in[kHyperIndex].ptr(), in.name(kHyperIndex)));
    if (segment.group >= amsgrad.size())
        refuse(in.name(kHyperIndex) + " = " + std::to_string(segment.group) + ", but there are " + std::to_string(amsgrad.size()) + " hypers");
    a.grad = in.address<void>(kGrad);
    const DType grad_dtype = in.dtype(kGradDtype);
    const WeightForm form = read_weight(in, layout, a);
    a.state[0] = in.address<float>(kExpAvg);
    a.state[1] = in.address<float>(kExpAvgSq);
    if (amsgrad[segment.group]) a.state[2] = in.address<float>(kMaxExpAvgSq);
    const Rule rule = amsgrad[segment.group] ? Rule::kAdamAmsgrad : Rule::kAdam;
    segment.kernel = kernels().update[static_cast<int>(rule)][static_cast<int>(form)][static_cast<int>(grad_dtype)];
    segment.grad_size = dtype_size(grad_dtype);
    segment.weight_size = form == WeightForm::kFp32 ? 4 : 2;
    return segment;
}

double number(const py::handle& hyper, const char* field, const std::string& prefix, double least, double limit) {
    double value = std::nan("");
    try {
        value = hyper.attr(field).cast<double>();
    } catch (const py::cast_error&) {
        refuse(prefix + field + " is not a number");
    }
    if (!(value >= least && value < limit) || !std::isfinite(value))
        refuse(prefix + field + " = " + std::string(py::str(hyper.attr(field))) + " must be finite, at least " +
               std::string(py::str(py::float_(least))) + (std::isfinite(limit) ? " and below " + std::string(py::str(py::float_(limit))) : ""));
    return value;
}

AdamHyper read_hyper(const py::handle& object, std::size_t index) {
    const std::string prefix = "hypers[" + std::to_string(index) + "].";
    AdamHyper h{};
    h.lr = number(object, "lr", prefix, 0.0, INFINITY);
    h.beta1 = number(object, "beta1", prefix, 0.0, 1.0);
    h.beta2 = number(object, "beta2", prefix, 0.0, 1.0);
    h.eps = number(object, "eps", prefix, 0.0, INFINITY);
    h.weight_decay = number(object, "weight_decay", prefix, 0.0, INFINITY);
    h.decoupled = object.attr("decoupled").cast<bool>();
    h.step = static_cast<long long>(number(object, "step", prefix, 1.0, 9007199254740992.0));
    h.bias_correction = object.attr("bias_correction").cast<bool>();
    h.maximize = object.attr("maximize").cast<bool>();
    return h;
}

void adam_step(const py::sequence& segments, const py::sequence& hypers, int layout_value, double grad_factor,
               long long num_threads) {
    if (layout_value < 0 || layout_value > static_cast<int>(Layout::kMaster))
        refuse("layout = " + std::to_string(layout_value) + " is not a StateLayout (FP32 = 0, SPLIT_BF16 = 1, MASTER = 2)");
    if (!std::isfinite(grad_factor)) refuse("grad_factor = " + std::to_string(grad_factor) + " is not finite");
    const int threads = threads_of(num_threads);
    std::vector<Coefficients> coefficients;
    std::vector<bool> amsgrad;
    for (std::size_t i = 0; i < hypers.size(); ++i) {
        const py::object hyper = hypers[i];
        coefficients.push_back(adam_coefficients(read_hyper(hyper, i), grad_factor));
        amsgrad.push_back(hyper.attr("amsgrad").cast<bool>());
    }
    std::vector<Segment> parsed;
    parsed.reserve(segments.size());
    for (std::size_t i = 0; i < segments.size(); ++i) {
        const py::object segment = segments[i];
        parsed.push_back(read_segment(SegmentReader(segment, i), static_cast<Layout>(layout_value), amsgrad));
    }
    const py::gil_scoped_release release;
    run_step(parsed, coefficients, threads);
}

py::tuple with_flag(double sum) { return py::make_tuple(sum, !std::isfinite(sum)); }

py::tuple py_land(const py::int_& dst, const py::int_& src, const py::int_& numel, const py::int_& dst_dtype,
                  const py::int_& src_dtype, bool accumulate, long long num_threads) {
    void* const to = address_of<void>(dst, "dst");
    const void* const from = address_of<const void>(src, "src");
    const std::size_t n = count_of(numel, "numel");
    const DType to_dtype = dtype_of(dst_dtype, "dst_dtype"), from_dtype = dtype_of(src_dtype, "src_dtype");
    const int threads = threads_of(num_threads);
    kernels();  // a wrong DEEPOFFLOAD_CPU_CAPABILITY is reported with the GIL held
    double sum;
    {
        const py::gil_scoped_release release;
        sum = land(to, from, n, to_dtype, from_dtype, accumulate, threads);
    }
    return with_flag(sum);
}

py::tuple py_sum_of_squares(const py::int_& src, const py::int_& numel, const py::int_& dtype, long long num_threads) {
    const void* const from = address_of<const void>(src, "src");
    const std::size_t n = count_of(numel, "numel");
    const DType type = dtype_of(dtype, "dtype");
    const int threads = threads_of(num_threads);
    kernels();
    double sum;
    {
        const py::gil_scoped_release release;
        sum = sum_of_squares(from, n, type, threads);
    }
    return with_flag(sum);
}

void py_split(const py::int_& src, const py::int_& hi, const py::int_& lo, const py::int_& numel, long long num_threads) {
    const float* const from = address_of<const float>(src, "src");
    auto* const high = address_of<std::uint16_t>(hi, "hi");
    auto* const low = address_of<std::int16_t>(lo, "lo");
    const std::size_t n = count_of(numel, "numel");
    const int threads = threads_of(num_threads);
    kernels();
    const py::gil_scoped_release release;
    split_fp32(from, high, low, n, threads);
}

void py_merge(const py::int_& hi, const py::int_& lo, const py::int_& dst, const py::int_& numel, long long num_threads) {
    const auto* const high = address_of<const std::uint16_t>(hi, "hi");
    const auto* const low = address_of<const std::int16_t>(lo, "lo");
    float* const to = address_of<float>(dst, "dst");
    const std::size_t n = count_of(numel, "numel");
    const int threads = threads_of(num_threads);
    kernels();
    const py::gil_scoped_release release;
    merge_fp32(high, low, to, n, threads);
}

void py_fill(const py::int_& dst, const py::int_& nbytes, int byte, long long num_threads) {
    void* const to = address_of<void>(dst, "dst");
    const std::size_t n = count_of(nbytes, "nbytes");
    if (byte < 0 || byte > 255) refuse("byte = " + std::to_string(byte) + " must be from 0 to 255");
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

}  // namespace
}  // namespace cpu_adam

PYBIND11_MODULE(_cpu_adam, m) {
    using namespace cpu_adam;
    m.doc() = "Host kernels of deepoffload; use deepoffload.native.cpu_adam, which documents them.";
    m.def("adam_step", &adam_step);
    m.def("land", &py_land);
    m.def("sum_of_squares", &py_sum_of_squares);
    m.def("split_fp32", &py_split);
    m.def("merge_fp32", &py_merge);
    m.def("fill", &py_fill);
    m.def("copy", &py_copy);
    m.def("capability", [] { return capability(); });
    m.def("available_capabilities", [] {
        py::list names;
        for (const std::string& name : available_capabilities()) names.append(name);
        return names;
    });
    m.def("threading_backend", &threading_backend);
}
