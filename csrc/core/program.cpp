// Program: checks its tensors against those it was made with, has the others made, then runs its
// steps without Python.
#include "core/program.h"

#include <memory>
#include <string>
#include <vector>

#include "core/convert.h"
#include "core/function.h"

namespace apex_te {
namespace {

constexpr int64_t kAlignment = 16;  // of addresses, which decides how kernels access memory

// What a tensor must look like for the steps to mean what they meant when they were bound.
struct Form {
  bool is_given = false;  // false: None must be passed
  bool is_fixed = false;  // false: memory that the caller has just made for the program
  bool is_aligned = false;
  DLDevice device{kDLCPU, 0};
  DLDataType dtype{};
  std::vector<int64_t> shape, strides;
};

// A tensor argument of a step: a tensor of the call, a part of one, or a constant.
struct Source {
  enum Kind { kSlot, kPart, kConstant } kind;
  int index;  // of the slot (kSlot and kPart) or of the constant
  int64_t offset = 0;
  DLDataType dtype{};
  std::vector<int64_t> shape, strides;
};

struct Step {
  PyObject* function;  // owned by the steps' tuple
  std::vector<ApexTeArg> args;
  std::vector<std::pair<int, Source>> tensors;  // by position in `args`
};

struct Plan {
  std::vector<Form> forms;
  std::vector<Step> steps;
  std::vector<PyObject*> constants;  // owned by the steps' tuple
  std::vector<Py_ssize_t> outputs;   // places, -1 for None
  bool has_outputs = false;
  DLDevice device{kDLCPU, 0};
};

struct ProgramObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* steps;   // the constructor's argument, which holds functions and constants
  PyObject* makers;  // this and the following: the constructor's arguments
  PyObject* after;
  PyObject* current_device;
  PyObject* elsewhere;
  Plan* plan;
};

ProgramObject* self_of(PyObject* object) { return reinterpret_cast<ProgramObject*>(object); }

bool describe(PyObject* object, DLTensor* out) {
  if (exchange_api()->dltensor_from_py_object_no_sync(object, out) == 0) return true;
  PyErr_Clear();
  return false;
}

std::vector<int64_t> extents(const int64_t* values, int count) {
  return std::vector<int64_t>(values, values + count);
}

std::vector<int64_t> strides_of(const DLTensor& t) {
  if (t.strides) return extents(t.strides, t.ndim);
  std::vector<int64_t> strides(t.ndim, 1);
  for (int i = t.ndim - 2; i >= 0; --i) strides[i] = strides[i + 1] * t.shape[i + 1];
  return strides;
}

bool is_aligned(const DLTensor& t) {
  return (reinterpret_cast<uintptr_t>(t.data) + t.byte_offset) % kAlignment == 0;
}

bool has_form(const DLTensor& t, const Form& form) {
  if (t.ndim != static_cast<int>(form.shape.size()) || t.dtype.code != form.dtype.code ||
      t.dtype.bits != form.dtype.bits || t.dtype.lanes != form.dtype.lanes ||
      t.device.device_type != form.device.device_type ||
      t.device.device_id != form.device.device_id || is_aligned(t) != form.is_aligned)
    return false;
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] != form.shape[i]) return false;
    if ((t.strides ? t.strides[i] : stride) != form.strides[i]) return false;
    stride *= t.shape[i];
  }
  return true;
}

// Raises TypeError for what Python code of this project has got wrong.
bool refuse_program(const char* what) {
  PyErr_Format(PyExc_TypeError, "Program: %s", what);
  return false;
}

bool read_form(PyObject* object, Form* form) {
  if (object == Py_None) return true;
  form->is_given = true;
  if (object == Py_Ellipsis) return true;
  DLTensor t;
  if (!is_plain(object) || !describe(object, &t)) return refuse_program("forms must be tensors");
  form->is_fixed = true;
  form->is_aligned = is_aligned(t);
  form->device = t.device;
  form->dtype = t.dtype;
  form->shape = extents(t.shape, t.ndim);
  form->strides = strides_of(t);
  return true;
}

bool read_extents(PyObject* tuple, std::vector<int64_t>* out) {
  if (!PyTuple_Check(tuple)) return refuse_program("extents must be a tuple");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    out->push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
    if (PyErr_Occurred()) return false;
  }
  return true;
}

// A tuple (slot,), or (slot, byte offset, shape, strides, tensor of the dtype); or a constant.
bool read_source(Plan* plan, PyObject* object, Source* source) {
  if (!PyTuple_Check(object)) {
    if (!is_plain(object)) return refuse_program("constants must be tensors");
    source->kind = Source::kConstant;
    source->index = static_cast<int>(plan->constants.size());
    plan->constants.push_back(object);
    return true;
  }
  const Py_ssize_t size = PyTuple_GET_SIZE(object);
  if (size != 1 && size != 5) return refuse_program("a tensor must be a tuple of 1 or 5 items");
  source->kind = size == 1 ? Source::kSlot : Source::kPart;
  source->index = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(object, 0)));
  if (PyErr_Occurred()) return false;
  if (source->index < 0 || source->index >= static_cast<int>(plan->forms.size()) ||
      !plan->forms[source->index].is_given)
    return refuse_program("a slot must be that of a tensor");
  if (size == 1) return true;
  source->offset = PyLong_AsLongLong(PyTuple_GET_ITEM(object, 1));
  DLTensor like;
  PyObject* example = PyTuple_GET_ITEM(object, 4);
  if (PyErr_Occurred() || !read_extents(PyTuple_GET_ITEM(object, 2), &source->shape) ||
      !read_extents(PyTuple_GET_ITEM(object, 3), &source->strides))
    return false;
  if (source->shape.size() != source->strides.size() || !is_plain(example) ||
      !describe(example, &like))
    return refuse_program("a part must have strides and a dtype");
  source->dtype = like.dtype;
  return true;
}

bool read_scalar(PyObject* object, int32_t kind, ApexTeArg* arg) {
  arg->kind = kind;
  if (kind == kApexTeFloat)
    arg->value.f = PyFloat_AsDouble(object);
  else if (kind == kApexTeInt || kind == kApexTeBool)
    arg->value.i = PyLong_AsLongLong(object);
  else
    return refuse_program("lists have no place in a step");
  return !PyErr_Occurred();
}

bool read_step(Plan* plan, PyObject* object, Step* step) {
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 2)
    return refuse_program("a step must be a pair");
  step->function = PyTuple_GET_ITEM(object, 0);
  PyObject* args = PyTuple_GET_ITEM(object, 1);
  if (!is_function(step->function) || !PyTuple_Check(args))
    return refuse_program("a step must have a Function and a tuple");
  auto* function = reinterpret_cast<FunctionObject*>(step->function);
  const auto& parameters = function->signature->parameters;
  if (static_cast<size_t>(PyTuple_GET_SIZE(args)) != parameters.size())
    return refuse_program("a step must have all arguments of its Function");
  const Target target = plan->device.device_type == kDLCPU ? kCpu : kCuda;
  if (!function->targets[target] && !resolve(function, target, plan->device.device_id))
    return false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    PyObject* item = PyTuple_GET_ITEM(args, i);
    ApexTeArg arg;
    arg.kind = kApexTeNone;
    arg.count = 0;
    arg.value.i = 0;
    if (parameters[i].kind == kApexTeTensor) {
      if (item == Py_None) {
        if (!parameters[i].is_optional) return refuse_program("a tensor is missing");
      } else {
        Source source;
        if (!read_source(plan, item, &source)) return false;
        arg.kind = kApexTeTensor;
        step->tensors.emplace_back(static_cast<int>(i), std::move(source));
      }
    } else if (!read_scalar(item, parameters[i].kind, &arg)) {
      return false;
    }
    step->args.push_back(arg);
  }
  return true;
}

bool read_plan(Plan* plan, PyObject* forms, PyObject* steps) {
  bool has_device = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(forms); ++i) {
    Form form;
    if (!read_form(PyTuple_GET_ITEM(forms, i), &form)) return false;
    if (form.is_fixed && !has_device) {
      has_device = true;
      plan->device = form.device;
    }
    plan->forms.push_back(std::move(form));
  }
  if (!has_device) return refuse_program("a form must be that of a tensor");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); ++i) {
    plan->steps.emplace_back();
    if (!read_step(plan, PyTuple_GET_ITEM(steps, i), &plan->steps.back())) return false;
  }
  return true;
}

// A tuple of tuples, each a callable and the arguments to call it with.
bool check_calls(PyObject* calls) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(calls); ++i) {
    PyObject* item = PyTuple_GET_ITEM(calls, i);
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) == 0 ||
        !PyCallable_Check(PyTuple_GET_ITEM(item, 0)))
      return refuse_program("makers and after must be tuples of a callable and its arguments");
  }
  return true;
}

bool read_outputs(Plan* plan, PyObject* outputs) {
  if (outputs == Py_None) return true;
  plan->has_outputs = true;
  std::vector<int64_t> places;
  if (!read_extents(outputs, &places)) return false;
  for (const int64_t place : places) {
    if (place < -1 || place >= static_cast<int64_t>(plan->forms.size()))
      return refuse_program("outputs must be places of tensors or -1");
    plan->outputs.push_back(place);
  }
  return true;
}

// Describes the call's first tensors, those that its caller passes; false, without a Python error,
// if one has another form.
bool read_tensors(const Plan& plan, PyObject* const* args, size_t count,
                  std::vector<DLTensor>* slots) {
  for (size_t i = 0; i < count; ++i) {
    const Form& form = plan.forms[i];
    DLTensor& t = (*slots)[i];
    if (!form.is_given) {
      if (args[i] != Py_None) return false;
      continue;
    }
    if (!is_plain(args[i]) || !describe(args[i], &t)) return false;
    if (!form.is_fixed) continue;
    if (!has_form(t, form) || is_negated(args[i], t)) return false;
    if (!t.data)
      for (int k = 0; k <= t.ndim; ++k) {
        if (k == t.ndim) return false;  // no storage
        if (t.shape[k] == 0) break;
      }
  }
  return true;
}

// Memory of one call: the tensors of all steps.
struct Frame {
  std::vector<DLTensor> slots, constants, parts;
};

void bind(const Source& source, const Frame& frame, DLTensor* part, ApexTeArg* arg) {
  if (source.kind == Source::kSlot) {
    arg->value.tensor = &frame.slots[source.index];
  } else if (source.kind == Source::kConstant) {
    arg->value.tensor = &frame.constants[source.index];
  } else {
    *part = frame.slots[source.index];
    part->byte_offset += static_cast<uint64_t>(source.offset);
    part->dtype = source.dtype;
    part->ndim = static_cast<int32_t>(source.shape.size());
    part->shape = const_cast<int64_t*>(source.shape.data());
    part->strides = const_cast<int64_t*>(source.strides.data());
    arg->value.tensor = part;
  }
}

// Runs the steps, without the GIL; false with `c_call`'s error set if one refuses.
bool run_steps(const Plan& plan, Frame* frame, ApexTeCall* c_call) {
  ApexTeArg args[kMaxParameters];
  const Target target = plan.device.device_type == kDLCPU ? kCpu : kCuda;
  for (const Step& step : plan.steps) {
    std::copy(step.args.begin(), step.args.end(), args);
    size_t parts = 0;
    for (const auto& [position, source] : step.tensors)
      bind(source, *frame, &frame->parts[parts++], &args[position]);
    c_call->args = args;
    c_call->num_args = static_cast<int32_t>(step.args.size());
    c_call->result = 0;
    if (reinterpret_cast<FunctionObject*>(step.function)->targets[target](c_call)) return false;
  }
  return true;
}

// References to the tensors that a call has made. No destructor drops them: one may run without the
// GIL, when the interpreter ends a daemon thread that is in a kernel.
struct Made {
  std::vector<PyObject*> tensors;
  void release() {
    for (PyObject* tensor : tensors) Py_DECREF(tensor);
  }
};

PyObject* call_tuple(PyObject* item) {
  PyObject* const* objects = &PyTuple_GET_ITEM(item, 0);
  return PyObject_Vectorcall(objects[0], objects + 1,
                             static_cast<size_t>(PyTuple_GET_SIZE(item) - 1), nullptr);
}

// The makers for the device that is current; nullptr with a Python error set on failure.
PyObject* makers_now(const ProgramObject& program) {
  if (program.current_device == Py_None) return program.makers;
  PyObject* device = PyObject_CallNoArgs(program.current_device);
  if (!device) return nullptr;
  const long index = PyLong_AsLong(device);
  Py_DECREF(device);
  if (index == -1 && PyErr_Occurred()) return nullptr;
  return index == program.plan->device.device_id ? program.makers : program.elsewhere;
}

bool make_tensors(const ProgramObject& program, size_t passed, std::vector<DLTensor>* slots,
                  Made* made) {
  PyObject* makers = makers_now(program);
  if (!makers) return false;
  made->tensors.reserve(PyTuple_GET_SIZE(makers));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(makers); ++i) {
    PyObject* tensor = call_tuple(PyTuple_GET_ITEM(makers, i));
    if (!tensor) return false;
    made->tensors.push_back(tensor);
    if (!is_plain(tensor) || !describe(tensor, &(*slots)[passed + i]))
      return refuse_program("a maker must return a tensor");
  }
  return true;
}

PyObject* result_of(const Plan& plan, PyObject* const* args, size_t passed, const Made& made) {
  if (!plan.has_outputs) Py_RETURN_TRUE;
  PyObject* result = PyTuple_New(static_cast<Py_ssize_t>(plan.outputs.size()));
  if (!result) return nullptr;
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    const Py_ssize_t place = plan.outputs[i];
    PyObject* value = Py_None;
    if (place >= static_cast<Py_ssize_t>(passed))
      value = made.tensors[place - passed];
    else if (place >= 0)
      value = args[place];
    PyTuple_SET_ITEM(result, i, Py_NewRef(value));
  }
  return result;
}

// The call's result; nullptr with a Python error set, or a false `fits`, if there is none.
PyObject* run(const ProgramObject& program, PyObject* const* args, size_t passed, Made* made,
              bool* fits) {
  const Plan& plan = *program.plan;
  Frame frame;
  frame.slots.resize(plan.forms.size());
  frame.constants.resize(plan.constants.size());
  frame.parts.resize(kMaxParameters);
  // First: a maker may run Python code, by which a tensor that is described already might change.
  if (!make_tensors(program, passed, &frame.slots, made)) return nullptr;
  *fits = read_tensors(plan, args, passed, &frame.slots);
  for (size_t i = 0; *fits && i < plan.constants.size(); ++i)
    *fits = describe(plan.constants[i], &frame.constants[i]);
  if (!*fits) return nullptr;
  ApexTeCall c_call;
  c_call.device_id = plan.device.device_id;
  c_call.stream = nullptr;
  if (plan.device.device_type != kDLCPU &&
      exchange_api()->current_work_stream(plan.device.device_type, plan.device.device_id,
                                          &c_call.stream) != 0)
    return nullptr;
  bool is_done;
  Py_BEGIN_ALLOW_THREADS;
  is_done = run_steps(plan, &frame, &c_call);
  Py_END_ALLOW_THREADS;
  if (!is_done) return raise(c_call);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(program.after); ++i) {
    PyObject* ignored = call_tuple(PyTuple_GET_ITEM(program.after, i));
    if (!ignored) return nullptr;
    Py_DECREF(ignored);
  }
  return result_of(plan, args, passed, *made);
}

PyObject* call(const ProgramObject& program, PyObject* const* args, Py_ssize_t count) {
  if (count + PyTuple_GET_SIZE(program.makers) !=
      static_cast<Py_ssize_t>(program.plan->forms.size())) {
    refuse_program("one tensor must be passed for each form that has no maker");
    return nullptr;
  }
  Made made;
  bool fits = true;
  PyObject* result = run(program, args, static_cast<size_t>(count), &made, &fits);
  made.release();
  if (fits || PyErr_Occurred()) return result;
  Py_RETURN_FALSE;
}

PyObject* program_call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  if (names && PyTuple_GET_SIZE(names)) {
    refuse_program("tensors must be passed by position");
    return nullptr;
  }
  try {
    return call(*self_of(object), args, PyVectorcall_NARGS(nargsf));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* program_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"forms",   "steps",          "makers",    "after",
                                   "outputs", "current_device", "elsewhere", nullptr};
  PyObject *forms, *steps, *makers = nullptr, *after = nullptr, *outputs = Py_None;
  PyObject *current_device = Py_None, *elsewhere = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!|O!O!OOO!:Program",
                                   const_cast<char**>(keywords), &PyTuple_Type, &forms,
                                   &PyTuple_Type, &steps, &PyTuple_Type, &makers, &PyTuple_Type,
                                   &after, &outputs, &current_device, &PyTuple_Type, &elsewhere))
    return nullptr;
  auto plan = std::make_unique<Plan>();
  if (!read_plan(plan.get(), forms, steps) || !read_outputs(plan.get(), outputs)) return nullptr;
  for (PyObject* calls : {makers, after, elsewhere})
    if (calls && !check_calls(calls)) return nullptr;
  const Py_ssize_t count = makers ? PyTuple_GET_SIZE(makers) : 0;
  if (count > PyTuple_GET_SIZE(forms)) {
    refuse_program("each maker must have a form");
    return nullptr;
  }
  if (current_device != Py_None && (!elsewhere || PyTuple_GET_SIZE(elsewhere) != count)) {
    refuse_program("elsewhere must have as many calls as makers");
    return nullptr;
  }
  PyObject* object = type->tp_alloc(type, 0);
  if (!object) return nullptr;
  self_of(object)->vectorcall = program_call;
  self_of(object)->steps = Py_NewRef(steps);
  self_of(object)->makers = makers ? Py_NewRef(makers) : PyTuple_New(0);
  self_of(object)->after = after ? Py_NewRef(after) : PyTuple_New(0);
  self_of(object)->current_device = Py_NewRef(current_device);
  self_of(object)->elsewhere = elsewhere ? Py_NewRef(elsewhere) : PyTuple_New(0);
  self_of(object)->plan = plan.release();
  return object;
}

int program_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(self_of(object)->steps);
  Py_VISIT(self_of(object)->makers);
  Py_VISIT(self_of(object)->after);
  Py_VISIT(self_of(object)->current_device);
  Py_VISIT(self_of(object)->elsewhere);
  return 0;
}

// Like a tuple it needs no tp_clear: it exists after what it holds.
void program_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  delete self_of(object)->plan;
  Py_XDECREF(self_of(object)->steps);
  Py_XDECREF(self_of(object)->makers);
  Py_XDECREF(self_of(object)->after);
  Py_XDECREF(self_of(object)->current_device);
  Py_XDECREF(self_of(object)->elsewhere);
  Py_TYPE(object)->tp_free(object);
}

}  // namespace

PyTypeObject* program_type() {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
  static PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
#pragma GCC diagnostic pop
  type.tp_name = "apex_te_core.Program";
  type.tp_doc =
      "Program(forms, steps, makers=(), after=(), outputs=None, current_device=None,\n"
      "elsewhere=()): calls of op functions, bound once, that one call runs in order.\n\n"
      "`forms` has an entry for each tensor: None for none, a tensor whose shape, strides, dtype,\n"
      "device and alignment a call's tensor must have, or ... for memory that is made for the\n"
      "program. Its memory is not read after the constructor. The last tensors are made in each\n"
      "call by `makers`, tuples of a callable and its arguments; the caller passes the others. A\n"
      "step is a Function and its arguments; a tensor among these is (slot,), or (slot, byte\n"
      "offset, shape, strides, tensor of the dtype) for a part of one, or a tensor itself, a\n"
      "constant. `after` has calls to make when the steps have run, as `makers` has them.\n"
      "`outputs` has the slots of the tensors, or -1 for None, that a call returns as a tuple; if\n"
      "it is None, a call returns True. `current_device` is called for the index of the current\n"
      "device; if that is not the program's, `elsewhere` takes the place of `makers`. A call\n"
      "returns False, with nothing run, if a tensor has not its form.";
  type.tp_basicsize = sizeof(ProgramObject);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
  type.tp_vectorcall_offset = offsetof(ProgramObject, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = program_new;
  type.tp_traverse = program_traverse;
  type.tp_dealloc = program_dealloc;
  return PyType_Ready(&type) == 0 ? &type : nullptr;
}

}  // namespace apex_te
