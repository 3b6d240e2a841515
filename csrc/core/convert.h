// Turns a call's Python arguments into the tagged arguments of the C interface.
#pragma once

#include <Python.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "common/abi/op.h"
#include "core/signature.h"
#include "core/tensor_list.h"

namespace apex_te {

using OpFunction = int32_t (*)(ApexTeCall*);

constexpr int kMaxParameters = 24;
enum Target { kCpu, kCuda, kNumTargets };

struct FunctionObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* name;
  PyObject* signature_text;
  PyObject* resolver;
  Signature* signature;
  OpFunction targets[kNumTargets];
};

// Memory of one call beside the stack arrays: the tensors of list arguments.
struct ListStorage {
  PyObject* items = nullptr;  // a tuple that owns what the list held; see release()
  std::vector<DLTensor> tensors;
  Views prepared;              // a TensorList's, held while the call runs
  PyObject* source = nullptr;  // that TensorList
  std::vector<double> floats;
};

struct CallState {
  FunctionObject* self;
  std::array<ApexTeArg, kMaxParameters> args;
  std::array<DLTensor, kMaxParameters> tensors;
  std::unique_ptr<std::array<ListStorage, kMaxParameters>> lists;  // made for the first list
  std::array<PyObject*, kMaxParameters> objects;  // the arguments; the caller owns them
  bool ran_python = false;  // a conversion may have run the user's code, which may change tensors
  bool has_device = false;
  DLDevice device{kDLCPU, 0};
  int device_parameter = 0;
};

const char* name_of(const FunctionObject* f);
std::string device_name(DLDevice d);

// Raises `type` with "<function>: <parameter> must <expected>, got <actual>" and returns false.
bool refuse(PyObject* type, const CallState& state, int index, int item, const char* expected,
            const std::string& actual);

// Positional arguments straight from the vector, keywords by name, None for optionals left out.
bool convert_all(CallState& state, PyObject* const* args, Py_ssize_t positional, PyObject* names);

// Drops the references that a call holds. No destructor does so: one may run without the GIL, when
// the interpreter ends a daemon thread that is in a kernel.
void release(CallState& state);

// A type whose tensors are described without running Python code.
bool is_plain(PyObject* object);

// A neg view carries its sign in a bit DLPack does not know; only the types that are parts of a
// complex one can have it. True with a Python error set where that cannot be told.
bool is_negated(PyObject* object, const DLTensor& view);

// torch's exchange table, once load_exchange_api() (function.h) has read it.
const DLPackExchangeAPI* exchange_api();

}  // namespace apex_te
