// Forward of the norms, a row at a time: to x's dtype, to rowwise FP8, or the statistics alone.
//
// Rows are held in registers as they were loaded, long ones by a cluster of blocks: every load of a
// thread is in flight at once, x is read once, and the second pass of layer_norm's variance costs
// no memory. Other rows (longer still, or not aligned) are read again, from L1 or L2.
#pragma once

#include "common/gpu/amax.h"
#include "common/norm/cuda.h"

namespace apex_te {

constexpr int kNormThreads = 128;     // of a block, where a row needs fewer
constexpr int kMaxNormThreads = 512;  // of a row in one block
constexpr int kMaxFinishThreads = 1024;
constexpr int kRankThreads = 256;  // of a row in each block of a cluster
template <typename T>
constexpr int kNormVecs = 8 / sizeof(T);  // of a thread: 64 bytes of a row

// 8 results of columns of a row; accumulates their amax where FP8 is wanted.
template <bool kLayerNorm>
__device__ __forceinline__ void normalize(float* values, const float* gamma, const float* bias,
                                          float mean, float rstd) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float xhat = (kLayerNorm ? values[i] - mean : values[i]) * rstd;
    values[i] = kLayerNorm ? fmaf(xhat, gamma[i], bias[i]) : xhat * gamma[i];
  }
}

__device__ __forceinline__ uint2 encode_as(DType fp8, const float* values, float scale) {
  return fp8 == DType::kE5M2 ? encode_values<E5M2>(values, scale)
                             : encode_values<E4M3>(values, scale);
}

// x + residual, rounded, which is what gets normalised and what backward will see.
template <typename T>
__device__ __forceinline__ Vec8<T> add_residual(const Vec8<T>& x, const Vec8<T>& residual) {
  float a[kVec], b[kVec];
  unpack(x, a);
  unpack(residual, b);
#pragma unroll
  for (int i = 0; i < kVec; ++i) a[i] += b[i];
  Vec8<T> sum;
  pack(a, &sum);
  return sum;
}

// Last step of a block of at most kMaxFinishThreads for FP8: folds its amax into the tensor's and,
// in the first block, writes scale_inv.
__device__ __forceinline__ void finish_fp8(const NormFwd& p, uint32_t amax, uint32_t seen) {
  constexpr int kWarps = kMaxFinishThreads / 32;
  __shared__ uint32_t warp_amaxes[kWarps];
  if (p.amax) {
    if (threadIdx.x < kWarps && threadIdx.x >= blockDim.x / 32) warp_amaxes[threadIdx.x] = 0;
    stage_amax(amax, warp_amaxes);
    __syncthreads();
    finish_amax<kMaxFinishThreads>(p.amax, seen, warp_amaxes);
  }
  if (p.scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *p.scale_inv = 1.0f / *p.scale;
}

// Mean of a row's or of some columns, and the sum of squares around it; of rms_norm around zero.
struct Statistics {
  float mean, squares;
};

// Adds the residual to a thread's vectors and stores the sums; both pointers are at its first.
template <typename T, int kVecs>
__device__ __forceinline__ void add_residual_row(Vec8<T> (&in)[kVecs], const T* residual, T* total,
                                                 ThreadColumns cols) {
  constexpr int kGroup = 16 / sizeof(T) < kVecs ? 16 / sizeof(T) : kVecs;  // registers allow
#pragma unroll
  for (int k0 = 0; k0 < kVecs; k0 += kGroup) {
    Vec8<T> other[kGroup];
#pragma unroll
    for (int k = 0; k < kGroup; ++k)
      if (cols.has(k0 + k)) other[k] = load_vec(residual + (k0 + k) * cols.step);
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      if (!cols.has(k0 + k)) continue;
      in[k0 + k] = add_residual(in[k0 + k], other[k]);
      store_vec(total + (k0 + k) * cols.step, in[k0 + k]);
    }
  }
}

// Statistics of a row whose vectors its threads hold; parts and exchange: of two sums, in turn.
template <bool kLayerNorm, typename T, int kVecs, int kParts>
__device__ __forceinline__ Statistics held_statistics(Vec8<T> (&in)[kVecs], ThreadColumns cols,
                                                      float count, int threads, RowRanks ranks,
                                                      float2 (&parts)[2][kParts],
                                                      uint64_t* exchange) {
  float mean = 0.0f, sums[kCentredSums<T, kLayerNorm>] = {};
  if (kLayerNorm) {
    float sum[1] = {};
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      float values[kVec];
      unpack(in[k], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[0] += values[i];
    }
    row_sums(sum, threads, ranks, parts[0], exchange);
    mean = sum[0] / count;
    keep_packed(in);
  }
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    if (!cols.has(k)) continue;
    float values[kVec];
    unpack(in[k], values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) add_centred(values[i] - mean, sums);
  }
  row_sums(sums, threads, ranks, parts[1], exchange + 1);
  correct_mean(sums, count, &mean);
  return {mean, sums[0]};
}

// Normalises a thread's vectors: to y, or to rowwise FP8, whose amax it returns.
template <bool kLayerNorm, typename T, int kVecs>
__device__ __forceinline__ uint32_t store_held_row(const NormFwd& p, const Vec8<T> (&in)[kVecs],
                                                   ThreadColumns cols, int64_t begin, float mean,
                                                   float rstd) {
  const float scale = p.scale ? *p.scale : 1.0f;
  uint32_t amax = 0;
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    if (!cols.has(k)) continue;
    const int col = cols.first + k * cols.step;
    float values[kVec], gamma[kVec], bias[kVec];
    unpack(in[k], values);
    load_gamma<T>(p.params, col, gamma);
    if (kLayerNorm) load_bias<T>(p.params, col, bias);
    normalize<kLayerNorm>(values, gamma, bias, mean, rstd);
    if (p.y) {
      Vec8<T> out;
      pack(values, &out);
      store_vec(static_cast<T*>(p.y) + begin + k * cols.step, out);
    } else {
      fold_amax(values, amax);
      const uint2 codes = encode_as(p.fp8, values, scale);
      if (p.rowwise) *reinterpret_cast<uint2*>(p.rowwise + begin + k * cols.step) = codes;
    }
  }
  return amax;
}

// A block has `threads` (row_threads) of each of its rows, a thread up to kVecs vectors of one.
template <typename T, bool kLayerNorm>
__global__ void __launch_bounds__(kMaxNormThreads, 2)
    norm_fwd_kernel(const NormFwd p, const int threads) {
  constexpr int kVecs = kNormVecs<T>;
  __shared__ float2 parts[2][kMaxNormRanks * kMaxNormThreads / 32];
  __shared__ uint64_t exchange[2];
  const RowRanks ranks{static_cast<int>(cluster_size()), static_cast<int>(cluster_rank())};
  if (ranks.count > 1) {
    if (threadIdx.x == 0) {
      barrier_init(exchange, 1);
      barrier_init(exchange + 1, 1);
    }
    __syncwarp();
    cluster_arrive();
  }
  const int slot = threadIdx.x / threads, t = threadIdx.x - slot * threads;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x / ranks.count) * (blockDim.x / threads) + slot;
  const int step = threads * kVec;
  const ThreadColumns cols{ranks.rank * kVecs * step + t * kVec, step,
                           row < p.rows ? static_cast<int>(p.cols) : 0};
  const int64_t begin = row * p.cols + cols.first;
  const T* x = static_cast<const T*>(p.x) + begin;
  Vec8<T> in[kVecs];
#pragma unroll
  for (int k = 0; k < kVecs; ++k) in[k] = cols.has(k) ? load_vec(x + k * step) : Vec8<T>{};
  const uint32_t seen = amax_so_far(p.amax);
  if (p.residual)
    add_residual_row(in, static_cast<const T*>(p.residual) + begin,
                     static_cast<T*>(p.residual_sum) + begin, cols);

  if (ranks.count > 1) cluster_wait();  // every block of the cluster has begun
  const float count = static_cast<float>(p.cols);
  const Statistics s =
      held_statistics<kLayerNorm>(in, cols, count, threads, ranks, parts, exchange);
  const float rstd = rstd_of(s.squares, count, p.eps);
  if (t == 0 && ranks.rank == 0 && row < p.rows) {
    if (kLayerNorm) p.mean[row] = s.mean;
    p.rstd[row] = rstd;
  }
  if (!p.y && !p.scale) return;
  keep_packed(in);
  const uint32_t amax = store_held_row<kLayerNorm>(p, in, cols, begin, s.mean, rstd);
  if (p.scale) finish_fp8(p, amax, seen);
}

// A block to a row of any length and alignment.
template <typename T, bool kLayerNorm>
__global__ void __launch_bounds__(kMaxNormThreads, kLoopBlocks)
    norm_fwd_loop_kernel(const NormFwd p, const bool aligned) {
  __shared__ float2 parts[2][kMaxNormThreads / 32];
  const RowSpan span{p.cols, aligned};
  const int64_t row = blockIdx.x;
  const uint32_t seen = amax_so_far(p.amax);
  uint32_t amax = 0;
  if (row < p.rows) {
    const T* x = static_cast<const T*>(p.x) + row * p.cols;
    const float count = static_cast<float>(p.cols);
    float values[kVec], mean = 0.0f, sums[kCentredSums<T, kLayerNorm>] = {};
    // A row that the block takes in one step stays in registers.
    const bool held = span.steps() == 1;
    const auto read = [&](int64_t s) {
      if (!held) span.load(x, s, values);
    };
    if (p.residual) {
      const T* residual = static_cast<const T*>(p.residual) + row * p.cols;
      T* total = static_cast<T*>(p.residual_sum) + row * p.cols;
      for (int64_t s = 0; s < span.steps(); ++s) {
        float other[kVec];
        span.load(x, s, values);
        span.load(residual, s, other);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] += other[i];
        span.store(total, s, values);
      }
      x = total;  // each thread reads again what it wrote
    }
    if (held) span.load(x, 0, values);
    if (kLayerNorm) {
      float sum[1] = {};
#pragma unroll 1
      for (int64_t s = 0; s < span.steps(); ++s) {
        read(s);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[0] += values[i];
      }
      row_sums(sum, blockDim.x, {1, 0}, parts[0], nullptr);
      mean = sum[0] / count;
    }
#pragma unroll 1
    for (int64_t s = 0; s < span.steps(); ++s) {
      read(s);
#pragma unroll
      for (int i = 0; i < kVec; ++i) add_centred(span.has(s, i) ? values[i] - mean : 0.0f, sums);
    }
    row_sums(sums, blockDim.x, {1, 0}, parts[1], nullptr);
    correct_mean(sums, count, &mean);
    const float rstd = rstd_of(sums[0], count, p.eps);
    if (threadIdx.x == 0) {
      if (kLayerNorm) p.mean[row] = mean;
      p.rstd[row] = rstd;
    }
    if (!p.y && !p.scale) return;
    const float scale = p.scale ? *p.scale : 1.0f;
    for (int64_t s = 0; s < span.steps(); ++s) {
      float gamma[kVec], bias[kVec];
      read(s);
      span.load_gamma<T>(p.params, s, gamma);
      if (kLayerNorm) span.load_bias<T>(p.params, s, bias);
      normalize<kLayerNorm>(values, gamma, bias, mean, rstd);
      if (p.y) {
        span.store(static_cast<T*>(p.y) + row * p.cols, s, values);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (span.has(s, i)) amax = max(amax, magnitude_bits(values[i]));
      if (p.rowwise) span.store_codes(p.rowwise + row * p.cols, s, encode_as(p.fp8, values, scale));
    }
  }
  if (p.scale) finish_fp8(p, amax, seen);
}

}  // namespace apex_te
