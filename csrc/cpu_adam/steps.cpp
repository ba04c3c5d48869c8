// Binding of the optimizer steps: reads segments and groups, checks all of them, then runs with the GIL released.
#include <array>
#include <cmath>
#include <vector>

#include "arguments.h"
#include "dispatch.h"
#include "hypers.h"
#include "landing.h"
#include "step.h"

namespace cpu_adam {
namespace {

// Fields of the Python named tuple `Segment`, in its order.
enum SegmentField {
    kNumel,
    kHyperIndex,
    kGrad,
    kGradDtype,
    kWeight,
    kWeightDtype,
    kRemainder,
    kMaster,
    kExpAvg,
    kExpAvgSq,
    kMaxExpAvgSq,
    kExpAvgAbsmax,
    kExpAvgSqAbsmax,
    kNumSegmentFields
};
const char* const kSegmentFieldNames[] = {
    "numel",  "hyper_index", "grad",       "grad_dtype",     "weight",         "weight_dtype",     "remainder",
    "master", "exp_avg",     "exp_avg_sq", "max_exp_avg_sq", "exp_avg_absmax", "exp_avg_sq_absmax"};

class SegmentReader {
  public:
    SegmentReader(const py::handle& object, std::size_t index) : index_(index), tuple_(object.ptr()) {
        if (!PyTuple_Check(tuple_) || PyTuple_GET_SIZE(tuple_) != kNumSegmentFields)
            refuse("segments[" + std::to_string(index) + "] is not a Segment (" + std::to_string(kNumSegmentFields) +
                   " fields)");
    }
    py::handle operator[](SegmentField field) const { return PyTuple_GET_ITEM(tuple_, field); }
    Name name(SegmentField field) const { return {"segments", index_, kSegmentFieldNames[field]}; }
    template <class T> T* address(SegmentField field) const { return address_of<T>((*this)[field], name(field)); }
    bool absent(SegmentField field) const { return unsigned_of((*this)[field].ptr(), name(field)) == 0; }
    DType dtype(SegmentField field) const { return dtype_of((*this)[field], name(field)); }

  private:
    std::size_t index_;
    PyObject* tuple_;
};

// StateLayout of the Python side.
enum class Layout : int { kFp32 = 0, kSplitBf16 = 1, kMaster = 2, kBf16 = 3 };

WeightForm read_weight(const SegmentReader& in, Layout layout, UpdateArgs& a) {
    if (layout == Layout::kMaster) {
        a.master = in.address<float>(kMaster);
        if (in.absent(kWeight)) { // no compute copy: the master is all there is
            a.weight = a.master;
            a.master = nullptr;
            return WeightForm::kFp32;
        }
        a.weight = in.address<void>(kWeight);
        const DType copy = in.dtype(kWeightDtype);
        if (copy == DType::kFp32)
            refuse(in.name(kWeightDtype).text() +
                   " = FP32: a compute copy next to the master is BF16 or FP16; pass weight = 0 for none");
        return copy == DType::kBf16 ? WeightForm::kMasterBf16 : WeightForm::kMasterFp16;
    }
    a.weight = in.address<void>(kWeight);
    if (in.dtype(kWeightDtype) != (layout == Layout::kFp32 ? DType::kFp32 : DType::kBf16))
        refuse(in.name(kWeightDtype).text() + (layout == Layout::kFp32        ? " must be FP32 in the layout FP32"
                                               : layout == Layout::kSplitBf16 ? " must be BF16 in the layout SPLIT_BF16"
                                                                              : " must be BF16 in the layout BF16"));
    if (layout == Layout::kSplitBf16)
        a.remainder = in.address<std::int16_t>(kRemainder);
    return layout == Layout::kFp32        ? WeightForm::kFp32
           : layout == Layout::kSplitBf16 ? WeightForm::kSplitBf16
                                          : WeightForm::kBf16;
}

// What is new in [begin, end) is old at `old` bytes from there.
struct Place {
    std::uintptr_t begin, end;
    std::ptrdiff_t old;
};

std::vector<Place> read_places(const py::sequence& places) {
    std::vector<Place> found;
    for (std::size_t i = 0; i < places.size(); ++i) {
        const py::tuple place = places[i];
        if (place.size() != 3)
            refuse("elsewhere[" + std::to_string(i) + "] is not (begin, nbytes, old)");
        const auto begin = reinterpret_cast<std::uintptr_t>(address_of<void>(place[0], {"elsewhere", i, "begin"}));
        const std::size_t nbytes = count_of(place[1], {"elsewhere", i, "nbytes"});
        const auto old = reinterpret_cast<std::uintptr_t>(address_of<void>(place[2], {"elsewhere", i, "old"}));
        if (old < begin + nbytes && begin < old + nbytes)
            refuse("elsewhere[" + std::to_string(i) + "]: what is old and what is new overlap");
        found.push_back({begin, begin + nbytes, static_cast<std::ptrdiff_t>(old - begin)});
    }
    return found;
}

class OldPlaces {
  public:
    OldPlaces(const std::vector<Place>& places, std::size_t segment) : places_(places), segment_(segment) {}
    std::ptrdiff_t operator()(const void* array, std::size_t nbytes) {
        const auto begin = reinterpret_cast<std::uintptr_t>(array);
        for (const Place& place : places_) {
            if (array == nullptr || begin >= place.end || begin + nbytes <= place.begin)
                continue;
            if (begin < place.begin || begin + nbytes > place.end)
                refuse("segments[" + std::to_string(segment_) + "] lies partly in one of elsewhere");
            any = true;
            return place.old;
        }
        return 0;
    }
    bool any = false;

  private:
    const std::vector<Place>& places_;
    std::size_t segment_;
};

Elsewhere find_old(const Segment& segment, const std::vector<Place>& places, std::size_t index) {
    OldPlaces old_of(places, index);
    const UpdateArgs& a = segment.args;
    Elsewhere old{};
    old.weight = old_of(a.weight, a.n * segment.weight_size);
    old.remainder = old_of(a.remainder, a.n * sizeof(*a.remainder));
    old.master = old_of(a.master, a.n * sizeof(*a.master));
    for (int i = 0; i < kMaxStates; ++i) {
        old.state[i] = old_of(a.state[i], a.n * segment.state_size);
        old.absmax[i] = old_of(a.absmax[i], (a.n + kStateBlock - 1) / kStateBlock * sizeof(float));
    }
    old.any = old_of.any;
    return old;
}

struct Group {
    Rule rule;
    Coefficients coefficients;
    StateDType state_dtype = StateDType::kFp32;
};

// Which fields of a segment hold the states of a rule; kNumel stands for none.
using StateFields = std::array<SegmentField, kMaxStates>;
StateFields state_fields(Rule rule) {
    switch (rule) {
    case Rule::kAdam:
        return {kExpAvg, kExpAvgSq, kNumel};
    case Rule::kAdamAmsgrad:
        return {kExpAvg, kExpAvgSq, kMaxExpAvgSq};
    case Rule::kLion:
    case Rule::kSgdMomentum:
        return {kExpAvg, kNumel, kNumel};
    case Rule::kAdagrad:
        return {kExpAvgSq, kNumel, kNumel};
    case Rule::kSgd:
        break;
    }
    return {kNumel, kNumel, kNumel};
}

Segment read_segment(const SegmentReader& in, Layout layout, const std::vector<Group>& groups) {
    Segment segment{};
    UpdateArgs& a = segment.args;
    a.n = count_of(in[kNumel], in.name(kNumel));
    segment.group = static_cast<std::size_t>(unsigned_of(in[kHyperIndex].ptr(), in.name(kHyperIndex)));
    if (segment.group >= groups.size())
        refuse(in.name(kHyperIndex).text() + " = " + std::to_string(segment.group) + ", but there are " +
               std::to_string(groups.size()) + " hypers");
    a.grad = in.address<void>(kGrad);
    const DType grad_dtype = in.dtype(kGradDtype);
    const WeightForm form = read_weight(in, layout, a);
    const Rule rule = groups[segment.group].rule;
    int slot = 0;
    const StateDType state_dtype = groups[segment.group].state_dtype;
    for (const SegmentField field : state_fields(rule)) {
        if (field == kNumel)
            break;
        if (state_dtype == StateDType::kEightBit)
            a.absmax[slot] = in.address<float>(field == kExpAvg ? kExpAvgAbsmax : kExpAvgSqAbsmax);
        a.state[slot++] = in.address<void>(field);
    }
    segment.kernel = kernels().update[static_cast<int>(rule)][static_cast<int>(state_dtype)][static_cast<int>(form)]
                                     [static_cast<int>(grad_dtype)];
    segment.state_size = state_size(state_dtype);
    segment.grad_size = dtype_size(grad_dtype);
    segment.weight_size = form == WeightForm::kFp32 ? 4 : 2;
    return segment;
}

constexpr double kNoLimit = INFINITY, kStepLimit = 9007199254740992.0;

// One of the Python named tuples `AdamHyper` ...: its fields are read in their order, all of them, each checked.
class HyperReader {
  public:
    HyperReader(const py::handle& object, std::size_t index, const char* type, Py_ssize_t fields)
        : tuple_(object.ptr()), index_(index) {
        if (!PyTuple_Check(tuple_) || PyTuple_GET_SIZE(tuple_) != fields)
            cpu_adam::refuse("hypers[" + std::to_string(index) + "] is not " + type);
    }
    double number(const char* field, double least = 0.0, double limit = kNoLimit) {
        return number_of(next(), name(field), least, limit);
    }
    bool flag() { return next().cast<bool>(); }
    // 8-bit states exist for Adam without amsgrad, bf16 ones for Lion as well.
    StateDType state_dtype(bool eight_bit) {
        const unsigned long long value = unsigned_of(next().ptr(), name("state_dtype"));
        if (value >= static_cast<unsigned long long>(kNumStateDTypes))
            refuse("state_dtype",
                   " = " + std::to_string(value) + " is not a StateDType (FP32 = 0, BF16 = 1, EIGHT_BIT = 2)");
        const auto dtype = static_cast<StateDType>(value);
        if (dtype == StateDType::kEightBit && !eight_bit)
            refuse("state_dtype", " = EIGHT_BIT is for Adam without amsgrad");
        return dtype;
    }
    [[noreturn]] void refuse(const char* field, const std::string& message) const {
        cpu_adam::refuse(name(field).text() + message);
    }

  private:
    Name name(const char* field) const { return {"hypers", index_, field}; }
    py::handle next() { return PyTuple_GET_ITEM(tuple_, position_++); }

    PyObject* tuple_;
    std::size_t index_;
    Py_ssize_t position_ = 0;
};

// A braced list is evaluated from left to right: the order of the fields.
Group read_adam(const py::handle& object, std::size_t index, double grad_factor) {
    HyperReader in(object, index, "an AdamHyper", 11);
    const AdamHyper hyper{in.number("lr"),
                          in.number("beta1", 0.0, 1.0),
                          in.number("beta2", 0.0, 1.0),
                          in.number("eps"),
                          in.number("weight_decay"),
                          in.flag(),
                          in.number("step", 1.0, kStepLimit),
                          in.flag(),
                          in.flag()};
    const bool amsgrad = in.flag();
    const StateDType state_dtype = in.state_dtype(!amsgrad);
    if (amsgrad && state_dtype != StateDType::kFp32)
        in.refuse("state_dtype", " = BF16 is for Adam without amsgrad");
    return {amsgrad ? Rule::kAdamAmsgrad : Rule::kAdam, coefficients_of(hyper, grad_factor), state_dtype};
}

Group read_lion(const py::handle& object, std::size_t index, double grad_factor) {
    HyperReader in(object, index, "a LionHyper", 6);
    const LionHyper hyper{in.number("lr"), in.number("beta1", 0.0, 1.0), in.number("beta2", 0.0, 1.0),
                          in.number("weight_decay"), in.flag()};
    return {Rule::kLion, coefficients_of(hyper, grad_factor), in.state_dtype(false)};
}

Group read_adagrad(const py::handle& object, std::size_t index, double grad_factor) {
    HyperReader in(object, index, "an AdagradHyper", 6);
    const AdagradHyper hyper{in.number("lr"),
                             in.number("lr_decay"),
                             in.number("eps"),
                             in.number("weight_decay"),
                             in.number("step", 1.0, kStepLimit),
                             in.flag()};
    return {Rule::kAdagrad, coefficients_of(hyper, grad_factor)};
}

Group read_sgd(const py::handle& object, std::size_t index, double grad_factor) {
    HyperReader in(object, index, "an SgdHyper", 7);
    const SgdHyper hyper{in.number("lr"),
                         in.number("momentum"),
                         in.number("dampening", -kNoLimit),
                         in.number("weight_decay"),
                         in.flag(),
                         in.flag(),
                         in.flag()};
    if (hyper.nesterov && (hyper.momentum == 0.0 || hyper.dampening != 0.0))
        in.refuse("nesterov", " needs a momentum above 0 and no dampening");
    return {hyper.momentum == 0.0 ? Rule::kSgd : Rule::kSgdMomentum, coefficients_of(hyper, grad_factor)};
}

template <Group (*kRead)(const py::handle&, std::size_t, double)>
void step(const py::sequence& segments, const py::sequence& hypers, int layout_value, double grad_factor,
          long long num_threads, const py::sequence& elsewhere) {
    if (layout_value < 0 || layout_value > static_cast<int>(Layout::kBf16))
        refuse("layout = " + std::to_string(layout_value) +
               " is not a StateLayout (FP32 = 0, SPLIT_BF16 = 1, MASTER = 2, BF16 = 3)");
    if (!std::isfinite(grad_factor))
        refuse("grad_factor = " + std::to_string(grad_factor) + " is not finite");
    const int threads = threads_of(num_threads);
    std::vector<Group> groups;
    std::vector<Coefficients> coefficients;
    for (std::size_t i = 0; i < hypers.size(); ++i) {
        const py::object hyper = hypers[i];
        groups.push_back(kRead(hyper, i, grad_factor));
        coefficients.push_back(groups.back().coefficients);
    }
    const std::vector<Place> places = read_places(elsewhere);
    std::vector<Segment> parsed;
    parsed.reserve(segments.size());
    for (std::size_t i = 0; i < segments.size(); ++i) {
        const py::object segment = segments[i];
        parsed.push_back(read_segment(SegmentReader(segment, i), static_cast<Layout>(layout_value), groups));
        if (!places.empty())
            parsed.back().old = find_old(parsed.back(), places, i);
    }
    const py::gil_scoped_release release;
    run_step(parsed, coefficients, threads);
}

} // namespace

void bind_steps(py::module_& module) {
    const auto bind = [&module](const char* name, auto function) {
        module.def(name, function, py::arg("segments"), py::arg("hypers"), py::arg("layout"), py::arg("grad_factor"),
                   py::arg("num_threads"), py::arg("elsewhere") = py::tuple());
    };
    bind("adam_step", &step<read_adam>);
    bind("lion_step", &step<read_lion>);
    bind("adagrad_step", &step<read_adagrad>);
    bind("sgd_step", &step<read_sgd>);
}

} // namespace cpu_adam
