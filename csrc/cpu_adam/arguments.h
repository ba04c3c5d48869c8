// Checked conversion of Python arguments. Every refusal is a std::invalid_argument (ValueError) that names the field.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "types.h"

namespace cpu_adam {

namespace py = pybind11;

// A name for messages: a field, of a numbered entry of a list where there is one. Written out only when it is needed:
// steps of many small parameters read hundreds of thousands of fields.
class Name {
  public:
    Name(const char* field) : field_(field) {} // NOLINT: converts
    Name(const char* list, std::size_t index, const char* field = nullptr)
        : list_(list), index_(index), field_(field) {}
    std::string text() const {
        const std::string entry = list_ == nullptr ? "" : std::string(list_) + "[" + std::to_string(index_) + "]";
        return field_ == nullptr ? entry : entry + (entry.empty() ? "" : ".") + field_;
    }

  private:
    const char* list_ = nullptr;
    std::size_t index_ = 0;
    const char* field_;
};

[[noreturn]] void refuse(const std::string& message);
unsigned long long unsigned_of(PyObject* object, const Name& name);
std::size_t count_of(const py::handle& object, const Name& name); // 1 to 2**46
DType dtype_of(const py::handle& object, const Name& name);
int threads_of(long long num_threads); // 1 to 4096
double number_of(const py::handle& object, const Name& name, double least, double limit);

template <class T> T* address_of(const py::handle& object, const Name& name) {
    auto* const address = reinterpret_cast<T*>(static_cast<std::uintptr_t>(unsigned_of(object.ptr(), name)));
    if (address == nullptr)
        refuse(name.text() + " is 0: an address is needed here");
    return address;
}

// Adds adam_step and its sisters to the module.
void bind_steps(py::module_& module);

} // namespace cpu_adam
