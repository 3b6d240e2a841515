// Function: converts the arguments, agrees on the device, finds the stream, calls, raises.
#include "core/function.h"

#include <structmember.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "common/op.h"
#include "core/signature.h"

namespace apex_te {
namespace {

using OpFunction = int32_t (*)(ApexTeCall*);

PyTypeObject* g_tensor_type = nullptr;     // torch.Tensor
PyTypeObject* g_parameter_type = nullptr;  // torch.nn.Parameter
PyObject* g_is_neg = nullptr;              // torch.Tensor.is_neg
const DLPackExchangeAPI* g_api = nullptr;

constexpr int kMaxParameters = 24;
enum Target { kCpu, kCuda, kNumTargets };

struct FunctionObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* name;
  PyObject* signature_text;
  PyObject* resolver;
  Signature* signature;
  OpFunction targets[kNumTargets];
};

// What one call needs beside the stack arrays: the tensors of list arguments.
struct ListStorage {
  std::vector<DLTensor> tensors;
  std::vector<double> floats;
};

struct CallState {
  FunctionObject* self;
  std::array<ApexTeArg, kMaxParameters> args;
  std::array<DLTensor, kMaxParameters> tensors;
  std::array<std::unique_ptr<ListStorage>, kMaxParameters> lists;
  bool has_device = false;
  DLDevice device{kDLCPU, 0};
  int device_parameter = 0;
};

const char* name_of(const FunctionObject* f) { return PyUnicode_AsUTF8(f->name); }

std::string device_name(DLDevice d) {
  if (d.device_type == kDLCPU) return "cpu";
  const bool is_gpu = d.device_type == kDLCUDA || d.device_type == kDLROCM;
  return (is_gpu ? "cuda:" : "device type " + std::to_string(int(d.device_type)) + ":") +
         std::to_string(d.device_id);
}

// Where an argument stands, for an error: "scale" or "histories[3]".
std::string place(const CallState& state, int index, int item) {
  std::string text = state.self->signature->parameters[index].name;
  if (item >= 0) text += "[" + std::to_string(item) + "]";
  return text;
}

bool refuse(PyObject* type, const CallState& state, int index, int item, const char* expected,
            const std::string& actual) {
  PyErr_Format(type, "%s: %s must %s, got %s", name_of(state.self),
               place(state, index, item).c_str(), expected, actual.c_str());
  return false;
}

bool is_tensor(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  return type == g_tensor_type || type == g_parameter_type || PyType_IsSubtype(type, g_tensor_type);
}

// Wraps a conversion error of torch (meta, sparse, functorch wrappers) in one line with a name.
bool refuse_conversion(const CallState& state, int index, int item) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  std::string reason = "one that DLPack cannot describe";
  if (PyObject* text = value ? PyObject_Str(value) : nullptr) {
    if (const char* utf8 = PyUnicode_AsUTF8(text)) {
      reason += " (" + std::string(utf8).substr(0, std::string(utf8).find('\n')) + ")";
    }
    Py_DECREF(text);
  }
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  PyErr_Clear();
  return refuse(PyExc_TypeError, state, index, item, "be a dense tensor with storage", reason);
}

bool convert_tensor(CallState& state, PyObject* object, DLTensor* out, int index, int item) {
  if (!is_tensor(object))
    return refuse(PyExc_TypeError, state, index, item, "be a torch.Tensor",
                  Py_TYPE(object)->tp_name);
  if (g_api->dltensor_from_py_object_no_sync(object, out) != 0)
    return refuse_conversion(state, index, item);
  if (out->dtype.code == kDLComplex)
    return refuse(PyExc_TypeError, state, index, item, "have a real dtype", "a complex dtype");
  if (!out->data) {
    for (int i = 0; i < out->ndim; ++i)
      if (out->shape[i] == 0) goto device;
    return refuse(PyExc_TypeError, state, index, item, "have storage",
                  std::string("a ") + Py_TYPE(object)->tp_name + " without data (fake or wrapper)");
  }
device:
  // A neg view carries its sign in a bit DLPack does not know; only the
  // types that are parts of a complex one can have it.
  if (out->dtype.code == kDLFloat) {
    PyObject* neg = PyObject_CallOneArg(g_is_neg, object);
    if (!neg) return false;
    const bool is_neg = neg == Py_True;
    Py_DECREF(neg);
    if (is_neg)
      return refuse(PyExc_TypeError, state, index, item, "be resolved (call resolve_neg())",
                    "a neg view");
  }
  if (!state.has_device) {
    state.has_device = true;
    state.device = out->device;
    state.device_parameter = index;
  } else if (out->device.device_type != state.device.device_type ||
             out->device.device_id != state.device.device_id) {
    const std::string expected =
        "be on " + device_name(state.device) + " like " + place(state, state.device_parameter, -1);
    return refuse(PyExc_ValueError, state, index, item, expected.c_str(), device_name(out->device));
  }
  return true;
}

bool convert_list(CallState& state, PyObject* object, int index, int32_t kind) {
  ApexTeArg& arg = state.args[index];
  if (!PyList_Check(object) && !PyTuple_Check(object))
    return refuse(PyExc_TypeError, state, index, -1, "be a list or tuple", Py_TYPE(object)->tp_name);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
  PyObject** items = PySequence_Fast_ITEMS(object);
  state.lists[index] = std::make_unique<ListStorage>();
  ListStorage& storage = *state.lists[index];
  arg.kind = kind;
  arg.count = static_cast<int32_t>(count);
  if (kind == kApexTeTensorList) {
    storage.tensors.resize(count);
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!convert_tensor(state, items[i], &storage.tensors[i], index, static_cast<int>(i)))
        return false;
    arg.value.tensors = storage.tensors.data();
  } else {
    storage.floats.resize(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      storage.floats[i] = PyFloat_AsDouble(items[i]);
      if (storage.floats[i] == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return refuse(PyExc_TypeError, state, index, static_cast<int>(i), "be a float",
                      Py_TYPE(items[i])->tp_name);
      }
    }
    arg.value.floats = storage.floats.data();
  }
  return true;
}

bool convert_scalar(CallState& state, PyObject* object, int index, int32_t kind) {
  ApexTeArg& arg = state.args[index];
  arg.kind = kind;
  const char* expected = "be an int";
  if (kind == kApexTeBool) {
    if (PyBool_Check(object)) {
      arg.value.i = object == Py_True;
      return true;
    }
    expected = "be a bool";
  } else if (kind == kApexTeInt) {
    if (PyLong_Check(object) && !PyBool_Check(object)) {
      arg.value.i = PyLong_AsLongLong(object);
      return !(arg.value.i == -1 && PyErr_Occurred());
    }
  } else {
    if (PyFloat_Check(object) || (PyLong_Check(object) && !PyBool_Check(object))) {
      arg.value.f = PyFloat_AsDouble(object);
      return !(arg.value.f == -1.0 && PyErr_Occurred());
    }
    expected = "be a float";
  }
  return refuse(PyExc_TypeError, state, index, -1, expected, Py_TYPE(object)->tp_name);
}

bool convert(CallState& state, PyObject* object, int index) {
  const Parameter& parameter = state.self->signature->parameters[index];
  ApexTeArg& arg = state.args[index];
  arg.count = 0;
  if (parameter.kind == kApexTeTensor) {
    if (parameter.is_optional && object == Py_None) {
      arg.kind = kApexTeNone;
      return true;
    }
    arg.kind = kApexTeTensor;
    arg.value.tensor = &state.tensors[index];
    return convert_tensor(state, object, &state.tensors[index], index, -1);
  }
  if (parameter.kind == kApexTeTensorList || parameter.kind == kApexTeFloatList)
    return convert_list(state, object, index, parameter.kind);
  return convert_scalar(state, object, index, parameter.kind);
}

// Positional arguments straight from the vector, keywords by name, None for optionals left out.
bool convert_all(CallState& state, PyObject* const* args, Py_ssize_t positional, PyObject* names) {
  const auto& parameters = state.self->signature->parameters;
  const int count = static_cast<int>(parameters.size());
  if (positional > count) {
    PyErr_Format(PyExc_TypeError, "%s: takes %d arguments, got %zd", name_of(state.self), count,
                 positional);
    return false;
  }
  const Py_ssize_t num_names = names ? PyTuple_GET_SIZE(names) : 0;
  Py_ssize_t used = 0;
  for (int i = 0; i < count; ++i) {
    PyObject* object = i < positional ? args[i] : nullptr;
    for (Py_ssize_t k = 0; k < num_names && !(object && used == num_names); ++k) {
      if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, k), parameters[i].name.c_str()))
        continue;
      if (object) {
        PyErr_Format(PyExc_TypeError, "%s: got %s twice", name_of(state.self),
                     parameters[i].name.c_str());
        return false;
      }
      object = args[positional + k];
      ++used;
      break;
    }
    if (!object && parameters[i].is_optional) object = Py_None;
    if (!object) {
      PyErr_Format(PyExc_TypeError, "%s: missing argument %s", name_of(state.self),
                   parameters[i].name.c_str());
      return false;
    }
    if (!convert(state, object, i)) return false;
  }
  if (used != num_names) {
    for (Py_ssize_t k = 0; k < num_names; ++k) {
      bool known = false;
      for (const Parameter& p : parameters)
        known |= !PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, k), p.name.c_str());
      if (!known) {
        PyErr_Format(PyExc_TypeError, "%s: unknown argument %U", name_of(state.self),
                     PyTuple_GET_ITEM(names, k));
        return false;
      }
    }
  }
  return true;
}

// First call on a device type: the resolver builds or opens the library and returns an address.
bool resolve(FunctionObject* self, Target target, int device_id) {
  PyObject* address = PyObject_CallFunction(self->resolver, "si", target == kCpu ? "cpu" : "cuda",
                                            device_id);
  if (!address) return false;
  self->targets[target] = reinterpret_cast<OpFunction>(PyLong_AsVoidPtr(address));
  Py_DECREF(address);
  if (PyErr_Occurred()) return false;
  if (!self->targets[target]) {
    PyErr_Format(PyExc_RuntimeError, "%s: the resolver returned no address", name_of(self));
    return false;
  }
  return true;
}

PyObject* raise(const ApexTeCall& call) {
  PyObject* type = PyExc_RuntimeError;
  if (call.error_kind == kApexTeTypeError) type = PyExc_TypeError;
  if (call.error_kind == kApexTeValueError) type = PyExc_ValueError;
  if (call.error_kind == kApexTeUnsupported) type = PyExc_NotImplementedError;
  PyErr_SetString(type, call.error);
  return nullptr;
}

PyObject* function_call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  auto* self = reinterpret_cast<FunctionObject*>(object);
  CallState state;
  state.self = self;
  if (!convert_all(state, args, PyVectorcall_NARGS(nargsf), names)) return nullptr;

  const bool is_cpu = state.device.device_type == kDLCPU;
  const bool is_gpu =
      state.device.device_type == kDLCUDA || state.device.device_type == kDLROCM;
  if (!is_cpu && !is_gpu) {
    refuse(PyExc_NotImplementedError, state, state.device_parameter, -1, "be on cpu or cuda",
           device_name(state.device));
    return nullptr;
  }
  const Target target = is_cpu ? kCpu : kCuda;
  if (!self->targets[target] && !resolve(self, target, state.device.device_id)) return nullptr;

  ApexTeCall call;
  call.args = state.args.data();
  call.num_args = static_cast<int32_t>(self->signature->parameters.size());
  call.device_id = state.device.device_id;
  call.stream = nullptr;
  call.result = 0;
  if (is_gpu && g_api->current_work_stream(state.device.device_type, state.device.device_id,
                                           &call.stream) != 0)
    return nullptr;
  int32_t error;
  Py_BEGIN_ALLOW_THREADS;
  error = self->targets[target](&call);
  Py_END_ALLOW_THREADS;
  if (error) return raise(call);
  if (self->signature->returns_int) return PyLong_FromLongLong(call.result);
  Py_RETURN_NONE;
}

PyObject* function_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"name", "signature", "resolver", nullptr};
  PyObject *name, *text, *resolver;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UUO:Function", const_cast<char**>(keywords),
                                   &name, &text, &resolver))
    return nullptr;
  auto signature = std::make_unique<Signature>();
  const std::string problem = parse_signature(PyUnicode_AsUTF8(text), signature.get());
  if (!problem.empty() || signature->parameters.size() > kMaxParameters) {
    PyErr_Format(PyExc_ValueError, "Function: signature of %U must be valid, got %s", name,
                 problem.empty() ? "too many parameters" : problem.c_str());
    return nullptr;
  }
  auto* self = reinterpret_cast<FunctionObject*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = function_call;
  self->name = Py_NewRef(name);
  self->signature_text = Py_NewRef(text);
  self->resolver = Py_NewRef(resolver);
  self->signature = signature.release();
  self->targets[kCpu] = self->targets[kCuda] = nullptr;
  return reinterpret_cast<PyObject*>(self);
}

void function_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<FunctionObject*>(object);
  Py_XDECREF(self->name);
  Py_XDECREF(self->signature_text);
  Py_XDECREF(self->resolver);
  delete self->signature;
  Py_TYPE(object)->tp_free(object);
}

PyObject* function_repr(PyObject* object) {
  auto* self = reinterpret_cast<FunctionObject*>(object);
  return PyUnicode_FromFormat("<apex_te function %U(%U)>", self->name, self->signature_text);
}

PyMemberDef function_members[] = {
    {"__name__", T_OBJECT_EX, offsetof(FunctionObject, name), READONLY, nullptr},
    {"signature", T_OBJECT_EX, offsetof(FunctionObject, signature_text), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

}  // namespace

PyTypeObject* function_type() {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
  static PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
#pragma GCC diagnostic pop
  type.tp_name = "apex_te_core.Function";
  type.tp_doc = "Function(name, signature, resolver): a callable bound to an op library's function.";
  type.tp_basicsize = sizeof(FunctionObject);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(FunctionObject, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = function_new;
  type.tp_dealloc = function_dealloc;
  type.tp_repr = function_repr;
  type.tp_members = function_members;
  return PyType_Ready(&type) == 0 ? &type : nullptr;
}

bool load_exchange_api() {
  PyObject* torch = PyImport_ImportModule("torch");
  if (!torch) return false;
  PyObject* tensor = PyObject_GetAttrString(torch, "Tensor");
  PyObject* nn = tensor ? PyObject_GetAttrString(torch, "nn") : nullptr;
  PyObject* parameter = nn ? PyObject_GetAttrString(nn, "Parameter") : nullptr;
  Py_XDECREF(nn);
  Py_DECREF(torch);
  if (!tensor || !parameter) return false;
  PyObject* capsule = PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
  if (!capsule) return false;
  auto* header = static_cast<const DLPackExchangeAPIHeader*>(
      PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  while (header && header->version.major != DLPACK_MAJOR_VERSION) header = header->prev_api;
  if (!header) {
    if (!PyErr_Occurred())
      PyErr_SetString(PyExc_ImportError, "torch's DLPack exchange API has no version 1 table");
    return false;
  }
  g_api = reinterpret_cast<const DLPackExchangeAPI*>(header);
  if (!g_api->dltensor_from_py_object_no_sync || !g_api->current_work_stream) {
    PyErr_SetString(PyExc_ImportError, "torch's DLPack exchange API lacks the no-sync conversion");
    return false;
  }
  g_tensor_type = reinterpret_cast<PyTypeObject*>(tensor);
  g_parameter_type = reinterpret_cast<PyTypeObject*>(parameter);
  g_is_neg = PyObject_GetAttrString(tensor, "is_neg");
  return g_is_neg != nullptr;
}

}  // namespace apex_te
