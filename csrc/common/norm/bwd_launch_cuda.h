// Backward of the norms: the second kernel, the path for any size and alignment, and the launch.
#pragma once

#include "common/norm/bwd_cuda.h"
#include "common/numerics/with_dtype.h"

namespace apex_te {

constexpr int kFinishRows = 16;  // partial sums of a column in the second kernel
constexpr int kLoopThreads = 512;
constexpr int kColumnRows = 8;   // rows of a block of the columns' kernel at a time
constexpr int kColumnSteps = 4;  // of a thread's rows that are added in float

// Adds the lines of each column, `kFinishRows` apart, then those sums in order; in double, since
// the rounding of long sums would show in fp32 gradients.
template <typename T>
__global__ void __launch_bounds__(32 * kFinishRows)
    norm_bwd_finish_kernel(const NormBwd p, const int64_t width, const int lines) {
  __shared__ double parts[kFinishRows][32];
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  double sum = 0.0;
  wait_for_previous_kernel();
  if (c < width) {
#pragma unroll 9
    for (int i = part; i < lines; i += kFinishRows) sum += p.workspace[i * width + c];
  }
  parts[part][lane] = sum;
  __syncthreads();
  if (part || c >= width) return;
  sum = 0.0;
#pragma unroll
  for (int i = 0; i < kFinishRows; ++i) sum += parts[i][lane];
  void* out = c < p.cols ? p.dweight : p.dbias;
  const int64_t at = c < p.cols ? c : c - p.cols;
  if (!out) return;
  const float total = static_cast<float>(sum);
  if (p.params.is_fp32)
    static_cast<float*>(out)[at] = total;
  else
    static_cast<T*>(out)[at] = from_float<T>(total);
}

// dx alone, a block to a row of any length and alignment, read twice.
template <typename T, bool kLayerNorm>
__global__ void __launch_bounds__(kLoopThreads, kLoopBlocks)
    norm_bwd_loop_kernel(const NormBwd p, const bool aligned) {
  __shared__ float2 parts[kLoopThreads / 32];
  const RowSpan span{p.cols, aligned};
  const int64_t row = blockIdx.x, begin = row * p.cols;
  const float mean = kLayerNorm ? p.mean[row] : 0.0f, rstd = p.rstd[row];
  // A row that the block takes in one step stays in registers.
  const bool held = span.steps() == 1;
  float xhat[kVec], g[kVec], sums[2] = {};  // of g * xhat and of g
  const auto read = [&](int64_t s, bool again) {
    if (again && held) return;
    float gamma[kVec];
    span.load(static_cast<const T*>(p.x) + begin, s, xhat);
    span.load(static_cast<const T*>(p.dy) + begin, s, g);
    span.load_gamma<T>(p.params, s, gamma);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      xhat[i] = (kLayerNorm ? xhat[i] - mean : xhat[i]) * rstd;
      g[i] *= gamma[i];
    }
  };
  for (int64_t s = 0; s < span.steps(); ++s) {
    read(s, false);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (!span.has(s, i)) continue;
      sums[0] = fmaf(g[i], xhat[i], sums[0]);
      sums[1] += g[i];
    }
  }
  const float count = static_cast<float>(p.cols);
  row_sums(sums, kLoopThreads, {1, 0}, parts, nullptr);
  const float mean_gx = sums[0] / count, mean_g = kLayerNorm ? sums[1] / count : 0.0f;
  for (int64_t s = 0; s < span.steps(); ++s) {
    read(s, true);
    float other[kVec] = {};
    if (p.d_residual) span.load(static_cast<const T*>(p.d_residual) + begin, s, other);
#pragma unroll
    for (int i = 0; i < kVec; ++i) g[i] = fmaf(-xhat[i], mean_gx, g[i] - mean_g) * rstd + other[i];
    span.store(static_cast<T*>(p.dx) + begin, s, g);
  }
}

// The lines of the weight gradients alone: block (columns, line) adds its share of the rows.
template <typename T, bool kLayerNorm>
__global__ void __launch_bounds__(32 * kColumnRows) norm_bwd_columns_kernel(const NormBwd p) {
  __shared__ double parts[2][kColumnRows][32];
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  const int64_t share = (p.rows + gridDim.y - 1) / gridDim.y;
  const int64_t end = min((blockIdx.y + 1) * share, p.rows);
  double dweight = 0.0, dbias = 0.0;
  if (c < p.cols) {
    for (int64_t row0 = blockIdx.y * share + part; row0 < end; row0 += kColumnRows * kColumnSteps) {
      // All loads before the first use, so that they are in flight together.
      float x[kColumnSteps], dy[kColumnSteps];
#pragma unroll
      for (int k = 0; k < kColumnSteps; ++k) {
        const int64_t row = row0 + k * kColumnRows, at = row * p.cols + c;
        x[k] = row < end ? to_float(static_cast<const T*>(p.x)[at]) : 0.0f;
        dy[k] = row < end ? to_float(static_cast<const T*>(p.dy)[at]) : 0.0f;
      }
      float few_dweight = 0.0f, few_dbias = 0.0f;  // of few rows
#pragma unroll
      for (int k = 0; k < kColumnSteps; ++k) {
        const int64_t row = row0 + k * kColumnRows;
        if (row >= end) continue;
        const float xhat = (kLayerNorm ? x[k] - p.mean[row] : x[k]) * p.rstd[row];
        few_dweight = fmaf(dy[k], xhat, few_dweight);
        few_dbias += dy[k];
      }
      dweight += few_dweight;
      dbias += few_dbias;
    }
  }
  parts[0][part][lane] = dweight;
  parts[1][part][lane] = dbias;
  __syncthreads();
  if (part > 1 || (part == 1 && !kLayerNorm) || c >= p.cols) return;
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < kColumnRows; ++i) sum += parts[part][i][lane];
  p.workspace[blockIdx.y * ((kLayerNorm ? 2 : 1) * p.cols) + part * p.cols + c] =
      static_cast<float>(sum);
}

struct BwdPlan {
  BwdShape shape;
  int64_t ranks, shared_bytes;
  bool any;  // the kernel's kAny
};

// The fewest blocks to a row, then the most rows to a block, that shared memory allows; false if
// the one-pass kernel cannot run.
template <typename T, bool kLayerNorm>
bool plan_norm_bwd(const NormBwd& p, int device, BwdPlan* plan) {
  plan->any = p.cols % kVec != 0;
  for (const void* q : {p.dy, p.x, p.d_residual, p.params.weight, static_cast<const void*>(p.dx),
                        static_cast<const void*>(p.workspace)})
    plan->any = plan->any || !is_aligned(q, 16);
  if (!p.cols) return false;
  const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int max_ranks = plan->any ? 1 : std::min(kMaxBwdCluster, most_norm_ranks(device));
  const int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount, device);
  const int chunks = bwd_chunks(kBwdStages<kLayerNorm>, p.d_residual);
  for (int64_t ranks = 1; ranks <= max_ranks; ranks *= 2) {
    const int64_t per_block = ranks * kBwdVecs * kVec;
    const int64_t pieces = (p.cols + per_block - 1) / per_block;
    const int most_threads = plan->any    ? kBwdThreads<T, kLayerNorm, false, true>
                             : ranks == 1 ? kBwdThreads<T, kLayerNorm, false, false>
                                          : kBwdThreads<T, kLayerNorm, true, false>;
    if (pieces > most_threads) continue;
    // At least 8 threads: fewer would make the sum over slots long.
    const int threads = static_cast<int>(std::max<int64_t>(row_threads(pieces), 8));
    // Whole warps in a block, and no more rows than all blocks together have.
    const int unit = threads < 32 ? 32 / threads : 1;
    int64_t slots =
        std::min<int64_t>(most_threads / threads, (p.rows + processors - 1) / processors);
    slots = (slots + unit - 1) / unit * unit;
    // Fewer slots where that leaves a multiprocessor fewer rows in its last, partial turn.
    int64_t least = 0;
    for (const int64_t most = slots; slots > 0 && (least == 0 || 2 * slots >= most);
         slots -= unit) {
      const int64_t width = threads * slots;
      const int64_t margins = plan->any ? width / std::min(threads, 32) * kRunMargin : 0;
      const int64_t bytes = chunks * kBwdVecs * (kVec * sizeof(T) * width + margins) +
                            threads * kBwdVecs * kVec * 4 + 2 * ranks * (width / 32) * 8 + 16 +
                            kBwdStages<kLayerNorm> * width / std::min(threads, 32) * 8;
      const int64_t turn = std::max<int64_t>(processors / ranks, 1) * slots,
                    rows = (p.rows + turn - 1) / turn * slots;
      if (bytes > limit || (least != 0 && 100 * rows >= 99 * least)) continue;
      least = rows;
      plan->shape = {threads, static_cast<int>(slots), chunks};
      plan->ranks = ranks;
      plan->shared_bytes = bytes;
    }
    if (least != 0) return true;
  }
  return false;
}

// The one-pass kernel; returns how many lines of weight gradients it leaves.
template <typename T, bool kLayerNorm>
int64_t launch_norm_bwd_plan(const NormBwd& p, const BwdPlan& plan, int device,
                             cudaStream_t stream) {
  const auto kernel = plan.any          ? norm_bwd_kernel<T, kLayerNorm, false, true>
                      : plan.ranks == 1 ? norm_bwd_kernel<T, kLayerNorm, false, false>
                                        : norm_bwd_kernel<T, kLayerNorm, true, false>;
  const int threads = plan.shape.threads * plan.shape.slots;
  allow_shared(reinterpret_cast<const void*>(kernel));
  // More clusters than can run at once would be a second, nearly empty round.
  const int64_t at_once =
      max_active_clusters(reinterpret_cast<const void*>(kernel), threads,
                          static_cast<int>(plan.ranks), plan.shared_bytes, device);
  int64_t lines = std::min(at_once, (p.rows + plan.shape.slots - 1) / plan.shape.slots);
  if (p.dweight || p.dbias) lines = std::min(lines, p.num_lines);
  launch_cluster(kernel, lines * plan.ranks, threads, static_cast<int>(plan.ranks),
                 static_cast<size_t>(plan.shared_bytes), stream, p, plan.shape);
  return lines;
}

template <typename T, bool kLayerNorm>
void launch_norm_bwd_type(const NormBwd& p, const char* op, int device, cudaStream_t stream) {
  const bool with_lines = p.dweight || p.dbias;
  int64_t lines = 0;
  bool planned = false;
  if constexpr (kHasCountedBarriers) {
    BwdPlan plan;
    planned = p.rows && plan_norm_bwd<T, kLayerNorm>(p, device, &plan);
    if (planned) lines = launch_norm_bwd_plan<T, kLayerNorm>(p, plan, device, stream);
  }
  if (!planned && p.rows && p.cols) {
    bool aligned = p.cols % kVec == 0;
    for (const void* q : {p.dy, p.x, p.d_residual, static_cast<const void*>(p.dx)})
      aligned = aligned && is_aligned(q, 16);
    check_grid(std::max(p.rows, p.cols), op);
    norm_bwd_loop_kernel<T, kLayerNorm>
        <<<static_cast<unsigned>(p.rows), kLoopThreads, 0, stream>>>(p, aligned);
    check_cuda(cudaGetLastError(), op);
    lines = p.num_lines;
    if (with_lines)
      norm_bwd_columns_kernel<T, kLayerNorm>
          <<<dim3(static_cast<unsigned>((p.cols + 31) / 32), static_cast<unsigned>(lines)),
             32 * kColumnRows, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), op);
  }
  if (!with_lines || !p.cols) return;
  const int64_t width = (kLayerNorm ? 2 : 1) * p.cols;
  launch_dependent(norm_bwd_finish_kernel<T>, (width + 31) / 32, 32 * kFinishRows, stream, p, width,
                   static_cast<int>(lines));
}

template <bool kLayerNorm>
void launch_norm_bwd(const NormBwd& p, const char* op, int device, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  with_dtype(p.dtype, [&](auto zero) {
    launch_norm_bwd_type<decltype(zero), kLayerNorm>(p, op, device, s);
  });
}

}  // namespace apex_te
