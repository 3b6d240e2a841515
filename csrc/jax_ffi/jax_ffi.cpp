// The handlers through which XLA calls ops: one for each bound function, of any op library.
//
// A handler is told nothing about its target, so each bound function has a slot with a trampoline
// of its own. A handler builds and opens nothing, allocates no device memory and never waits.
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "jax_ffi/call_frame.h"
#include "jax_ffi/float_mode.h"
#include "jax_ffi/throwaway_capture.h"
#include "jax_ffi/xla_ffi.h"

namespace apex_te {
namespace {

constexpr int kNumSlots = 512;
using OpFunction = int32_t (*)(ApexTeCall*);

struct Bound {
  Layout layout;
  OpFunction function = nullptr;
  DLDeviceType device_type = kDLCPU;
  bool is_capturable = false;
  std::mutex mutex;
  std::unordered_set<uint64_t> warm;  // calls whose kernels are loaded, by their hash
};

std::atomic<Bound*> g_slots[kNumSlots];
std::mutex g_mutex;  // of the number of slots in use
int g_used = 0;

XLA_FFI_Error* make_error(const XLA_FFI_CallFrame& frame, XLA_FFI_Error_Code code,
                          const char* message) {
  XLA_FFI_Error_Create_Args args{sizeof(args), nullptr, message, code};
  return frame.api->error_create(&args);
}

XLA_FFI_Error* make_error(const XLA_FFI_CallFrame& frame, int32_t kind, const char* message) {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_INTERNAL;
  if (kind == kApexTeTypeError || kind == kApexTeValueError)
    code = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  if (kind == kApexTeUnsupported) code = XLA_FFI_Error_Code_UNIMPLEMENTED;
  return make_error(frame, code, message);
}

void answer_metadata(const Bound& bound, XLA_FFI_Metadata* metadata) {
  metadata->api_version.major_version = kXlaFfiMajor;
  metadata->api_version.minor_version = kXlaFfiMinor;
  metadata->traits = bound.is_capturable && bound.device_type != kDLCPU
                         ? XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
                         : 0;
}

XLA_FFI_Error* find_device(const XLA_FFI_CallFrame& frame, int32_t* id) {
  XLA_FFI_DeviceOrdinal_Get_Args args{sizeof(args), nullptr, frame.ctx, 0};
  XLA_FFI_Error* error = frame.api->device_ordinal_get(&args);
  *id = args.device_ordinal;
  return error;
}

XLA_FFI_Error* find_stream(const XLA_FFI_CallFrame& frame, void** stream) {
  XLA_FFI_Stream_Get_Args args{sizeof(args), nullptr, frame.ctx, nullptr};
  XLA_FFI_Error* error = frame.api->stream_get(&args);
  *stream = args.stream;
  return error;
}

void fill_call(const Arguments& arguments, int device_id, void* stream, ApexTeCall* call) {
  call->args = arguments.data();
  call->num_args = arguments.size();
  call->device_id = device_id;
  call->stream = stream;
  call->result = 0;
  call->error_kind = kApexTeOk;
}

XLA_FFI_Error* execute(const Bound& bound, const XLA_FFI_CallFrame& frame) {
  DLDevice device{bound.device_type, 0};
  ApexTeCall call;
  if (bound.device_type == kDLCPU) {
    const Arguments arguments(bound.layout, frame, device);
    fill_call(arguments, 0, nullptr, &call);
    const KeepSubnormals mode;
    if (!bound.function(&call)) return nullptr;
  } else {
    void* stream;
    if (XLA_FFI_Error* error = find_device(frame, &device.device_id)) return error;
    if (XLA_FFI_Error* error = find_stream(frame, &stream)) return error;
    const Arguments arguments(bound.layout, frame, device);
    fill_call(arguments, device.device_id, stream, &call);
    if (!bound.function(&call)) return nullptr;
  }
  return make_error(frame, call.error_kind, call.error);
}

class Hash {
 public:
  void add(const void* data, size_t size) {
    for (size_t i = 0; i < size; ++i)
      value_ = (value_ ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3ull;
  }
  void add(const XLA_FFI_Buffer& buffer) {
    add(&buffer.dtype, sizeof(buffer.dtype));
    add(buffer.dims, buffer.rank * sizeof(int64_t));
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325ull;
};

// Of what decides which kernels a call launches: shapes, dtypes, attributes, device.
uint64_t hash_of(const XLA_FFI_CallFrame& frame, int32_t device_id) {
  Hash hash;
  hash.add(&device_id, sizeof(device_id));
  for (int64_t i = 0; i < frame.args.size; ++i)
    hash.add(*static_cast<const XLA_FFI_Buffer*>(frame.args.args[i]));
  for (int64_t i = 0; i < frame.rets.size; ++i)
    hash.add(*static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[i]));
  for (int64_t i = 0; i < frame.attrs.size; ++i) {
    const void* attribute = frame.attrs.attrs[i];
    if (frame.attrs.types[i] == XLA_FFI_AttrType_SCALAR) {
      const auto* scalar = static_cast<const XLA_FFI_Scalar*>(attribute);
      hash.add(scalar->value, scalar->dtype == XLA_FFI_DataType_PRED ? 1 : 8);
    } else if (frame.attrs.types[i] == XLA_FFI_AttrType_ARRAY) {
      const auto* array = static_cast<const XLA_FFI_Array*>(attribute);
      hash.add(array->data, array->size * 8);
    }
  }
  return hash.value();
}

// Before XLA records a CUDA graph: the op runs once in a capture that is thrown away, so that its
// lazily loaded kernels and its cuBLASLt handle exist. An error of the op comes back in execute().
XLA_FFI_Error* initialize(Bound* bound, const XLA_FFI_CallFrame& frame) {
  if (bound->device_type != kDLCUDA || !bound->is_capturable) return nullptr;
  DLDevice device{kDLCUDA, 0};
  if (XLA_FFI_Error* error = find_device(frame, &device.device_id)) return error;
  const Arguments arguments(bound->layout, frame, device);
  const uint64_t hash = hash_of(frame, device.device_id);
  const std::lock_guard<std::mutex> lock(bound->mutex);
  if (bound->warm.count(hash)) return nullptr;
  const ThrowawayCapture capture(device.device_id);
  if (!capture.stream()) return nullptr;
  ApexTeCall call;
  fill_call(arguments, device.device_id, capture.stream(), &call);
  bound->function(&call);
  bound->warm.insert(hash);
  return nullptr;
}

XLA_FFI_Error* handle(Bound* bound, XLA_FFI_CallFrame* frame) noexcept {
  for (auto* extension = frame->extension_start; extension; extension = extension->next)
    if (extension->type == XLA_FFI_Extension_Metadata) {
      answer_metadata(*bound, reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata);
      return nullptr;
    }
  try {
    if (frame->stage == XLA_FFI_ExecutionStage_EXECUTE) return execute(*bound, *frame);
    if (frame->stage == XLA_FFI_ExecutionStage_INITIALIZE) return initialize(bound, *frame);
    return nullptr;
  } catch (const OpError& error) {
    return make_error(*frame, error.kind, error.text);
  } catch (const std::exception& error) {
    return make_error(*frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, error.what());
  }
}

template <int kSlot>
XLA_FFI_Error* trampoline(XLA_FFI_CallFrame* frame) {
  return handle(g_slots[kSlot].load(std::memory_order_acquire), frame);
}

template <int... kSlot>
XLA_FFI_Handler* trampoline_of(int slot, std::integer_sequence<int, kSlot...>) {
  static constexpr XLA_FFI_Handler* kTable[] = {trampoline<kSlot>...};
  return kTable[slot];
}

XLA_FFI_Handler* trampoline_of(int slot) {
  return trampoline_of(slot, std::make_integer_sequence<int, kNumSlots>());
}

}  // namespace

extern "C" {

extern APEX_TE_PUBLIC const int32_t apex_te_jax_abi;
const int32_t apex_te_jax_abi = 1;

// Returns a handler for an op's function, or null with a text in `error`, which has `size` bytes.
// device_type: as in DLPack. capturable: XLA may record the function's calls in CUDA graphs.
APEX_TE_PUBLIC XLA_FFI_Handler* apex_te_jax_bind(const char* name, const char* signature,
                                                 void* function, int32_t device_type,
                                                 int32_t capturable, char* error, size_t size) {
  try {
    auto bound = std::make_unique<Bound>();
    bound->layout.name = name;
    bound->function = reinterpret_cast<OpFunction>(function);
    bound->device_type = static_cast<DLDeviceType>(device_type);
    bound->is_capturable = capturable != 0;
    const std::string problem = parse_signature(signature, &bound->layout.signature);
    if (!problem.empty()) {
      snprintf(error, size, "%s: signature must be valid, got %s", name, problem.c_str());
      return nullptr;
    }
    if (bound->layout.signature.parameters.size() > kMaxParameters) {
      snprintf(error, size, "%s: signature must have at most %d parameters, got more", name,
               kMaxParameters);
      return nullptr;
    }
    bound->layout.find_places();
    const std::lock_guard<std::mutex> lock(g_mutex);
    if (g_used == kNumSlots) {
      snprintf(error, size, "%s: at most %d functions can be bound, got one more", name, kNumSlots);
      return nullptr;
    }
    g_slots[g_used].store(bound.release(), std::memory_order_release);
    return trampoline_of(g_used++);
  } catch (const std::exception& problem) {
    snprintf(error, size, "%s: %s", name, problem.what());
    return nullptr;
  }
}
}

}  // namespace apex_te
