// Argument conversion, with every refusal naming the argument.
#include "core/convert.h"

#include "core/function.h"

namespace apex_te {
namespace {

PyTypeObject* g_tensor_type = nullptr;     // torch.Tensor
PyTypeObject* g_parameter_type = nullptr;  // torch.nn.Parameter
PyObject* g_is_neg = nullptr;              // torch.Tensor.is_neg
const DLPackExchangeAPI* g_api = nullptr;

}  // namespace

const char* name_of(const FunctionObject* f) { return PyUnicode_AsUTF8(f->name); }

std::string device_name(DLDevice d) {
  if (d.device_type == kDLCPU) return "cpu";
  const bool is_gpu = d.device_type == kDLCUDA || d.device_type == kDLROCM;
  return (is_gpu ? "cuda:" : "device type " + std::to_string(int(d.device_type)) + ":") +
         std::to_string(d.device_id);
}

namespace {

// Name of an argument for an error: "scale" or "histories[3]".
std::string place(const CallState& state, int index, int item) {
  std::string text = state.self->signature->parameters[index].name;
  if (item >= 0) text += "[" + std::to_string(item) + "]";
  return text;
}

}  // namespace

bool refuse(PyObject* type, const CallState& state, int index, int item, const char* expected,
            const std::string& actual) {
  PyErr_Format(type, "%s: %s must %s, got %s", name_of(state.self),
               place(state, index, item).c_str(), expected, actual.c_str());
  return false;
}

bool is_plain(PyObject* object) {
  return Py_TYPE(object) == g_tensor_type || Py_TYPE(object) == g_parameter_type;
}

bool is_negated(PyObject* object, const DLTensor& view) {
  if (view.dtype.code != kDLFloat) return false;
  PyObject* neg = PyObject_CallOneArg(g_is_neg, object);
  if (!neg) return true;
  Py_DECREF(neg);
  return neg == Py_True;
}

namespace {

bool is_tensor(PyObject* object) {
  return is_plain(object) || PyType_IsSubtype(Py_TYPE(object), g_tensor_type);
}

// Wraps a conversion error of torch (meta, sparse, functorch wrappers) in one line with a name.
bool refuse_conversion(const CallState& state, int index, int item) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;  // KeyboardInterrupt
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

// All tensors of a call stand on the first one's device.
bool agree_on_device(CallState& state, DLDevice device, int index, int item) {
  if (!state.has_device) {
    state.has_device = true;
    state.device = device;
    state.device_parameter = index;
    return true;
  }
  if (device.device_type == state.device.device_type && device.device_id == state.device.device_id)
    return true;
  const std::string expected =
      "be on " + device_name(state.device) + " like " + place(state, state.device_parameter, -1);
  return refuse(PyExc_ValueError, state, index, item, expected.c_str(), device_name(device));
}

bool convert_tensor(CallState& state, PyObject* object, DLTensor* out, int index, int item) {
  if (!is_tensor(object))
    return refuse(PyExc_TypeError, state, index, item, "be a torch.Tensor",
                  Py_TYPE(object)->tp_name);
  if (!is_plain(object)) state.ran_python = true;
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
  if (is_negated(object, *out)) {
    if (PyErr_Occurred()) return false;
    return refuse(PyExc_TypeError, state, index, item, "be resolved (call resolve_neg())",
                  "a neg view");
  }
  return agree_on_device(state, out->device, index, item);
}

bool is_same_view(const DLTensor& a, const DLTensor& b) {
  return a.data == b.data && a.byte_offset == b.byte_offset && a.ndim == b.ndim &&
         a.shape == b.shape && a.strides == b.strides && a.dtype.code == b.dtype.code &&
         a.dtype.bits == b.dtype.bits && a.device.device_type == b.device.device_type &&
         a.device.device_id == b.device.device_id;
}

// A TensorList: each tensor is described again, but one found where it was needs no other check.
// Extents are behind the view's pointers, in the tensor itself, so they are always the present
// ones.
bool refresh_list(CallState& state, TensorListObject* list, Views* held, int index) {
  const Py_ssize_t count = PyTuple_GET_SIZE(list->tensors);
  const bool is_first = !*list->views;
  Views next = is_first ? std::make_shared<std::vector<DLTensor>>(count) : *list->views;
  bool is_private = is_first;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const int item = static_cast<int>(i);
    PyObject* object = PyTuple_GET_ITEM(list->tensors, i);
    DLTensor now;
    if (!is_first && g_api->dltensor_from_py_object_no_sync(object, &now) == 0 && now.data &&
        is_same_view(now, (*next)[i])) {
      if (!agree_on_device(state, now.device, index, item)) return false;
      continue;
    }
    PyErr_Clear();
    if (!convert_tensor(state, object, &now, index, item)) return false;
    if (!is_first && is_same_view(now, (*next)[i])) continue;  // empty, without an address
    if (!is_private) {  // a call on another thread may be reading the present ones
      next = std::make_shared<std::vector<DLTensor>>(*next);
      is_private = true;
    }
    (*next)[i] = now;
  }
  *list->views = next;
  *held = next;
  return true;
}

// A float or int as a double, and in a list whatever else has __float__ or __index__.
bool convert_float(CallState& state, PyObject* object, double* out, int index, int item) {
  if (PyFloat_Check(object)) {
    *out = PyFloat_AS_DOUBLE(object);
    return true;
  }
  const bool is_int = PyLong_Check(object);
  if (!is_int) state.ran_python = true;
  *out = is_int ? PyLong_AsDouble(object) : PyFloat_AsDouble(object);
  if (*out != -1.0 || !PyErr_Occurred()) return true;
  if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
    PyErr_Clear();
    return refuse(PyExc_ValueError, state, index, item, "be in the range of a double",
                  "an int beyond it");
  }
  // An error of the object's own method passes; a tensor's says nothing of the argument.
  if (!PyErr_ExceptionMatches(is_tensor(object) ? PyExc_Exception : PyExc_TypeError)) return false;
  PyErr_Clear();
  return refuse(PyExc_TypeError, state, index, item, "be a float", Py_TYPE(object)->tp_name);
}

bool convert_list(CallState& state, PyObject* object, int index, int32_t kind) {
  ApexTeArg& arg = state.args[index];
  if (kind == kApexTeTensorList && is_tensor_list(object)) {
    if (!state.lists) state.lists = std::make_unique<std::array<ListStorage, kMaxParameters>>();
    ListStorage& storage = (*state.lists)[index];
    storage.source = object;
    for (int i = 0; i < index && !storage.prepared; ++i)  // an output may be its input
      if ((*state.lists)[i].source == object) storage.prepared = (*state.lists)[i].prepared;
    Views& views = storage.prepared;
    if (!views && !refresh_list(state, reinterpret_cast<TensorListObject*>(object), &views, index))
      return false;
    arg.kind = kind;
    arg.count = static_cast<int32_t>(views->size());
    arg.value.tensors = views->data();
    return true;
  }
  if (!PyList_Check(object) && !PyTuple_Check(object))
    return refuse(PyExc_TypeError, state, index, -1, "be a list or tuple",
                  Py_TYPE(object)->tp_name);
  if (!state.lists) state.lists = std::make_unique<std::array<ListStorage, kMaxParameters>>();
  ListStorage& storage = (*state.lists)[index];
  // The user's code, run by a conversion or on another thread, may clear the list.
  storage.items = PyList_Check(object) ? PyList_AsTuple(object) : Py_NewRef(object);
  if (!storage.items) return false;
  const Py_ssize_t count = PyTuple_GET_SIZE(storage.items);
  PyObject** items = PySequence_Fast_ITEMS(storage.items);
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
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!convert_float(state, items[i], &storage.floats[i], index, static_cast<int>(i)))
        return false;
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
      int overflow;
      arg.value.i = PyLong_AsLongLongAndOverflow(object, &overflow);
      if (!overflow) return true;
      return refuse(PyExc_ValueError, state, index, -1, "be an int of 64 bits", "one beyond them");
    }
  } else {
    if (PyFloat_Check(object) || (PyLong_Check(object) && !PyBool_Check(object)))
      return convert_float(state, object, &arg.value.f, index, -1);
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

bool refuse_change(CallState& state, int index, int item) {
  PyErr_Clear();
  return refuse(PyExc_RuntimeError, state, index, item, "stay as it is while the call is prepared",
                "other storage, sizes or strides");
}

bool describes(PyObject* object, const DLTensor& view) {
  DLTensor now;
  return g_api->dltensor_from_py_object_no_sync(object, &now) == 0 && is_same_view(now, view);
}

// After the last conversion that may have run the user's code: each tensor must still be what it
// was when it was converted. Those that may run such code again come first.
bool check_unchanged(CallState& state) {
  const auto& parameters = state.self->signature->parameters;
  for (const bool plain : {false, true})
    for (size_t i = 0; i < parameters.size(); ++i) {
      const ApexTeArg& arg = state.args[i];
      PyObject* object = state.objects[i];
      if (arg.kind == kApexTeTensor) {
        if (is_plain(object) == plain && !describes(object, *arg.value.tensor))
          return refuse_change(state, static_cast<int>(i), -1);
      } else if (arg.kind == kApexTeTensorList) {
        PyObject* items = is_tensor_list(object)
                              ? reinterpret_cast<TensorListObject*>(object)->tensors
                              : (*state.lists)[i].items;
        for (int32_t k = 0; k < arg.count; ++k) {
          PyObject* item = PyTuple_GET_ITEM(items, k);
          if (is_plain(item) == plain && !describes(item, arg.value.tensors[k]))
            return refuse_change(state, static_cast<int>(i), k);
        }
      }
    }
  return true;
}

}  // namespace

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
    state.objects[i] = object;
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
  return !state.ran_python || check_unchanged(state);
}

void release(CallState& state) {
  if (!state.lists) return;
  for (size_t i = 0; i < state.self->signature->parameters.size(); ++i)
    Py_CLEAR((*state.lists)[i].items);
}

const DLPackExchangeAPI* exchange_api() { return g_api; }

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
