// CUDA entries of swiglu, and its kernels for results in the inputs' dtype: a vector of 16 bytes of
// each input for each thread.
#include "common/gpu/fast_division.h"
#include "common/numerics/with_dtype.h"
#include "swiglu/swiglu_device.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxVectors = 0x7FFFFFFF - kThreads;  // of one launch

struct Vectors {
  uint32_t count, per_row;
  FastDivision row_of;
};

template <typename T>
__device__ __forceinline__ void add_bias(const void* bias, int64_t col, float* values) {
  float addends[kVec];
  unpack(load_vec(static_cast<const T*>(bias) + col), addends);
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] += addends[i];
}

// Blocks of a multiprocessor: enough loads in flight with a vector of each input for each thread.
template <typename T, bool kBwd>
constexpr int kBlocks = sizeof(T) == 4 ? (kBwd ? 4 : 5) : (kBwd ? 6 : 8);

template <typename T, Activation kAct, bool kBwd>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kBwd>)
    swiglu_kernel(const Swiglu p, const Vectors n) {
  constexpr bool kFine = sizeof(T) == 4;
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= n.count) return;
  const uint32_t vector_row = n.row_of(i);
  const int64_t row = vector_row;
  const int64_t col = static_cast<int64_t>(i - vector_row * n.per_row) * kVec;
  const Vec8<T> gate = load_vec(static_cast<const T*>(p.gate) + row * p.gate_ld + col);
  const Vec8<T> up = load_vec(static_cast<const T*>(p.up) + row * p.up_ld + col);
  Vec8<T> grad;
  if (kBwd) grad = load_vec(static_cast<const T*>(p.grad_output) + row * p.cols + col);
  float g[kVec], u[kVec];
  unpack(gate, g);
  unpack(up, u);
  if (p.gate_bias) {
    add_bias<T>(p.gate_bias, col, g);
    add_bias<T>(p.up_bias, col, u);
  }
  Vec8<T> out;
  if (kBwd) {
    float d[kVec];
    unpack(grad, d);
#pragma unroll
    for (int k = 0; k < kVec; ++k)
      gated_gradient<kAct, kFine>(g[k], u[k], d[k], p.clamp, &g[k], &u[k]);
    pack(g, &out);
    store_vec(static_cast<T*>(p.dgate) + row * p.grad_ld + col, out);
    pack(u, &out);
    store_vec(static_cast<T*>(p.dup) + row * p.grad_ld + col, out);
  } else {
#pragma unroll
    for (int k = 0; k < kVec; ++k) g[k] = gated<kAct, kFine>(g[k], u[k], p.clamp);
    pack(g, &out);
    store_vec(static_cast<T*>(p.out) + row * p.cols + col, out);
  }
}

template <typename T>
const void* moved(const void* p, int64_t elements) {
  return p ? static_cast<const T*>(p) + elements : nullptr;
}
template <typename T>
void* moved(void* p, int64_t elements) {
  return p ? static_cast<T*>(p) + elements : nullptr;
}

// In launches of fewer than 2^31 vectors.
template <typename T>
void launch_vectors(Swiglu p, bool is_bwd, cudaStream_t stream) {
  const int64_t per_row = p.cols / kVec, total = p.rows;
  if (per_row == 0 || total == 0) return;
  if (per_row > kMaxVectors)
    fail(kApexTeUnsupported, "swiglu: input must have fewer than 2^34 columns");
  const int64_t rows_per_launch = kMaxVectors / per_row;
  for (int64_t row = 0; row < total; row += rows_per_launch) {
    p.rows = total - row < rows_per_launch ? total - row : rows_per_launch;
    const Vectors n{static_cast<uint32_t>(p.rows * per_row), static_cast<uint32_t>(per_row),
                    FastDivision(static_cast<uint32_t>(per_row))};
    const unsigned blocks = (n.count + kThreads - 1) / kThreads;
    GatedKinds::choose(p.activation, [&](auto act) {
      constexpr Activation kAct = decltype(act)::value;
      const auto kernel = is_bwd ? swiglu_kernel<T, kAct, true> : swiglu_kernel<T, kAct, false>;
      kernel<<<blocks, kThreads, 0, stream>>>(p, n);
    });
    check_cuda(cudaGetLastError(), "swiglu");
    p.gate = moved<T>(p.gate, p.rows * p.gate_ld);
    p.up = moved<T>(p.up, p.rows * p.up_ld);
    p.grad_output = moved<T>(p.grad_output, p.rows * p.cols);
    p.out = moved<T>(p.out, p.rows * p.cols);
    p.dgate = moved<T>(p.dgate, p.rows * p.grad_ld);
    p.dup = moved<T>(p.dup, p.rows * p.grad_ld);
  }
}

void run_swiglu(Args& args, const Swiglu& p, bool is_bwd) {
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const bool in_tiles = p.fp8 != DType::kOther || p.dbias;
  const bool aligned = swiglu_inputs_aligned(p) && is_aligned(p.out, 16) &&
                       is_aligned(p.dgate, 16) && is_aligned(p.dup, 16) && is_aligned(p.rowwise, 8);
  if (in_tiles && p.dtype != DType::kFloat32 && p.rows && p.cols)
    return aligned ? launch_swiglu_tile(p, is_bwd, stream)
                   : launch_swiglu_staged(p, is_bwd, stream);
  if (!aligned || in_tiles) return launch_swiglu_any(p, is_bwd, stream);
  with_dtype(p.dtype, [&](auto zero) { launch_vectors<decltype(zero)>(p, is_bwd, stream); });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(swiglu_fwd) {
  apex_te::run_swiglu(args, apex_te::check_swiglu_fwd(args, false), false);
}
APEX_TE_DEFINE(swiglu_fwd_fp8) {
  apex_te::run_swiglu(args, apex_te::check_swiglu_fwd(args, true), false);
}
APEX_TE_DEFINE(swiglu_bwd) {
  apex_te::run_swiglu(args, apex_te::check_swiglu_bwd(args, false), true);
}
APEX_TE_DEFINE(swiglu_bwd_fp8) {
  apex_te::run_swiglu(args, apex_te::check_swiglu_bwd(args, true), true);
}
