// The dispatcher's Python module: opens op libraries and offers Function.
#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "core/function.h"
#include "core/program.h"
#include "core/tensor_list.h"

namespace py = pybind11;

namespace {

// dlopen with every symbol bound now, so that a broken library fails here and not in a call.
uintptr_t open_library(const std::string& path) {
  void* handle;
  {
    py::gil_scoped_release release;
    handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (!handle) {
    const char* reason = dlerror();
    throw py::import_error("cannot open " + path + ": " + (reason ? reason : "unknown reason"));
  }
  return reinterpret_cast<uintptr_t>(handle);
}

uintptr_t symbol(uintptr_t handle, const std::string& name) {
  return reinterpret_cast<uintptr_t>(dlsym(reinterpret_cast<void*>(handle), name.c_str()));
}

}  // namespace

PYBIND11_MODULE(apex_te_core, m) {
  m.doc() = "Calls the plain C functions of op libraries with torch tensors.";
  if (!apex_te::load_exchange_api()) throw py::error_already_set();
  PyTypeObject* type = apex_te::function_type();
  if (!type) throw py::error_already_set();
  m.add_object("Function", reinterpret_cast<PyObject*>(type));
  PyTypeObject* list = apex_te::tensor_list_type();
  if (!list) throw py::error_already_set();
  m.add_object("TensorList", reinterpret_cast<PyObject*>(list));
  PyTypeObject* program = apex_te::program_type();
  if (!program) throw py::error_already_set();
  m.add_object("Program", reinterpret_cast<PyObject*>(program));
  m.def("open_library", &open_library, py::arg("path"), "dlopen; returns the handle.");
  m.def("symbol", &symbol, py::arg("handle"), py::arg("name"), "dlsym; 0 where it is absent.");
  m.def(
      "read_string",
      [](uintptr_t at) {
        if (!at) throw py::value_error("read_string: address must be that of a symbol, got 0");
        return std::string(*reinterpret_cast<const char**>(at));
      },
      py::arg("address"), "Text that the C string pointer at an address points to.");
  m.def(
      "read_int32",
      [](uintptr_t at) {
        if (!at) throw py::value_error("read_int32: address must be that of a symbol, got 0");
        return *reinterpret_cast<const int32_t*>(at);
      },
      py::arg("address"), "The int32 at an address.");
}
