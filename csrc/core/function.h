// The dispatcher's callable: a CPython vectorcall object that passes torch tensors to a C function.
#pragma once

#include <Python.h>

#include "common/abi/op.h"
#include "core/convert.h"

namespace apex_te {

// Creates the Function type; nullptr with a Python error set on failure.
PyTypeObject* function_type();

bool is_function(PyObject* object);

// Finds the C function for a device type, which builds or opens the op's library; false with a
// Python error set on failure.
bool resolve(FunctionObject* function, Target target, int device_id);

// Raises the error that a C function has left in its call; returns nullptr.
PyObject* raise(const ApexTeCall& call);

// Reads torch.Tensor.__dlpack_c_exchange_api__ once; false with a Python error set on failure.
bool load_exchange_api();

}  // namespace apex_te
