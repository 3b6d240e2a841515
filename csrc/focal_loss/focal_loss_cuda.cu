// CUDA kernels of focal_loss: a block has a tile of elements, a thread some vectors of 16 bytes.
#include "common/gpu/fast_division.h"
#include "common/gpu/vec.h"
#include "common/numerics/with_dtype.h"
#include "focal_loss/focal_loss.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 256, kSumThreads = 1024;
constexpr int kTile = static_cast<int>(kFocalTile);
constexpr int kSteps = kTile / kVec / kThreads;

// 16-bit gradients do not show what the hardware's own exponential and logarithm leave out.
template <typename T>
struct DeviceMath {
  static constexpr bool kShort = sizeof(T) == 2;
  static __device__ __forceinline__ float exp(float x) { return kShort ? __expf(x) : expf(x); }
  static __device__ __forceinline__ float inverse(float u) { return __fdividef(1.0f, u); }
  // The second term is what rounding 1 + e has lost.
  static __device__ __forceinline__ float log1p(float e, float inverse) {
    const float u = 1.0f + e;
    return kShort ? __logf(u) + (e - (u - 1.0f)) * inverse : log1p_fast(e);
  }
};

// The row of an element: rows of whole vectors are divided in vectors.
struct RowOf {
  FastDivision fast;
  bool is_small;  // all indices are below 2^31
  int64_t divisor;

  RowOf(int64_t count, int64_t per_row)
      : fast(static_cast<uint32_t>(count < 0x7FFFFFFF ? per_row : 1)),
        is_small(count < 0x7FFFFFFF),
        divisor(per_row) {}
  __device__ __forceinline__ int64_t operator()(int64_t i) const {
    return is_small ? fast(static_cast<uint32_t>(i)) : i / divisor;
  }
};

template <typename T>
__device__ __forceinline__ Vec8<T> load(const T* p, int64_t left, bool aligned) {
  if (left <= 0) return {};
  return aligned && left >= kVec ? load_vec(p) : load_partial(p, left);
}
template <typename T>
__device__ __forceinline__ void store(T* p, const Vec8<T>& v, int64_t left, bool aligned) {
  if (aligned && left >= kVec)
    store_vec_whole(p, v);
  else if (left > 0)
    store_partial(p, v, left);
}

// kWhole: a vector lies in one row.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : 4)
    terms_kernel(const FocalLoss p, const RowOf row_of, bool aligned) {
  __shared__ float sums[kThreads / 32];
  const T* logits = static_cast<const T*>(p.logits);
  const int64_t first = int64_t{blockIdx.x} * kTile + threadIdx.x * kVec, numel = p.numel();
  Vec8<T> x[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t i = first + k * kThreads * kVec;
    x[k] = load(logits + i, numel - i, aligned);
  }
  const float factor = p.factor();
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t i = first + k * kThreads * kVec, left = numel - i;
    if (left <= 0) break;
    int64_t row = kWhole ? row_of(i / kVec) : row_of(i);
    int64_t col = i - row * p.cols, target = p.target[row];
    float values[kVec], part = 0.0f;
    unpack(x[k], values);
#pragma unroll
    for (int j = 0; j < kVec; ++j, ++col) {
      if (!kWhole && col == p.cols) {
        col = 0;
        target = ++row < p.rows ? p.target[row] : kFocalIgnored;
      }
      const FocalTerm term =
          focal_term<DeviceMath<T>>(values[j], col == target, p.alpha, p.gamma, p.smoothing);
      const bool counts = col < p.num_classes && target != kFocalIgnored;
      part += counts ? term.loss : 0.0f;
      values[j] = counts ? term.grad * factor : 0.0f;
    }
    sum += part;
    if (!p.grad) continue;
    Vec8<T> grad;
    pack(values, &grad);
    store(static_cast<T*>(p.grad) + i, grad, left, aligned);
  }
  if (!p.workspace) return;
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) total += sums[w];
  p.workspace[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kSumThreads) sum_kernel(const FocalLoss p) {
  __shared__ double sums[kSumThreads];
  double sum = 0.0;
  for (int64_t tile = threadIdx.x; tile < p.tiles(); tile += kSumThreads) sum += p.workspace[tile];
  sums[threadIdx.x] = sum;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *p.loss = static_cast<float>(sums[0] / *p.num_positives);
}

// A thread has loads of 16 bytes that neighbours continue, of either size of element.
template <typename T>
__global__ void __launch_bounds__(kThreads) scale_kernel(const FocalLoss p, bool aligned) {
  constexpr int kPer = 16 / sizeof(T), kLoads = kTile / kPer / kThreads;
  const int64_t begin = int64_t{blockIdx.x} * kTile, left = p.numel() - begin;
  T* grad = static_cast<T*>(p.grad) + begin;
  const float factor = p.factor();
  if (!aligned || left < kTile) {
    for (int i = threadIdx.x; i < kTile && i < left; i += kThreads)
      grad[i] = from_float<T>(to_float(grad[i]) * factor);
    return;
  }
  uint4* vectors = reinterpret_cast<uint4*>(grad) + threadIdx.x;
  union {
    uint4 words;
    T values[kPer];
  } x[kLoads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) x[k].words = vectors[k * kThreads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      x[k].values[j] = from_float<T>(to_float(x[k].values[j]) * factor);
    store_16(vectors + k * kThreads, x[k].words);
  }
}

unsigned blocks_of(const FocalLoss& p) {
  if (p.tiles() > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "focal_loss: logits must have fewer elements");
  return static_cast<unsigned>(p.tiles());
}

template <typename T>
void launch_terms(const FocalLoss& p, cudaStream_t stream) {
  const bool aligned = is_aligned(p.logits, 16) && is_aligned(p.grad, 16);
  const unsigned blocks = blocks_of(p);
  if (p.cols % kVec == 0)
    terms_kernel<T, true>
        <<<blocks, kThreads, 0, stream>>>(p, RowOf(p.numel() / kVec, p.cols / kVec), aligned);
  else
    terms_kernel<T, false><<<blocks, kThreads, 0, stream>>>(p, RowOf(p.numel(), p.cols), aligned);
  check_cuda(cudaGetLastError(), "focal_loss");
}

void run(const FocalLoss& p, cudaStream_t stream) {
  if (p.numel() > 0)
    with_dtype(p.dtype, [&](auto zero) { launch_terms<decltype(zero)>(p, stream); });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(focal_loss_fwd) {
  using namespace apex_te;
  const FocalLoss p = check_focal_loss_fwd(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  if (p.numel() > 0)
    with_dtype(p.dtype, [&](auto zero) { launch_terms<decltype(zero)>(p, stream); });
  sum_kernel<<<1, kSumThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "focal_loss_fwd");
}

APEX_TE_DEFINE(focal_loss_bwd) {
  using namespace apex_te;
  const FocalLoss p = check_focal_loss_bwd(args);
  const DeviceGuard guard(args.device_id());
  run(p, static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(focal_loss_scale) {
  using namespace apex_te;
  const FocalLoss p = check_focal_loss_scale(args);
  if (p.numel() == 0) return;
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(p.dtype, [&](auto zero) {
    scale_kernel<decltype(zero)><<<blocks_of(p), kThreads, 0, stream>>>(p, is_aligned(p.grad, 16));
  });
  check_cuda(cudaGetLastError(), "focal_loss_scale");
}
