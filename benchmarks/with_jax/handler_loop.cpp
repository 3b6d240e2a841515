// Time of one call of a handler, without XLA: five tensor parameters and two scalars.
//
// Usage: handler_loop apex_te_jax_cpu.so; prints nanoseconds.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstring>

#include "common/abi/op.h"
#include "jax_ffi/xla_ffi.h"

using Bind = XLA_FFI_Handler* (*)(const char*, const char*, void*, int32_t, int32_t, char*, size_t);

static int32_t nothing(ApexTeCall* call) { return call->num_args == 7 ? 0 : 1; }

static XLA_FFI_ByteSpan span(const char* text) { return {text, strlen(text)}; }

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  char error[512];
  auto* bind = reinterpret_cast<Bind>(dlsym(library, "apex_te_jax_bind"));
  XLA_FFI_Handler* handler =
      bind("loop", "a: Tensor, b: Tensor?, c: Tensor, d: Tensor!, e: Tensor!, eps: float, n: int",
           reinterpret_cast<void*>(&nothing), kDLCPU, 0, error, sizeof(error));

  int64_t dims[2] = {16, 64};
  float data[1];
  XLA_FFI_Buffer buffer{sizeof(buffer), nullptr, XLA_FFI_DataType_F32, data, 2, dims};
  void *operands[3] = {&buffer, &buffer, &buffer}, *results[2] = {&buffer, &buffer};
  XLA_FFI_ArgType operand_types[3] = {XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER,
                                      XLA_FFI_ArgType_BUFFER};
  XLA_FFI_RetType result_types[2] = {XLA_FFI_RetType_BUFFER, XLA_FFI_RetType_BUFFER};
  int64_t plan[5] = {0, 1, 2, -2, -3}, n = 3;
  double eps = 1e-5;
  XLA_FFI_Array buffers{XLA_FFI_DataType_S64, 5, plan};
  XLA_FFI_Scalar eps_value{XLA_FFI_DataType_F64, &eps}, n_value{XLA_FFI_DataType_S64, &n};
  void* attributes[3] = {&buffers, &eps_value, &n_value};
  XLA_FFI_ByteSpan spans[3] = {span("buffers"), span("eps"), span("n")};
  XLA_FFI_ByteSpan* names[3] = {&spans[0], &spans[1], &spans[2]};
  XLA_FFI_AttrType types[3] = {XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_SCALAR,
                               XLA_FFI_AttrType_SCALAR};
  XLA_FFI_CallFrame frame{};
  frame.struct_size = sizeof(frame);
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {sizeof(frame.args), nullptr, 3, operand_types, operands};
  frame.rets = {sizeof(frame.rets), nullptr, 2, result_types, results};
  frame.attrs = {sizeof(frame.attrs), nullptr, 3, types, names, attributes};

  double best = 1e9;
  for (int round = 0; round < 20; ++round) {
    constexpr int kCalls = 100000;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i)
      if (handler(&frame)) return 1;
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
    if (spent.count() / kCalls < best) best = spent.count() / kCalls;
  }
  printf("%.1f\n", best);
}
