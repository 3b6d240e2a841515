// apex_te_core.TensorList: tensors whose views a call refreshes instead of converting them anew.
#pragma once

#include <Python.h>

#include <memory>
#include <vector>

#include "common/abi/op.h"

namespace apex_te {

using Views = std::shared_ptr<std::vector<DLTensor>>;

struct TensorListObject {
  PyObject_HEAD PyObject* tensors;  // a tuple
  Views* views;                     // empty until the first call that uses the list
};

// Creates the type; nullptr with a Python error set on failure.
PyTypeObject* tensor_list_type();
bool is_tensor_list(PyObject* object);

}  // namespace apex_te
