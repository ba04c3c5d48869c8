#include "arguments.h"

#include <cmath>
#include <stdexcept>

namespace cpu_adam {

void refuse(const std::string& message) { throw std::invalid_argument(message); }

unsigned long long unsigned_of(PyObject* object, const Name& name) {
    const bool is_integer = PyLong_Check(object);
    const unsigned long long value = is_integer ? PyLong_AsUnsignedLongLong(object) : 0;
    if (!is_integer || (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr)) {
        PyErr_Clear();
        refuse(name.text() + " = " + std::string(py::str(py::repr(object))) + " is not a non-negative 64-bit integer");
    }
    return value;
}

std::size_t count_of(const py::handle& object, const Name& name) {
    const unsigned long long value = unsigned_of(object.ptr(), name);
    if (value == 0 || value > (1ULL << 46))
        refuse(name.text() + " = " + std::to_string(value) + " must be from 1 to 2**46");
    return static_cast<std::size_t>(value);
}

DType dtype_of(const py::handle& object, const Name& name) {
    const unsigned long long value = unsigned_of(object.ptr(), name);
    if (value >= static_cast<unsigned long long>(kNumDTypes))
        refuse(name.text() + " = " + std::to_string(value) + " is not a DType (FP32 = 0, BF16 = 1, FP16 = 2)");
    return static_cast<DType>(value);
}

int threads_of(long long num_threads) {
    if (num_threads < 1 || num_threads > 4096)
        refuse("num_threads = " + std::to_string(num_threads) + " must be from 1 to 4096");
    return static_cast<int>(num_threads);
}

double number_of(const py::handle& object, const Name& name, double least, double limit) {
    double value = std::nan("");
    try {
        value = object.cast<double>();
    } catch (const py::cast_error&) {
        refuse(name.text() + " is not a number");
    }
    if (!(value >= least && value < limit) || !std::isfinite(value))
        refuse(name.text() + " = " + std::string(py::str(object)) + " must be finite, at least " +
               std::string(py::str(py::float_(least))) +
               (std::isfinite(limit) ? " and below " + std::string(py::str(py::float_(limit))) : ""));
    return value;
}

} // namespace cpu_adam
