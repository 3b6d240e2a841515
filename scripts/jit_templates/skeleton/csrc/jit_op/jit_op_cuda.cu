// jit_op on a GPU.
//
// A thread has 8 elements, in accesses of 16 bytes where the addresses allow it.
#include "common/gpu/vec.h"
#include "jit_op/jit_op.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 128;

// Forward or backward is a branch that the whole grid takes alike, which costs nothing.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) elements_kernel(const Problem p) {
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  const int64_t n = p.numel - begin;
  if (n <= 0) return;
  const bool is_whole = kAligned && n >= kVec;
  const T* x = static_cast<const T*>(p.x) + begin;
  const T* dy = static_cast<const T*>(p.dy) + begin;
  T* out = static_cast<T*>(p.out) + begin;
  float values[kVec], grads[kVec];
  unpack(is_whole ? load_vec(x) : load_partial(x, n), values);
  if (p.dy) {
    unpack(is_whole ? load_vec(dy) : load_partial(dy, n), grads);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = gradient_of(values[i], grads[i], p.scale);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = value_of(values[i], p.scale);
  }
  Vec8<T> result;
  pack(values, &result);
  if (is_whole)
    store_vec(out, result);
  else
    store_partial(out, result, n);
}

template <typename T>
void launch(const Args& args, const Problem& p) {
  constexpr int64_t kPerBlock = int64_t{kThreads} * kVec;
  const int64_t blocks = (p.numel + kPerBlock - 1) / kPerBlock;
  if (blocks == 0) return;
  if (blocks > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "%s: x must have fewer than 2^41 elements", args.name());
  const DeviceGuard guard(args.device_id());
  const bool aligned = is_aligned(p.x, 16) && is_aligned(p.dy, 16) && is_aligned(p.out, 16);
  const auto kernel = aligned ? elements_kernel<T, true> : elements_kernel<T, false>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(
      p);
  check_cuda(cudaGetLastError(), args.name());
}

void run_problem(const Args& args, const Problem& p) {
  switch (p.dtype) {
    case DType::kFloat32:
      return launch<float>(args, p);
    case DType::kFloat16:
      return launch<Half>(args, p);
    default:
      return launch<BFloat16>(args, p);
  }
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(jit_op_fwd) {
  using namespace apex_te;
  run_problem(args, check_problem(args, false));
}

APEX_TE_DEFINE(jit_op_bwd) {
  using namespace apex_te;
  run_problem(args, check_problem(args, true));
}
