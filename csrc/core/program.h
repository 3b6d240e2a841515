// apex_te_core.Program: calls of op libraries that were bound once and run together, in one call.
#pragma once

#include <Python.h>

namespace apex_te {

// Creates the type; nullptr with a Python error set on failure.
PyTypeObject* program_type();

}  // namespace apex_te
