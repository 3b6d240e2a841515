// TensorList as a Python sequence; convert.cpp fills and checks its views.
#include "core/tensor_list.h"

namespace apex_te {
namespace {

PyTypeObject* g_type = nullptr;

TensorListObject* self_of(PyObject* object) { return reinterpret_cast<TensorListObject*>(object); }

PyObject* list_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"tensors", nullptr};
  PyObject* tensors;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:TensorList", const_cast<char**>(keywords),
                                   &tensors))
    return nullptr;
  PyObject* items = PySequence_Tuple(tensors);
  if (!items) return nullptr;
  PyObject* object = type->tp_alloc(type, 0);
  if (!object) {
    Py_DECREF(items);
    return nullptr;
  }
  self_of(object)->tensors = items;
  self_of(object)->views = new Views;
  return object;
}

int list_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(self_of(object)->tensors);
  return 0;
}

// Like a tuple it needs no tp_clear: it exists after what it holds, so that another object closes
// any cycle. A cleared one could still be used by a destructor.
void list_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  Py_XDECREF(self_of(object)->tensors);
  delete self_of(object)->views;
  Py_TYPE(object)->tp_free(object);
}

Py_ssize_t list_length(PyObject* object) { return PyTuple_GET_SIZE(self_of(object)->tensors); }

PyObject* list_item(PyObject* object, Py_ssize_t i) {
  return PySequence_GetItem(self_of(object)->tensors, i);
}

PyObject* list_iter(PyObject* object) { return PyObject_GetIter(self_of(object)->tensors); }

PyObject* list_repr(PyObject* object) {
  return PyUnicode_FromFormat("<TensorList of %zd tensors>", list_length(object));
}

PySequenceMethods sequence_methods() {
  PySequenceMethods methods{};
  methods.sq_length = list_length;
  methods.sq_item = list_item;
  return methods;
}

}  // namespace

PyTypeObject* tensor_list_type() {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
  static PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
#pragma GCC diagnostic pop
  static PySequenceMethods methods = sequence_methods();
  type.tp_name = "apex_te_core.TensorList";
  type.tp_doc =
      "TensorList(tensors): an immutable sequence that a bound function takes wherever it takes a "
      "list of tensors, at a fraction of a list's cost. A call reads each tensor's address, shape "
      "and strides again, so a tensor may be resized or given other storage in between.";
  type.tp_basicsize = sizeof(TensorListObject);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_new = list_new;
  type.tp_traverse = list_traverse;
  type.tp_dealloc = list_dealloc;
  type.tp_as_sequence = &methods;
  type.tp_iter = list_iter;
  type.tp_repr = list_repr;
  if (PyType_Ready(&type) == 0) g_type = &type;
  return g_type;
}

bool is_tensor_list(PyObject* object) { return Py_TYPE(object) == g_type; }

}  // namespace apex_te
