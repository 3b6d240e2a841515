// The plain C interface of an op library, and the C++ helpers its functions are written with.
//
// A function takes one ApexTeCall: tagged arguments (DLPack views and scalars), the device and the
// stream to run on. It returns 0, or fills error_kind and error. Nothing here includes torch or
// Python, so one library serves every framework that can make a DLTensor.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>

#include "common/abi/dlpack.h"

#define APEX_TE_ABI 1

extern "C" {
enum ApexTeKind : int32_t {
  kApexTeNone = 0,        // an optional argument left out
  kApexTeTensor = 1,      // value.tensor
  kApexTeTensorList = 2,  // value.tensors[count]
  kApexTeInt = 3,         // value.i
  kApexTeFloat = 4,       // value.f
  kApexTeFloatList = 5,   // value.floats[count]
  kApexTeBool = 6,        // value.i, 0 or 1
};

enum ApexTeErrorKind : int32_t {
  kApexTeOk = 0,
  kApexTeTypeError = 1,
  kApexTeValueError = 2,
  kApexTeUnsupported = 3,
  kApexTeRuntimeError = 4,
};

typedef struct ApexTeArg {
  int32_t kind;
  int32_t count;
  union {
    int64_t i;
    double f;
    const DLTensor* tensor;
    const DLTensor* tensors;
    const double* floats;
  } value;
} ApexTeArg;

typedef struct ApexTeCall {
  const ApexTeArg* args;
  int32_t num_args;
  int32_t device_id;
  void* stream;
  int64_t result;
  int32_t error_kind;
  char error[512];
} ApexTeCall;
}

#define APEX_TE_PUBLIC __attribute__((visibility("default")))

// Declares one function of an op in its header: name, signature and, optionally, the only device
// that has it. "Tensor!" is written. The builders read this line as text, and the schema that torch
// knows is made from it; the dispatcher reads the exported signature.
#define APEX_TE_FUNCTION(name, signature, ...)                            \
  extern "C" APEX_TE_PUBLIC int32_t apex_te_##name(ApexTeCall*);          \
  extern "C" APEX_TE_PUBLIC const char* const apex_te_##name##_signature; \
  constexpr const char kSignature_##name[] = signature;

// Declares, behind the function itself, which written tensors may be which other argument, all of
// it: "dx: dy, dx: x". run() refuses any other call in which a written tensor shares memory with
// another argument.
#define APEX_TE_IN_PLACE(name, pairs) \
  template <>                         \
  constexpr const char* apex_te::kInPlace<kSignature_##name> = pairs;

// Defines a declared function in a device's source file:
//   APEX_TE_DEFINE(scale) { ... args.tensor() ... }
#define APEX_TE_DEFINE(name)                                               \
  static void name##_impl(apex_te::Args& args);                            \
  extern "C" {                                                             \
  const char* const apex_te_##name##_signature = kSignature_##name;        \
  int32_t apex_te_##name(ApexTeCall* call) {                               \
    constexpr uint32_t written = apex_te::written_in(kSignature_##name);   \
    constexpr const char* in_place = apex_te::kInPlace<kSignature_##name>; \
    apex_te::Args args(call, #name, kSignature_##name);                    \
    return apex_te::run(call, args, written, in_place, name##_impl);       \
  }                                                                        \
  }                                                                        \
  static void name##_impl(apex_te::Args& args)

// Once per library.
#define APEX_TE_LIBRARY()                          \
  extern "C" {                                     \
  extern APEX_TE_PUBLIC const int32_t apex_te_abi; \
  const int32_t apex_te_abi = APEX_TE_ABI;         \
  }

namespace apex_te {

// Pairs of APEX_TE_IN_PLACE, by signature.
template <const char* Signature>
constexpr const char* kInPlace = "";

// A bit for each parameter of a signature that is written, the first the lowest.
constexpr uint32_t written_in(const char* signature) {
  uint32_t written = 0, parameter = 1;
  for (; *signature; ++signature) {
    if (*signature == ',') parameter <<= 1;
    if (*signature == '!') written |= parameter;
  }
  return written;
}

struct OpError : std::exception {
  int32_t kind;
  char text[448];
  OpError(int32_t error_kind, const char* format, va_list values) : kind(error_kind) {
    vsnprintf(text, sizeof(text), format, values);
  }
  const char* what() const noexcept override { return text; }
};

// Scratch memory that there is none of; run() names the op.
struct OutOfMemory : std::bad_alloc {
  int64_t bytes;
  explicit OutOfMemory(int64_t wanted) : bytes(wanted) {}
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(int32_t kind,
                                                                    const char* format, ...) {
  va_list values;
  va_start(values, format);
  OpError error(kind, format, values);
  va_end(values);
  throw error;
}

enum class DType : int32_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kE4M3,
  kE5M2,
  kE8M0,
  kInt32,
  kInt64,
  kUInt8,
  kBool,
  kE4M3FNUZ,
  kE5M2FNUZ,
  kOther
};

inline DType dtype_of(const DLDataType& t) {
  if (t.lanes != 1) return DType::kOther;
  if (t.code == kDLFloat && t.bits == 32) return DType::kFloat32;
  if (t.code == kDLFloat && t.bits == 16) return DType::kFloat16;
  if (t.code == kDLBfloat && t.bits == 16) return DType::kBFloat16;
  if (t.code == kDLFloat8_e4m3fn && t.bits == 8) return DType::kE4M3;
  if (t.code == kDLFloat8_e5m2 && t.bits == 8) return DType::kE5M2;
  if (t.code == kDLFloat8_e8m0fnu && t.bits == 8) return DType::kE8M0;
  if (t.code == kDLFloat8_e4m3fnuz && t.bits == 8) return DType::kE4M3FNUZ;
  if (t.code == kDLFloat8_e5m2fnuz && t.bits == 8) return DType::kE5M2FNUZ;
  if (t.code == kDLInt && t.bits == 32) return DType::kInt32;
  if (t.code == kDLInt && t.bits == 64) return DType::kInt64;
  if (t.code == kDLBool && t.bits == 8) return DType::kBool;
  if (t.code == kDLUInt && t.bits == 8) return DType::kUInt8;
  return DType::kOther;
}

inline const char* dtype_name(DType t) {
  constexpr const char* kNames[] = {
      "float32",         "float16",         "bfloat16",     "float8_e4m3fn", "float8_e5m2",
      "float8_e8m0fnu",  "int32",           "int64",        "uint8",         "bool",
      "float8_e4m3fnuz", "float8_e5m2fnuz", "another dtype"};
  static_assert(sizeof(kNames) / sizeof(*kNames) == static_cast<int>(DType::kOther) + 1,
                "one name for each dtype, in their order");
  return kNames[static_cast<int>(t)];
}

// A dtype for an error, also one that no op takes: "float64", "int16".
inline void format_dtype(char* out, size_t size, const DLDataType& t) {
  const DType known = dtype_of(t);
  const char* base = t.code == kDLInt     ? "int"
                     : t.code == kDLUInt  ? "uint"
                     : t.code == kDLFloat ? "float"
                                          : "dtype code ";
  if (known != DType::kOther)
    snprintf(out, size, "%s", dtype_name(known));
  else
    snprintf(out, size, "%s%d", base, t.code > kDLFloat ? int(t.code) : int(t.bits));
}

class Args;

// One tensor argument with what is needed to name it in an error.
class TensorView {
 public:
  TensorView() = default;
  TensorView(const DLTensor* tensor, const Args* args, int index, int item = -1)
      : tensor_(tensor), args_(args), index_(index), item_(item) {
    if (tensor) dtype_ = dtype_of(tensor->dtype);
  }
  explicit operator bool() const { return tensor_ != nullptr; }
  DType dtype() const { return dtype_; }
  int ndim() const { return tensor_->ndim; }
  int64_t size(int dim) const { return tensor_->shape[dim]; }
  int64_t stride(int dim) const {
    if (tensor_->strides) return tensor_->strides[dim];
    int64_t stride = 1;
    for (int i = tensor_->ndim - 1; i > dim; --i) stride *= tensor_->shape[i];
    return stride;
  }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < tensor_->ndim; ++i) n *= tensor_->shape[i];
    return n;
  }
  template <typename T = void>
  T* data() const {
    return tensor_ ? reinterpret_cast<T*>(static_cast<char*>(tensor_->data) + tensor_->byte_offset)
                   : nullptr;
  }
  bool is_contiguous() const {
    if (numel() == 0) return true;
    int64_t expected = 1;
    for (int i = tensor_->ndim - 1; i >= 0; --i) {
      if (tensor_->shape[i] != 1 && stride(i) != expected) return false;
      expected *= tensor_->shape[i];
    }
    return true;
  }

  // Checks; each throws an error that names the argument.
  const TensorView& is_aligned() const;  // to its elements, which kernels read whole
  const TensorView& has_dtype(std::initializer_list<DType> allowed) const;
  const TensorView& has_shape(std::initializer_list<int64_t> shape) const;
  const TensorView& has_ndim(int ndim) const;
  const TensorView& is_dense() const;              // contiguous, row-major
  const TensorView& is_scalar(DType dtype) const;  // one element of that dtype
  [[noreturn]] void refuse(int32_t kind, const char* expected, const char* actual) const;

 private:
  const DLTensor* tensor_ = nullptr;
  const Args* args_ = nullptr;
  int index_ = 0;
  int item_ = -1;
  DType dtype_ = DType::kOther;
};

// Reads a call's arguments in the order of the signature.
class Args {
 public:
  Args(ApexTeCall* call, const char* name, const char* signature)
      : call_(call), name_(name), signature_(signature) {}
  TensorView tensor() {
    const ApexTeArg& a = next(kApexTeTensor);
    return TensorView(a.value.tensor, this, position_ - 1).is_aligned();
  }
  TensorView optional_tensor() {
    if (position_ < call_->num_args && call_->args[position_].kind == kApexTeNone) {
      ++position_;
      return TensorView();
    }
    return tensor();
  }
  int tensor_list(const DLTensor** tensors) {
    const ApexTeArg& a = next(kApexTeTensorList);
    *tensors = a.value.tensors;
    return a.count;
  }
  TensorView list_item(const DLTensor* tensors, int index, int item) const {
    return TensorView(&tensors[item], this, index, item).is_aligned();
  }
  int float_list(const double** values) {
    const ApexTeArg& a = next(kApexTeFloatList);
    *values = a.value.floats;
    return a.count;
  }
  int64_t integer() { return next(kApexTeInt).value.i; }
  double floating() { return next(kApexTeFloat).value.f; }
  bool boolean() { return next(kApexTeBool).value.i != 0; }
  int position() const { return position_; }
  void* stream() const { return call_->stream; }
  int device_id() const { return call_->device_id; }
  void set_result(int64_t value) { call_->result = value; }
  const char* name() const { return name_; }

  // The index-th parameter's name, cut out of the signature.
  void parameter_name(int index, char* out, size_t size) const {
    const char* begin = signature_;
    for (int i = 0; i < index; ++i) {
      begin = strchr(begin, ',');
      if (!begin) break;
      ++begin;
    }
    size_t length = 0;
    if (begin) {
      while (*begin == ' ') ++begin;
      while (begin[length] && begin[length] != ':' && length + 1 < size) ++length;
      memcpy(out, begin, length);
    }
    out[length] = 0;
  }

 private:
  const ApexTeArg& next(int32_t kind) {
    if (position_ >= call_->num_args)
      fail(kApexTeTypeError, "%s: expected more than %d arguments", name_, call_->num_args);
    const ApexTeArg& a = call_->args[position_];
    if (a.kind != kind) {
      char parameter[64];
      parameter_name(position_, parameter, sizeof(parameter));
      fail(kApexTeTypeError, "%s: %s must be of argument kind %d, got %d", name_, parameter, kind,
           a.kind);
    }
    ++position_;
    return a;
  }
  ApexTeCall* call_;
  const char* name_;
  const char* signature_;
  int position_ = 0;
};

inline void TensorView::refuse(int32_t kind, const char* expected, const char* actual) const {
  char parameter[64];
  args_->parameter_name(index_, parameter, sizeof(parameter));
  if (item_ >= 0)
    fail(kind, "%s: %s[%d] must %s, got %s", args_->name(), parameter, item_, expected, actual);
  fail(kind, "%s: %s must %s, got %s", args_->name(), parameter, expected, actual);
}

inline void format_shape(char* out, size_t size, const int64_t* shape, int ndim) {
  size_t used = static_cast<size_t>(snprintf(out, size, "["));
  for (int i = 0; i < ndim && used < size; ++i)
    used += static_cast<size_t>(
        snprintf(out + used, size - used, i ? ", %lld" : "%lld", static_cast<long long>(shape[i])));
  if (used < size) snprintf(out + used, size - used, "]");
}

inline const TensorView& TensorView::is_aligned() const {
  const uintptr_t size = tensor_->dtype.bits / 8;
  const uintptr_t past = size > 1 ? reinterpret_cast<uintptr_t>(data<char>()) % size : 0;
  if (past == 0 || numel() == 0) return *this;
  char expected[64], actual[64];
  snprintf(expected, sizeof(expected), "begin at a multiple of its elements' %d bytes", int(size));
  snprintf(actual, sizeof(actual), "an address %d past one", int(past));
  refuse(kApexTeValueError, expected, actual);
}

inline const TensorView& TensorView::has_dtype(std::initializer_list<DType> allowed) const {
  for (DType t : allowed)
    if (dtype_ == t) return *this;
  char expected[160] = "have dtype ";
  size_t i = 0;
  for (DType t : allowed) {
    if (i) strcat(expected, i + 1 == allowed.size() ? " or " : ", ");
    strcat(expected, dtype_name(t));
    ++i;
  }
  char actual[32];
  format_dtype(actual, sizeof(actual), tensor_->dtype);
  refuse(kApexTeTypeError, expected, actual);
}

inline const TensorView& TensorView::has_shape(std::initializer_list<int64_t> shape) const {
  bool same = tensor_->ndim == static_cast<int>(shape.size());
  int i = 0;
  for (int64_t extent : shape) same = same && tensor_->shape[i++] == extent;
  if (same) return *this;
  char expected[128] = "have shape ", actual[96];
  format_shape(expected + strlen(expected), 96, shape.begin(), static_cast<int>(shape.size()));
  format_shape(actual, sizeof(actual), tensor_->shape, tensor_->ndim);
  refuse(kApexTeValueError, expected, actual);
}

inline const TensorView& TensorView::has_ndim(int ndim) const {
  if (tensor_->ndim == ndim) return *this;
  char expected[48], actual[96];
  snprintf(expected, sizeof(expected), "have %d dimensions", ndim);
  format_shape(actual, sizeof(actual), tensor_->shape, tensor_->ndim);
  refuse(kApexTeValueError, expected, actual);
}

inline const TensorView& TensorView::is_dense() const {
  if (is_contiguous()) return *this;
  int64_t strides[8];
  int n = tensor_->ndim < 8 ? tensor_->ndim : 8;
  for (int i = 0; i < n; ++i) strides[i] = stride(i);
  char actual[128] = "strides ";
  format_shape(actual + 8, 96, strides, n);
  refuse(kApexTeValueError, "be contiguous", actual);
}

inline const TensorView& TensorView::is_scalar(DType dtype) const {
  has_dtype({dtype});
  if (numel() == 1) return *this;
  char actual[96];
  format_shape(actual, sizeof(actual), tensor_->shape, tensor_->ndim);
  refuse(kApexTeValueError, "have one element", actual);
}

inline int32_t report(ApexTeCall* call, int32_t kind, const char* text) {
  call->error_kind = kind;
  snprintf(call->error, sizeof(call->error), "%s", text);
  return kind;
}

// Addresses from a tensor's first byte to its last; 0 to 0 of an empty tensor.
struct Span {
  uintptr_t begin, end;
  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
};

inline Span span_of(const DLTensor& t) {
  int64_t last = 0, dense = 1;  // dense: stride of a tensor without strides
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] == 0) return {0, 0};
    last += (t.shape[i] - 1) * (t.strides ? t.strides[i] : dense);
    if (!t.strides) dense *= t.shape[i];
  }
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data) + t.byte_offset;
  return {begin, begin + (last + 1) * t.dtype.bits / 8};
}

// Returns true if `pairs`, as of APEX_TE_IN_PLACE, has "output: input".
inline bool may_be(const char* pairs, const char* output, const char* input) {
  char pair[130];
  const size_t length = snprintf(pair, sizeof(pair), "%s: %s", output, input);
  for (const char* at = strstr(pairs, pair); at; at = strstr(at + length, pair))
    if ((at == pairs || at[-1] == ' ') && (at[length] == ',' || !at[length])) return true;
  return false;
}

// Fails for a written argument and another one whose spans meet, unless the first may be the second
// or the elements may lie between each other, as those of tensors that are not contiguous do.
inline void refuse_overlap(const Args& args, const char* pairs, int output, int input, int item,
                           const DLTensor& written, const DLTensor& other) {
  if (!TensorView(&written, &args, output).is_contiguous() ||
      !TensorView(&other, &args, input).is_contiguous())
    return;
  const Span a = span_of(written), b = span_of(other);
  char name[64], other_name[64], place[16] = "";
  args.parameter_name(output, name, sizeof(name));
  args.parameter_name(input, other_name, sizeof(other_name));
  const bool may_share = may_be(pairs, name, other_name) || may_be(pairs, other_name, name);
  const bool is_same = a.begin == b.begin && a.end == b.end;
  if (may_share && is_same && written.dtype.bits == other.dtype.bits) return;
  if (item >= 0) snprintf(place, sizeof(place), "[%d]", item);
  const uintptr_t begin = a.begin > b.begin ? a.begin : b.begin;
  const uintptr_t end = a.end < b.end ? a.end : b.end;
  fail(kApexTeValueError,
       may_share ? "%s: %s must be %s%s itself or share no memory with it, got %lld bytes in common"
                 : "%s: %s must share no memory with %s%s, got %lld bytes in common",
       args.name(), name, other_name, place, static_cast<long long>(end - begin));
}

// Compares each written tensor with all others; of lists only with their tensors, which may be
// thousands and are not compared with each other.
inline void check_overlaps(const ApexTeCall& call, const Args& args, uint32_t written,
                           const char* pairs) {
  constexpr int kMost = 32;                 // bits of `written`
  Span spans[kMost], wide{UINTPTR_MAX, 0};  // wide: from the first written tensor to the last
  bool has_lists = false;
  const int count = call.num_args < kMost ? call.num_args : kMost;
  for (int i = 0; i < count; ++i) {
    const bool is_tensor = call.args[i].kind == kApexTeTensor;
    has_lists |= call.args[i].kind == kApexTeTensorList;
    spans[i] = is_tensor ? span_of(*call.args[i].value.tensor) : Span{0, 0};
    if (!(written >> i & 1) || !spans[i].end) continue;
    if (spans[i].begin < wide.begin) wide.begin = spans[i].begin;
    if (spans[i].end > wide.end) wide.end = spans[i].end;
  }
  const auto compare = [&](const Span& span, const DLTensor& other, int index, int item) {
    for (int i = 0; i < count; ++i)
      if (i != index && written >> i & 1 && span.meets(spans[i]))
        refuse_overlap(args, pairs, i, index, item, *call.args[i].value.tensor, other);
  };
  for (int j = 0; j < count; ++j)
    if (spans[j].meets(wide)) compare(spans[j], *call.args[j].value.tensor, j, -1);
  for (int j = 0; has_lists && wide.end && j < count; ++j)
    for (int k = 0; call.args[j].kind == kApexTeTensorList && k < call.args[j].count; ++k) {
      const DLTensor& item = call.args[j].value.tensors[k];
      const Span span = span_of(item);
      if (span.meets(wide)) compare(span, item, j, k);
    }
}

// Runs one function body and turns what it throws into the call's error.
inline int32_t run(ApexTeCall* call, Args& args, uint32_t written, const char* in_place,
                   void (*body)(Args&)) noexcept {
  const char* name = args.name();
  try {
    if (written) check_overlaps(*call, args, written, in_place);
    body(args);
    return kApexTeOk;
  } catch (const OpError& error) {
    // What fails in CUDA names a function of CUDA's.
    const size_t length = strlen(name);
    const bool is_named = error.kind != kApexTeRuntimeError || !strncmp(error.text, name, length);
    if (is_named) return report(call, error.kind, error.text);
    char text[sizeof(error.text) + 64];
    snprintf(text, sizeof(text), "%s: %s", name, error.text);
    return report(call, error.kind, text);
  } catch (const OutOfMemory& error) {
    char text[160];
    snprintf(text, sizeof(text), "%s: cannot allocate %lld bytes of scratch memory", name,
             static_cast<long long>(error.bytes));
    return report(call, kApexTeRuntimeError, text);
  } catch (const std::bad_alloc&) {
    char text[128];
    snprintf(text, sizeof(text), "%s: out of memory", name);
    return report(call, kApexTeRuntimeError, text);
  } catch (const std::exception& error) {
    return report(call, kApexTeRuntimeError, error.what());
  }
}

}  // namespace apex_te
