// CUDA kernels of focal_loss: a block has a tile of elements, a thread some vectors of 16 bytes.
#include "common/gpu/dependent_launch.h"
#include "common/gpu/fast_division.h"
#include "common/gpu/vec.h"
#include "common/gpu/warp_store.h"
#include "common/numerics/with_dtype.h"
#include "focal_loss/focal_loss.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 256, kSumThreads = 1024;
constexpr int kTile = static_cast<int>(kFocalTile);
constexpr int kSteps = kTile / kVec / kThreads;
constexpr uint32_t kAll = (1u << kVec) - 1;
constexpr float kLn2 = 0.693147182f;

// log2(u) for u >= 1.
__device__ __forceinline__ float binary_log(float u) {
#if defined(__CUDA_ARCH__) && !defined(APEX_TE_PORTABLE)
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(u));
  return result;
#else
  return log2f(u);
#endif
}

// Whether bit j is set, in one instruction: nvcc makes three of the expression.
__device__ __forceinline__ bool has_bit(uint32_t bits, int j) {
#if defined(__CUDA_ARCH__) && !defined(APEX_TE_PORTABLE)
  uint32_t is_set;
  asm("{.reg .pred q; .reg .b32 t; and.b32 t, %1, %2; setp.ne.b32 q, t, 0; selp.u32 %0, 1, 0, q;}"
      : "=r"(is_set)
      : "r"(bits), "r"(1u << j));
  return is_set;
#else
  return bits >> j & 1;
#endif
}

// kSquare: gamma is 2.
template <typename T, bool kSquare>
struct DeviceMath {
  static constexpr bool kFine = sizeof(T) == 4;
  // 16-bit gradients do not show what rounding z log2(e) loses; its remainder is the second factor.
  static __device__ __forceinline__ float exp(float z) {
    if (!kFine) return power_of_two_capped(kLog2E * z);
    z = fmaxf(z, -105.0f);  // the remainder of an infinity would be NaN
    const float exponent = kLog2E * z, power = power_of_two_capped(exponent);
    return fmaf(power, fmaf(exponent, -kLn2, z), power);
  }
  static __device__ __forceinline__ float inverse(float u) { return reciprocal(u); }
  static __device__ __forceinline__ float add_log1p(float e, float base) {
    return kFine ? base + log1p_fast(e) : fmaf(binary_log(1.0f + e), kLn2, base);
  }
  static __device__ __forceinline__ float power(float gamma, float p, float minus_log_p) {
    return kSquare ? p * p : exp(-gamma * minus_log_p);
  }
};

// Bits of a vector's elements: those that count, and those of the target's class.
struct Marks {
  uint32_t counted, targets;
};

// Of the elements from `first` on; Index has all of the tensor's indices. kWhole: the vector lies
// in one row.
template <typename Index, bool kWhole>
__device__ __forceinline__ Marks marks_of(const FocalLoss& p, FastDivision by_cols, int64_t first) {
  const Index cols = static_cast<Index>(p.cols), rows = static_cast<Index>(p.rows);
  const Index i = static_cast<Index>(first);
  Index row = sizeof(Index) == 4 ? static_cast<Index>(by_cols(static_cast<uint32_t>(i))) : i / cols;
  Index col = i - row * cols, done = 0;
  Marks marks = {0u, 0u};
  do {
    const int64_t target = p.target[row], at = target - col;
    Index count = target == kFocalIgnored ? 0 : static_cast<Index>(p.num_classes) - col;
    if (!kWhole) count = min(count, cols - col);
    uint32_t counted = kAll, own = static_cast<uint64_t>(at) < kVec ? 1u << at : 0u;
    if (count < kVec) {
      counted = (1u << max(count, Index{0})) - 1;
      own &= counted;
    }
    marks.counted |= counted << done & kAll;
    marks.targets |= own << done;
    done += cols - col;
    col = 0;
  } while (!kWhole && done < kVec && ++row < rows);
  return marks;
}

template <typename T>
__device__ __forceinline__ Vec8<T> load(const T* p, int left, bool is_inside) {
  return is_inside ? load_vec(p) : load_partial(p, left);
}
template <typename T>
__device__ __forceinline__ void store(T* p, const float* values, int left, bool is_inside) {
  if (is_inside) return store_by_warp(p, values, left);
  if (left <= 0) return;
  Vec8<T> v;
  pack(values, &v);
  store_partial(p, v, left);
}

template <typename T, typename Index, bool kWhole, bool kSquare, bool kGrad>
__global__ void __launch_bounds__(kThreads, 4)
    terms_kernel(const FocalLoss p, const FastDivision by_cols, bool aligned) {
  using Math = DeviceMath<T, kSquare>;
  constexpr int kStride = kThreads * kVec;
  constexpr float kNothing = -1e4f;  // a logit whose p^2 is 0
  __shared__ float sums[kThreads / 32];
  let_next_kernel_start();
  const int64_t begin = int64_t{blockIdx.x} * kTile, first = begin + threadIdx.x * kVec;
  const T* logits = static_cast<const T*>(p.logits) + first;
  const int count = static_cast<int>(min(p.numel() - begin, kFocalTile));
  const int left = count - static_cast<int>(threadIdx.x) * kVec;
  const bool is_inside = aligned && count == kTile;
  Vec8<T> x[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) x[k] = load(logits + k * kStride, left - k * kStride, is_inside);
  const float gamma = kSquare ? 2.0f : p.gamma, smoothing = p.smoothing;
  const float background = 1.0f - p.alpha;
  const float factor = kGrad ? p.factor() : 0.0f;
  const float grad_background = background * factor, grad_target = -p.alpha * factor;
  float sum = 0.0f, target_sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (!is_inside && left <= k * kStride) break;
    const Marks marks = marks_of<Index, kWhole>(p, by_cols, first + k * kStride);
    float values[kVec], part = 0.0f, target_part = 0.0f;
    unpack(x[k], values);
    if (marks.counted != kAll) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) values[j] = marks.counted & 1u << j ? values[j] : kNothing;
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const bool is_target = has_bit(marks.targets, j);
      const float y = is_target ? -values[j] : values[j];
      FocalTerm term = focal_term<Math>(y, gamma, smoothing);
      if (!kSquare && !(marks.counted & 1u << j)) term.power = 0.0f;
      if (is_target)
        target_part = fmaf(term.power, term.ce, target_part);
      else
        part = fmaf(term.power, term.ce, part);
      if (kGrad) values[j] = term.power * (is_target ? grad_target : grad_background) * term.slope;
    }
    sum += part;
    target_sum += target_part;
    if (kGrad)
      store(static_cast<T*>(p.grad) + first + k * kStride, values, left - k * kStride, is_inside);
  }
  if (!p.workspace) return;
  sum = warp_sum(fmaf(p.alpha, target_sum, background * sum));
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
  wait_for_previous_kernel();
  for (int64_t tile = threadIdx.x; tile < p.tiles(); tile += kSumThreads) sum += p.workspace[tile];
  sums[threadIdx.x] = sum;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *p.loss = static_cast<float>(sums[0] / *p.num_positives);
}

// A thread has 16 bytes: blocks that differ in time keep loads and stores under way together.
template <typename T>
__global__ void __launch_bounds__(kThreads, 8) scale_kernel(const FocalLoss p, bool aligned) {
  constexpr int kPer = 16 / sizeof(T);
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPer;
  const int64_t left = p.numel() - first;
  T* grad = static_cast<T*>(p.grad) + first;
  if (!aligned || left < kPer) {
    for (int i = 0; i < kPer && i < left; ++i)
      grad[i] = from_float<T>(to_float(grad[i]) * p.factor());
  } else if constexpr (sizeof(T) == 4) {
    const float4 x = *reinterpret_cast<const float4*>(grad);
    const float factor = p.factor();
    *reinterpret_cast<float4*>(grad) =
        make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
  } else {
    Vec8<T> x = load_vec(grad);
    const float factor = p.factor();
    float values[kVec];
    unpack(x, values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] *= factor;
    pack(values, &x);
    store_vec(grad, x);
  }
}

unsigned blocks_of(const FocalLoss& p, int64_t per_block) {
  const int64_t blocks = (p.numel() + per_block - 1) / per_block;
  if (blocks > 0x7FFFFFFF) fail(kApexTeUnsupported, "focal_loss: logits must have fewer elements");
  return static_cast<unsigned>(blocks);
}

template <typename T, typename Index, bool kWhole>
void launch_terms(const FocalLoss& p, cudaStream_t stream) {
  const auto kernel_of = [&](auto is_square) {
    constexpr bool kSquare = decltype(is_square)::value;
    return p.grad ? terms_kernel<T, Index, kWhole, kSquare, true>
                  : terms_kernel<T, Index, kWhole, kSquare, false>;
  };
  const auto kernel = p.gamma == 2.0f ? kernel_of(std::true_type()) : kernel_of(std::false_type());
  const FastDivision by_cols(sizeof(Index) == 4 ? static_cast<uint32_t>(p.cols) : 1u);
  const bool aligned = is_aligned(p.logits, 16) && is_aligned(p.grad, 16);
  kernel<<<blocks_of(p, kTile), kThreads, 0, stream>>>(p, by_cols, aligned);
  check_cuda(cudaGetLastError(), "focal_loss");
}

template <typename T>
void launch_terms(const FocalLoss& p, cudaStream_t stream) {
  if (p.numel() >= 0x7FFFFFFF) return launch_terms<T, int64_t, false>(p, stream);
  if (p.cols % kVec) return launch_terms<T, int32_t, false>(p, stream);
  launch_terms<T, int32_t, true>(p, stream);
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
  run(p, stream);
  launch_dependent(sum_kernel, 1, kSumThreads, stream, p);
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
    using T = decltype(zero);
    scale_kernel<T><<<blocks_of(p, kThreads * 16 / sizeof(T)), kThreads, 0, stream>>>(
        p, is_aligned(p.grad, 16));
  });
  check_cuda(cudaGetLastError(), "focal_loss_scale");
}
