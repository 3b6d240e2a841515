// Device code of cross_entropy for one row: its vectors, its statistics, its loss and gradient.
#pragma once

#include <cfloat>

#include "common/gpu/vec.h"
#include "cross_entropy/cross_entropy.h"

namespace apex_te {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

struct Params {
  const void* logits;
  void* grad;
  int64_t rows, cols;
  Targets target;
  float* loss;
  float2* stats;
  const int32_t* num_valid;
  float label_smoothing;
};

__device__ __forceinline__ float fast_exp(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2e));
  return y;
#else
  return exp2f(x * kLog2e);
#endif
}

// A row of any alignment: up to 7 columns before the first aligned vector (head), the vectors, up
// to 7 columns behind the last (tail).
template <typename T>
struct Row {
  T* data;
  int cols, head, num_vecs;
  __device__ Row(const void* base, int64_t row, int64_t num_cols)
      : data(static_cast<T*>(const_cast<void*>(base)) + row * num_cols),
        cols(static_cast<int>(num_cols)) {
    const int ahead = static_cast<int>(-(reinterpret_cast<uintptr_t>(data) / sizeof(T)) % kVec);
    head = min(ahead, cols);
    num_vecs = (cols - head) / kVec;
  }
  __device__ int col(int i) const { return head + i * kVec; }
  // Columns outside the vectors, at most 14, one for each of a block's first threads; or -1.
  __device__ int edge_col() const {
    const int t = threadIdx.x, last = col(num_vecs);
    return t < head ? t : t - head < cols - last ? last + t - head : -1;
  }
  __device__ float at(int64_t c) const { return to_float(data[c]); }
};

// Vector i; behind `end` it is -inf, which adds nothing to a sum of exponentials.
template <typename T>
__device__ __forceinline__ Vec8<T> load_or_neutral(const T* vecs, int i, int end) {
  if (i < end) return load_vec(vecs + static_cast<int64_t>(i) * kVec);
  float values[kVec];
#pragma unroll
  for (int k = 0; k < kVec; ++k) values[k] = -INFINITY;
  Vec8<T> v;
  pack(values, &v);
  return v;
}

__device__ __forceinline__ float max_of(const Vec8<float>& v) {
  float top = __uint_as_float(v.words[0]);
#pragma unroll
  for (int k = 1; k < kVec; ++k) top = fmaxf(top, __uint_as_float(v.words[k]));
  return top;
}
template <typename T>
__device__ __forceinline__ float max_of(const Vec8<T>& v) {
  Vec8<T> top;
  top.words[0] = max_pairs(T{}, max_pairs(T{}, v.words[0], v.words[1]),
                           max_pairs(T{}, v.words[2], v.words[3]));
  const float2 pair = pair_of(top, 0);
  return fmaxf(pair.x, pair.y);
}

// (largest logit, sum of exponentials relative to it, sum of logits) of a part of a row. No logits
// have -FLT_MAX as their largest: from -inf, a difference could be NaN.
struct Stats {
  float max, exp_sum, sum;
  __device__ __forceinline__ void raise(float higher) {
    exp_sum *= fast_exp(max - higher);
    max = higher;
  }
};

// A zero that the compiler does not know, to read a row's words anew: otherwise it would keep the
// first pass's floats for the gradient, which take twice the registers and spill.
__device__ __forceinline__ uint32_t hidden_zero(const Params& p) {
  return static_cast<uint32_t>(static_cast<uint64_t>(p.rows) >> 63);
}
template <typename T>
__device__ __forceinline__ void read_anew(Vec8<T>& v, uint32_t zero) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(2 * sizeof(T)); ++i) v.words[i] ^= zero;
}

template <typename T>
__device__ __forceinline__ void add_exps(const Vec8<T>& v, Stats& stats) {
  float values[kVec];
  unpack(v, values);
#pragma unroll
  for (int k = 0; k < kVec; ++k) stats.exp_sum += fast_exp(values[k] - stats.max);
}

// The plain sum, which only label smoothing needs.
template <typename T>
__device__ __forceinline__ float sum_of(const Vec8<T>& v) {
  float values[kVec], sum = 0.0f;
  unpack(v, values);
#pragma unroll
  for (int k = 0; k < kVec; ++k) sum += values[k];
  return sum;
}

__device__ __forceinline__ float warp_fmax(float value) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  return value;
}

template <int kThreads>
struct BlockScratch {
  float values[3][kThreads / 32];
};

// The largest value of the threads of a row, in each of them. The rows of warps need no barrier.
template <int kThreads>
__device__ __forceinline__ float block_max(float value, BlockScratch<kThreads>& scratch) {
  constexpr int kWarps = kThreads / 32;
  value = warp_fmax(value);
  if constexpr (kWarps == 1) return value;
  if (threadIdx.x % 32 == 0) scratch.values[0][threadIdx.x / 32] = value;
  __syncthreads();
  return warp_fmax(scratch.values[0][threadIdx.x % kWarps]);
}

// Adds the threads' sums, which share one maximum, in a fixed order; in every thread.
template <int kThreads>
__device__ __forceinline__ Stats block_sum(const Stats& stats, bool with_sum,
                                           BlockScratch<kThreads>& scratch) {
  constexpr int kWarps = kThreads / 32;
  const float exp_sum = warp_sum(stats.exp_sum);
  const float sum = with_sum ? warp_sum(stats.sum) : 0.0f;
  if constexpr (kWarps == 1) return {stats.max, exp_sum, sum};
  if (threadIdx.x % 32 == 0) {
    scratch.values[1][threadIdx.x / 32] = exp_sum;
    scratch.values[2][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  Stats total{stats.max, 0.0f, 0.0f};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total.exp_sum += scratch.values[1][w];
  if (with_sum)
    for (int w = 0; w < kWarps; ++w) total.sum += scratch.values[2][w];
  return total;
}

// Constants of a row's gradient: exp(x - max) * scale - smooth and, at the target, at_target less.
struct RowGrad {
  float max, scale, smooth, at_target;
  int64_t target;
  __device__ __forceinline__ float operator()(float logit) const {
    return fmaf(fast_exp(logit - max), scale, -smooth);
  }
};

// Number of valid rows, by which every row's gradient is divided; to be read early.
__device__ __forceinline__ int32_t num_valid_of(const Params& p) {
  return p.num_valid ? *p.num_valid : 1;
}
// Factor of the gradient. The conversion stays where this function is called: beside the load, it
// would wait for the load.
__device__ __forceinline__ float grad_factor(int32_t num_valid, float grad_output = 1.0f) {
#if defined(__CUDA_ARCH__)
  float divisor;
  asm volatile("cvt.rn.f32.s32 %0, %1;" : "=f"(divisor) : "r"(num_valid));
  return grad_output / divisor;
#else
  return grad_output / static_cast<float>(num_valid);
#endif
}

// factor: what the gradient is multiplied by.
__device__ __forceinline__ RowGrad row_grad(const Params& p, int64_t target, float max,
                                            float exp_sum, float factor) {
  const float smoothing = p.label_smoothing, inv_cols = 1.0f / static_cast<float>(p.cols);
  if (target < 0 || target >= p.cols) factor = NAN;
  return RowGrad{max, factor / exp_sum, smoothing * inv_cols * factor, (1.0f - smoothing) * factor,
                 target};
}

__device__ __forceinline__ RowGrad finish_row(const Params& p, int64_t row, int64_t target,
                                              float target_logit, const Stats& total, float factor,
                                              bool writes_loss) {
  const float smoothing = p.label_smoothing;
  if (writes_loss) {
    // lse(x) may be much larger than the loss: logits are subtracted from its larger part first.
    const float log_sum = logf(total.exp_sum);
    float loss = (1.0f - smoothing) * (total.max - target_logit + log_sum);
    if (smoothing != 0.0f)
      loss += smoothing * (total.max - total.sum / static_cast<float>(p.cols) + log_sum);
    p.loss[row] = target >= 0 && target < p.cols ? loss : NAN;
    if (p.stats) p.stats[row] = make_float2(total.max, total.exp_sum);
  }
  return row_grad(p, target, total.max, total.exp_sum, factor);
}

// The gradient of the vector at `col`; kVectors: the gradient is aligned as the logits are.
template <typename T, bool kVectors>
__device__ __forceinline__ void store_grad(T* grad, int col, const Vec8<T>& v, const RowGrad& g) {
  const int64_t at_target = g.target - col;
  float values[kVec];
  unpack(v, values);
#pragma unroll
  for (int k = 0; k < kVec; ++k) values[k] = g(values[k]);
  if (at_target >= 0 && at_target < kVec) {
#pragma unroll
    for (int k = 0; k < kVec; ++k)
      if (k == at_target) values[k] -= g.at_target;
  }
  if (kVectors) {
    Vec8<T> out;
    pack(values, &out);
    store_vec_whole(grad + col, out);
  } else {
#pragma unroll
    for (int k = 0; k < kVec; ++k) grad[col + k] = from_float<T>(values[k]);
  }
}

template <typename T>
__device__ __forceinline__ void store_edge_grad(T* grad, int col, float logit, const RowGrad& g) {
  grad[col] = from_float<T>(g(logit) - (col == g.target ? g.at_target : 0.0f));
}

// Targets of a block's rows, each read a row ahead.
class TargetStream {
 public:
  __device__ TargetStream(const Params& p, int64_t row) : next_(row < p.rows ? p.target[row] : 0) {}
  __device__ __forceinline__ int64_t take(const Params& p, int64_t row_after) {
    const int64_t target = next_;
    if (row_after < p.rows) next_ = p.target[row_after];
    return target;
  }

 private:
  int64_t next_;
};

// Ignored rows: loss 0, gradient 0; only short ones are read.
template <typename T>
__device__ __forceinline__ void clear_row(const Params& p, int64_t row, int threads, int rank = 0,
                                          int blocks = 1) {
  if (threadIdx.x == 0 && rank == 0) p.loss[row] = 0.0f;
  if (!p.grad) return;
  const Row<T> grad(p.grad, row, p.cols);
  for (int i = rank * threads + threadIdx.x; i < grad.num_vecs; i += threads * blocks)
    store_vec_whole(grad.data + grad.col(i), Vec8<T>{});
  const int edge = rank == 0 ? grad.edge_col() : -1;
  if (edge >= 0) grad.data[edge] = from_float<T>(0.0f);
}

template <typename T>
__device__ __forceinline__ float target_logit_of(const Row<T>& row, int64_t target) {
  return target >= 0 && target < row.cols ? row.at(target) : 0.0f;
}

}  // namespace
}  // namespace apex_te
