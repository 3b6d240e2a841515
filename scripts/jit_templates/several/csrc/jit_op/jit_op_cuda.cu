// jit_op on a GPU.
//
// A thread has 8 elements of every tensor, in accesses of 16 bytes where the addresses allow it.
#include "common/gpu/vec.h"
#include "jit_op/jit_op.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 128;

template <typename T>
__device__ void load(const void* data, int64_t begin, int64_t n, bool is_whole, float* values) {
  const T* from = static_cast<const T*>(data) + begin;
  unpack(is_whole ? load_vec(from) : load_partial(from, n), values);
}

template <typename T, bool kIsBwd, bool kAligned>
__global__ void __launch_bounds__(kThreads) elements_kernel(const Problem p) {
  constexpr int kResults = kIsBwd ? kInputs : kOutputs;
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  const int64_t n = p.numel - begin;
  if (n <= 0) return;
  const bool is_whole = kAligned && n >= kVec;
  float in[kInputs][kVec], grads[kOutputs][kVec], out[kResults][kVec];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) load<T>(p.in[k], begin, n, is_whole, in[k]);
  if constexpr (kIsBwd) {
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) load<T>(p.grads[k], begin, n, is_whole, grads[k]);
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    float x[kInputs], dy[kOutputs], result[kResults];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) x[k] = in[k][i];
    if constexpr (kIsBwd) {
#pragma unroll
      for (int k = 0; k < kOutputs; ++k) dy[k] = grads[k][i];
      gradients_of(x, dy, p.scalars, result);
    } else {
      values_of(x, p.scalars, result);
    }
#pragma unroll
    for (int k = 0; k < kResults; ++k) out[k][i] = result[k];
  }
#pragma unroll
  for (int k = 0; k < kResults; ++k) {
    T* to = static_cast<T*>(p.out[k]) + begin;
    Vec8<T> packed;
    pack(out[k], &packed);
    if (is_whole)
      store_vec(to, packed);
    else
      store_partial(to, packed, n);
  }
}

template <typename T, bool kIsBwd>
void launch(const Args& args, const Problem& p) {
  constexpr int64_t kPerBlock = int64_t{kThreads} * kVec;
  const int64_t blocks = (p.numel + kPerBlock - 1) / kPerBlock;
  if (blocks == 0) return;
  if (blocks > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "%s: tensors must have fewer than 2^41 elements", args.name());
  const DeviceGuard guard(args.device_id());
  bool aligned = true;
  for (int k = 0; k < kInputs; ++k) aligned = aligned && is_aligned(p.in[k], 16);
  for (int k = 0; k < kOutputs; ++k) aligned = aligned && is_aligned(p.grads[k], 16);
  for (int k = 0; k < p.results(); ++k) aligned = aligned && is_aligned(p.out[k], 16);
  const auto kernel =
      aligned ? elements_kernel<T, kIsBwd, true> : elements_kernel<T, kIsBwd, false>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(
      p);
  check_cuda(cudaGetLastError(), args.name());
}

template <bool kIsBwd>
void run_problem(Args& args) {
  const Problem p = check_problem(args, kIsBwd);
  switch (p.dtype) {
    case DType::kFloat32:
      return launch<float, kIsBwd>(args, p);
    case DType::kFloat16:
      return launch<Half, kIsBwd>(args, p);
    default:
      return launch<BFloat16, kIsBwd>(args, p);
  }
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(jit_op_fwd) { apex_te::run_problem<false>(args); }

APEX_TE_DEFINE(jit_op_bwd) { apex_te::run_problem<true>(args); }
