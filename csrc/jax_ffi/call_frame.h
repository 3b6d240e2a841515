// Turns a call frame of XLA into the arguments of an op's function.
//
// Scalars are attributes under their parameter's name. Of tensors the attribute `buffers`, int64s
// in the order of the signature, says where each is: i >= 0 is operand i, -1 None, -2 - j result j.
// A list has its length first; length -n is followed by one entry, a buffer whose n rows are the
// list.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "common/abi/op.h"
#include "core/signature.h"
#include "jax_ffi/xla_ffi.h"

namespace apex_te {

constexpr int kMaxParameters = 24;
constexpr int64_t kNoBuffer = -1;

// What is known of a function before its calls. Attributes come sorted by name, so that each
// parameter's place among them is known, too.
struct Layout {
  std::string name;
  Signature signature;
  std::vector<std::string> attributes;
  std::vector<int> places;  // of each parameter's attribute; -1 for tensors
  int buffers = 0;

  void find_places() {
    const auto& parameters = signature.parameters;
    attributes.emplace_back("buffers");
    for (const Parameter& p : parameters)
      if (!is_tensor(p)) attributes.push_back(p.name);
    std::sort(attributes.begin(), attributes.end());
    const auto place = [this](const std::string& wanted) {
      const auto found = std::find(attributes.begin(), attributes.end(), wanted);
      return static_cast<int>(found - attributes.begin());
    };
    buffers = place("buffers");
    for (const Parameter& p : parameters) places.push_back(is_tensor(p) ? -1 : place(p.name));
  }
  static bool is_tensor(const Parameter& p) {
    return p.kind == kApexTeTensor || p.kind == kApexTeTensorList;
  }
};

// Types without a twin among the ops' dtypes keep a code that no op takes.
inline DLDataType dtype_of(XLA_FFI_DataType type) {
  const auto make = [](int code, int bits) {
    return DLDataType{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  switch (type) {
    case XLA_FFI_DataType_F32:
      return make(kDLFloat, 32);
    case XLA_FFI_DataType_BF16:
      return make(kDLBfloat, 16);
    case XLA_FFI_DataType_F16:
      return make(kDLFloat, 16);
    case XLA_FFI_DataType_F64:
      return make(kDLFloat, 64);
    case XLA_FFI_DataType_F8E4M3FN:
      return make(kDLFloat8_e4m3fn, 8);
    case XLA_FFI_DataType_F8E5M2:
      return make(kDLFloat8_e5m2, 8);
    case XLA_FFI_DataType_F8E8M0FNU:
      return make(kDLFloat8_e8m0fnu, 8);
    case XLA_FFI_DataType_F8E4M3FNUZ:
      return make(kDLFloat8_e4m3fnuz, 8);
    case XLA_FFI_DataType_F8E5M2FNUZ:
      return make(kDLFloat8_e5m2fnuz, 8);
    case XLA_FFI_DataType_F8E4M3B11FNUZ:
      return make(kDLFloat8_e4m3b11fnuz, 8);
    case XLA_FFI_DataType_F8E4M3:
      return make(kDLFloat8_e4m3, 8);
    case XLA_FFI_DataType_F8E3M4:
      return make(kDLFloat8_e3m4, 8);
    case XLA_FFI_DataType_PRED:
      return make(kDLBool, 8);
    case XLA_FFI_DataType_S8:
      return make(kDLInt, 8);
    case XLA_FFI_DataType_S16:
      return make(kDLInt, 16);
    case XLA_FFI_DataType_S32:
      return make(kDLInt, 32);
    case XLA_FFI_DataType_S64:
      return make(kDLInt, 64);
    case XLA_FFI_DataType_U8:
      return make(kDLUInt, 8);
    case XLA_FFI_DataType_U16:
      return make(kDLUInt, 16);
    case XLA_FFI_DataType_U32:
      return make(kDLUInt, 32);
    case XLA_FFI_DataType_U64:
      return make(kDLUInt, 64);
    case XLA_FFI_DataType_C64:
      return make(kDLComplex, 64);
    case XLA_FFI_DataType_C128:
      return make(kDLComplex, 128);
    default:
      return make(kDLOpaqueHandle, 8);
  }
}

// The arguments of one call; only lists allocate memory.
class Arguments {
 public:
  // Throws OpError for a frame that is not as the comment above says.
  Arguments(const Layout& layout, const XLA_FFI_CallFrame& frame, DLDevice device)
      : layout_(layout), frame_(frame), device_(device) {
    check_attributes();
    const XLA_FFI_Array buffers = array(layout.buffers, XLA_FFI_DataType_S64, "buffers");
    next_ = static_cast<const int64_t*>(buffers.data);
    end_ = next_ + buffers.size;
    const auto& parameters = layout.signature.parameters;
    for (size_t i = 0; i < parameters.size(); ++i) convert(static_cast<int>(i));
    if (next_ != end_) refuse("buffers", "end with the last tensor", "more entries");
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  const ApexTeArg* data() const { return args_; }
  int size() const { return static_cast<int>(layout_.signature.parameters.size()); }

 private:
  [[noreturn]] void refuse(const char* what, const char* expected, const char* actual) const {
    fail(kApexTeValueError, "%s: %s must %s, got %s", layout_.name.c_str(), what, expected, actual);
  }

  void check_attributes() const {
    const XLA_FFI_Attrs& attrs = frame_.attrs;
    const int64_t count = static_cast<int64_t>(layout_.attributes.size());
    for (int64_t i = 0; i < count || i < attrs.size; ++i) {
      const std::string* wanted = i < count ? &layout_.attributes[i] : nullptr;
      const XLA_FFI_ByteSpan* given = i < attrs.size ? attrs.names[i] : nullptr;
      if (wanted && given && wanted->size() == given->len &&
          memcmp(wanted->data(), given->ptr, given->len) == 0)
        continue;
      const std::string text = given ? std::string(given->ptr, given->len) : "none";
      refuse("attributes", wanted ? ("have " + *wanted).c_str() : "end here", text.c_str());
    }
  }

  const void* scalar(int parameter, XLA_FFI_DataType dtype, const char* expected) const {
    const int place = layout_.places[parameter];
    const auto* value = static_cast<const XLA_FFI_Scalar*>(frame_.attrs.attrs[place]);
    if (frame_.attrs.types[place] != XLA_FFI_AttrType_SCALAR || value->dtype != dtype)
      refuse(layout_.attributes[place].c_str(), expected, "another attribute");
    return value->value;
  }

  XLA_FFI_Array array(int place, XLA_FFI_DataType dtype, const char* what) const {
    const auto* value = static_cast<const XLA_FFI_Array*>(frame_.attrs.attrs[place]);
    if (frame_.attrs.types[place] != XLA_FFI_AttrType_ARRAY ||
        (value->dtype != dtype && value->size != 0))
      refuse(what, "be an array of 64-bit numbers", "another attribute");
    return *value;
  }

  int64_t next_entry() {
    if (next_ == end_) refuse("buffers", "have an entry for each tensor", "fewer");
    return *next_++;
  }

  void describe(int64_t entry, DLTensor* out) const {
    const bool is_result = entry < kNoBuffer;
    const int64_t index = is_result ? -2 - entry : entry;
    if (entry == kNoBuffer || index >= (is_result ? frame_.rets.size : frame_.args.size))
      refuse("buffers", "name operands and results of the call", std::to_string(entry).c_str());
    const auto* buffer = static_cast<const XLA_FFI_Buffer*>(is_result ? frame_.rets.rets[index]
                                                                      : frame_.args.args[index]);
    out->data = buffer->data;
    out->device = device_;
    out->ndim = static_cast<int32_t>(buffer->rank);
    out->dtype = dtype_of(buffer->dtype);
    out->shape = buffer->dims;
    out->strides = nullptr;
    out->byte_offset = 0;
  }

  void convert(int index) {
    const Parameter& p = layout_.signature.parameters[index];
    ApexTeArg& arg = args_[index];
    arg.kind = p.kind;
    arg.count = 0;
    switch (p.kind) {
      case kApexTeTensor: {
        const int64_t entry = next_entry();
        if (entry == kNoBuffer && p.is_optional) {
          arg.kind = kApexTeNone;
          return;
        }
        describe(entry, &tensors_[index]);
        arg.value.tensor = &tensors_[index];
        return;
      }
      case kApexTeTensorList:
        return convert_list(&arg);
      case kApexTeInt:
        arg.value.i = *static_cast<const int64_t*>(scalar(index, XLA_FFI_DataType_S64, "be s64"));
        return;
      case kApexTeBool:
        arg.value.i = *static_cast<const bool*>(scalar(index, XLA_FFI_DataType_PRED, "be pred"));
        return;
      case kApexTeFloat:
        arg.value.f = *static_cast<const double*>(scalar(index, XLA_FFI_DataType_F64, "be f64"));
        return;
      default: {
        const int place = layout_.places[index];
        const XLA_FFI_Array values = array(place, XLA_FFI_DataType_F64, p.name.c_str());
        arg.count = static_cast<int32_t>(values.size);
        arg.value.floats = static_cast<const double*>(values.data);
      }
    }
  }

  void convert_list(ApexTeArg* arg) {
    const int64_t length = next_entry();
    const int64_t count = length < 0 ? -length : length;
    if (lists_.empty()) lists_.reserve(layout_.signature.parameters.size());
    std::vector<DLTensor>& items = lists_.emplace_back(length < 0 ? 1 : count);
    if (length < 0) {
      DLTensor stack;
      describe(next_entry(), &stack);
      if (stack.ndim < 1 || stack.shape[0] != count)
        refuse("buffers", "stack as many tensors as the list has", "another leading dimension");
      rows_of(stack, count, &items);
    } else {
      for (DLTensor& item : items) describe(next_entry(), &item);
    }
    arg->count = static_cast<int32_t>(count);
    arg->value.tensors = items.data();
  }

  static void rows_of(const DLTensor& stack, int64_t count, std::vector<DLTensor>* items) {
    DLTensor row = stack;
    row.ndim = stack.ndim - 1;
    row.shape = stack.shape + 1;
    int64_t bytes = stack.dtype.bits / 8;
    for (int i = 0; i < row.ndim; ++i) bytes *= row.shape[i];
    items->assign(count, row);
    for (int64_t i = 0; i < count; ++i)
      (*items)[i].data = static_cast<char*>(stack.data) + i * bytes;
  }

  const Layout& layout_;
  const XLA_FFI_CallFrame& frame_;
  DLDevice device_;
  const int64_t *next_, *end_;
  ApexTeArg args_[kMaxParameters];
  DLTensor tensors_[kMaxParameters];
  std::vector<std::vector<DLTensor>> lists_;
};

}  // namespace apex_te
