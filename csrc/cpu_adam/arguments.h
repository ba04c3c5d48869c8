// Checked conversion of Python arguments. Every refusal is a std::invalid_argument (ValueError) that names the field.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "types.h"

namespace cpu_adam {

namespace py = pybind11;

[[noreturn]] void refuse(const std::string& message);
unsigned long long unsigned_of(PyObject* object, const std::string& name);
std::size_t count_of(const py::handle& object, const std::string& name); // 1 to 2**46
DType dtype_of(const py::handle& object, const std::string& name);
int threads_of(long long num_threads); // 1 to 4096
double number_of(const py::handle& object, const char* field, const std::string& prefix, double least, double limit);

template <class T> T* address_of(const py::handle& object, const std::string& name) {
    auto* const address = reinterpret_cast<T*>(static_cast<std::uintptr_t>(unsigned_of(object.ptr(), name)));
    if (address == nullptr)
        refuse(name + " is 0: an address is needed here");
    return address;
}

// Adds adam_step and its sisters to the module.
void bind_steps(py::module_& module);

} // namespace cpu_adam
