// Function: converts the arguments, agrees on the device, finds the stream, calls, raises.
#include "core/function.h"

#include <structmember.h>

#include <new>

#include "core/convert.h"

namespace apex_te {

PyObject* raise(const ApexTeCall& call) {
  PyObject* type = PyExc_RuntimeError;
  if (call.error_kind == kApexTeTypeError) type = PyExc_TypeError;
  if (call.error_kind == kApexTeValueError) type = PyExc_ValueError;
  if (call.error_kind == kApexTeUnsupported) type = PyExc_NotImplementedError;
  PyErr_SetString(type, call.error);
  return nullptr;
}

namespace {

PyTypeObject* g_type = nullptr;

// The call, or, before its device's library is known, the search for that. `is_resolved`: false
// where the search was all that was done.
PyObject* call(CallState& state, PyObject* const* args, Py_ssize_t positional, PyObject* names,
               bool* is_resolved) {
  FunctionObject* self = state.self;
  *is_resolved = true;
  if (!convert_all(state, args, positional, names)) return nullptr;

  const bool is_cpu = state.device.device_type == kDLCPU;
  const bool is_gpu = state.device.device_type == kDLCUDA || state.device.device_type == kDLROCM;
  if (!is_cpu && !is_gpu) {
    refuse(PyExc_NotImplementedError, state, state.device_parameter, -1, "be on cpu or cuda",
           device_name(state.device));
    return nullptr;
  }
  const Target target = is_cpu ? kCpu : kCuda;
  if (!self->targets[target]) {
    *is_resolved = !resolve(self, target, state.device.device_id);
    return nullptr;
  }

  ApexTeCall c_call;
  c_call.args = state.args.data();
  c_call.num_args = static_cast<int32_t>(self->signature->parameters.size());
  c_call.device_id = state.device.device_id;
  c_call.stream = nullptr;
  c_call.result = 0;
  if (is_gpu && exchange_api()->current_work_stream(state.device.device_type,
                                                    state.device.device_id, &c_call.stream) != 0)
    return nullptr;
  int32_t error;
  Py_BEGIN_ALLOW_THREADS;
  error = self->targets[target](&c_call);
  Py_END_ALLOW_THREADS;
  if (error) return raise(c_call);
  if (self->signature->returns_int) return PyLong_FromLongLong(c_call.result);
  Py_RETURN_NONE;
}

PyObject* function_call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  // A second time after a search, which runs Python code and lets other threads change tensors.
  for (;;) {
    CallState state;
    state.self = reinterpret_cast<FunctionObject*>(object);
    PyObject* result = nullptr;
    bool is_resolved = true;
    try {
      result = call(state, args, PyVectorcall_NARGS(nargsf), names, &is_resolved);
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    }
    release(state);
    if (is_resolved) return result;
  }
}

PyObject* function_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"name", "signature", "resolver", nullptr};
  PyObject *name, *text, *resolver;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UUO:Function", const_cast<char**>(keywords),
                                   &name, &text, &resolver))
    return nullptr;
  for (PyObject* given : {name, text})
    if (!PyUnicode_AsUTF8(given)) {
      PyErr_Format(PyExc_ValueError, "Function: %s must have no surrogates, got %A",
                   given == name ? "name" : "signature", given);
      return nullptr;
    }
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
  type.tp_doc =
      "Function(name, signature, resolver): a callable bound to an op library's function.";
  type.tp_basicsize = sizeof(FunctionObject);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(FunctionObject, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = function_new;
  type.tp_dealloc = function_dealloc;
  type.tp_repr = function_repr;
  type.tp_members = function_members;
  if (PyType_Ready(&type) == 0) g_type = &type;
  return g_type;
}

bool resolve(FunctionObject* self, Target target, int device_id) {
  PyObject* address =
      PyObject_CallFunction(self->resolver, "si", target == kCpu ? "cpu" : "cuda", device_id);
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

bool is_function(PyObject* object) { return Py_TYPE(object) == g_type; }

}  // namespace apex_te
