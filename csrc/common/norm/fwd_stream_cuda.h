// Forward of the norms for many rows that a block holds, a few rows after each other: the next are
// on their way to shared memory while one is normalised, so that no load waits for a reduction.
// Blocks of few rows were faster than a persistent grid, probably because multiprocessors differ in
// speed and the fast ones then take more.
//
// The statistics of layer_norm take one exchange between warps. A thread sums the differences of
// its values to the first of them, and their squares; what is then added up are differences between
// the means of threads and of warps, so that a large mean costs no digits.
#pragma once

#include "common/norm/fwd_cuda.h"

namespace apex_te {

constexpr int kStreamThreads = 256;  // of a row at most
constexpr int kStreamBlocks = 3;     // of these on a multiprocessor
constexpr int kStreamStages = 2;     // rows of a thread in shared memory
constexpr int64_t kManyRows = 512;   // fewer do not repay the filling of shared memory
template <typename T>
constexpr int kStreamVecs = 8 / sizeof(T);  // of a thread in a row

// 1 / sqrt(v) to about half a unit in the last place, without a division.
__device__ __forceinline__ float refined_rsqrt(float v) {
  const float y = rsqrtf(v);
  const float refined = fmaf(0.5f * y, fmaf(-v * y, y, 1.0f), y);
  return refined == refined ? refined : y;  // of 0 and infinity
}

// Numbers of values behind the statistics of a thread and of its warp; constants if kFull.
template <typename T>
struct StreamCounts {
  static constexpr float kAll = kStreamVecs<T> * kVec;  // of a thread at most
  float own = kAll, own_inverse = 1.0f / kAll;
  float warp_inverse = 1.0f / (32 * kAll);
};

// Counts of a row of any length; each warp leaves its own in `warps`. width: threads of a row in
// a warp.
template <typename T>
__device__ __forceinline__ StreamCounts<T> count_values(ThreadColumns cols, int width,
                                                        float* warps) {
  float own = 0.0f;
#pragma unroll
  for (int k = 0; k < kStreamVecs<T>; ++k)
    if (cols.has(k)) own += static_cast<float>(kVec);
  float all = own;
  for (int offset = width / 2; offset; offset /= 2)
    all += __shfl_xor_sync(0xFFFFFFFFu, all, offset);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = all;
  StreamCounts<T> counts;
  counts.own = own;
  counts.own_inverse = own > 0.0f ? 1.0f / own : 0.0f;
  counts.warp_inverse = all > 0.0f ? 1.0f / all : 0.0f;
  return counts;
}

// Statistics of a row's columns in a warp, by the differences to the first value of each thread.
template <bool kLayerNorm, bool kFull, typename T, int kVecs>
__device__ __forceinline__ Statistics stream_warp_statistics(const Vec8<T> (&in)[kVecs],
                                                             ThreadColumns cols, int width,
                                                             const StreamCounts<T>& counts) {
  float sum = 0.0f, squares = 0.0f, first = 0.0f;
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    if (!kFull && !cols.has(k)) break;
    float values[kVec];
    unpack(in[k], values);
    if (kLayerNorm && k == 0) first = values[0];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float off = kLayerNorm ? values[i] - first : values[i];
      squares = fmaf(off, off, squares);
      if (kLayerNorm) sum += off;
    }
  }
  float mean = 0.0f, first0 = 0.0f, off0 = 0.0f;
  if (kLayerNorm) {
    const float off = sum * counts.own_inverse;
    squares = fmaf(-sum, off, squares);
    first0 = __shfl_sync(0xFFFFFFFFu, first, 0, width);
    off0 = __shfl_sync(0xFFFFFFFFu, off, 0, width);
    const float apart = (first - first0) + (off - off0);
    sum = counts.own * apart;
    squares = fmaf(sum, apart, squares);
  }
#pragma unroll
  for (int offset = 16; offset; offset /= 2) {
    if (offset >= width) continue;
    if (kLayerNorm) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    squares += __shfl_xor_sync(0xFFFFFFFFu, squares, offset);
  }
  if (kLayerNorm) {
    const float off = sum * counts.warp_inverse;
    mean = first0 + (off0 + off);
    squares = fmaf(-sum, off, squares);
  }
  return {mean, squares};
}

// Statistics of a row from those of its warps. warp_counts: values of each warp, unless kFull.
template <typename T, bool kLayerNorm, bool kFull>
__device__ __forceinline__ Statistics combine_warps(const float2* warps, const float* warp_counts,
                                                    int num_warps, float inverse) {
  const float some = warps[0].x;
  float mean = 0.0f, sum = 0.0f, squares = 0.0f;
#pragma unroll 4
  for (int w = 0; w < num_warps; ++w) {
    const float apart = warps[w].x - some;
    const float total = apart * (kFull ? 32 * StreamCounts<T>::kAll : warp_counts[w]);
    squares += kLayerNorm ? fmaf(total, apart, warps[w].y) : warps[w].y;
    if (kLayerNorm) sum += total;
  }
  if (kLayerNorm) {
    const float off = sum * inverse;
    mean = some + off;
    squares = fmaf(-sum, off, squares);
  }
  return {mean, squares};
}

// Normalises a thread's vectors: to y, or to rowwise FP8, which raises the amax. kPlain: the usual
// parameters, for which no choice is left within the loop.
template <bool kLayerNorm, bool kFull, bool kPlain, bool kFP8, typename T, int kVecs>
__device__ __forceinline__ void store_stream_row(const NormFwd& p, const Vec8<T> (&in)[kVecs],
                                                 ThreadColumns cols, int64_t begin, float mean,
                                                 float rstd, float scale, float& amax) {
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    const int col = cols.first + k * cols.step;
    if (!kFull && col >= cols.end) break;
    float values[kVec], gamma[kVec], bias[kVec];
    if (kPlain) {
      unpack(load_vec(static_cast<const T*>(p.params.weight) + col), gamma);
      if (kLayerNorm) unpack(load_vec(static_cast<const T*>(p.params.bias) + col), bias);
    } else {
      load_gamma<T>(p.params, col, gamma);
      if (kLayerNorm) load_bias<T>(p.params, col, bias);
    }
    unpack(in[k], values);
    normalize<kLayerNorm>(values, gamma, bias, mean, rstd);
    if (!kFP8) {
      Vec8<T> out;
      pack(values, &out);
      store_vec(static_cast<T*>(p.y) + begin + k * cols.step, out);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) amax = larger_magnitude(amax, values[i]);
      const uint2 codes = encode_as(p.fp8, values, scale);
      if (p.rowwise) *reinterpret_cast<uint2*>(p.rowwise + begin + k * cols.step) = codes;
    }
  }
}

// kFull: rows are `threads` times the values of a thread, and threads are whole warps. A block has
// `turns` times its rows at a time.
template <typename T, bool kLayerNorm, bool kFull>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    norm_stream_kernel(const NormFwd p, const int threads, const int turns) {
  constexpr int kVecs = kStreamVecs<T>, kWords = sizeof(T) / 2;  // of 16 bytes in a vector
  extern __shared__ uint4 stream_memory[];
  __shared__ float2 parts[2][kStreamThreads / 32];  // mean and squares of warps, of two rows
  __shared__ float counts[kStreamThreads / 32];     // of values of a warp
  const int slots = blockDim.x / threads;
  const int slot = threadIdx.x / threads, t = threadIdx.x - slot * threads;
  const int row_warps = threads / 32, first_warp = slot * row_warps;
  const ThreadColumns cols{t * kVec, threads * kVec, static_cast<int>(p.cols)};
  const int width = kFull ? 32 : min(threads, 32);
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * slots * turns;
  const int64_t end = min(p.rows, row0 + static_cast<int64_t>(slots) * turns);
  int64_t coming = row0 + slot;  // the row that is copied next
  const T* source = static_cast<const T*>(p.x) + coming * cols.end + cols.first;
  const auto word = [&](int stage, int k, int w) {
    return stream_memory + ((stage * kVecs + k) * kWords + w) * blockDim.x + threadIdx.x;
  };
  const auto fetch = [&](int stage) {
    if (coming < end) {
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        if (!kFull && !cols.has(k)) break;
#pragma unroll
        for (int w = 0; w < kWords; ++w)
          copy_async16(word(stage, k, w),
                       reinterpret_cast<const uint4*>(source + k * cols.step) + w);
      }
    }
    commit_copies();
    coming += slots;
    source += static_cast<int64_t>(slots) * cols.end;
  };
#pragma unroll
  for (int s = 0; s < kStreamStages; ++s) fetch(s);

  const uint32_t seen = amax_so_far(p.amax);
  const float scale = p.scale ? *p.scale : 1.0f, inverse = 1.0f / static_cast<float>(cols.end);
  StreamCounts<T> values;
  if (!kFull) values = count_values<T>(cols, width, counts);
  const bool plain = p.params.weight && (p.params.bias || !kLayerNorm) &&
                     (!p.params.is_fp32 || sizeof(T) == 4) && p.params.gamma_offset == 0.0f;

  float amax = 0.0f;
  int turn = 0, stage = 0;
  for (int64_t row = row0 + slot; row - slot < end; row += slots, turn ^= 1) {
    wait_copies<kStreamStages - 1>();
    Vec8<T> in[kVecs];
#pragma unroll
    for (int k = 0; k < kVecs; ++k)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint4 q = *word(stage, k, w);
        in[k].words[4 * w] = q.x, in[k].words[4 * w + 1] = q.y;
        in[k].words[4 * w + 2] = q.z, in[k].words[4 * w + 3] = q.w;
      }
    keep_packed(in);
    Statistics s = stream_warp_statistics<kLayerNorm, kFull>(in, cols, width, values);
    fetch(stage);  // what was there has been read: the sums depend on it
    stage = stage == kStreamStages - 1 ? 0 : stage + 1;
    if (threads > 32) {
      if (threadIdx.x % 32 == 0) parts[turn][threadIdx.x / 32] = make_float2(s.mean, s.squares);
      __syncthreads();
      s = combine_warps<T, kLayerNorm, kFull>(parts[turn] + first_warp, counts + first_warp,
                                              row_warps, inverse);
    }
    keep_packed(in);
    s.squares = s.squares < 0.0f ? 0.0f : s.squares;  // a NaN stays
    const float rstd = refined_rsqrt(fmaf(s.squares, inverse, p.eps));
    if (row >= end) continue;
    if (t == 0) {
      if (kLayerNorm) p.mean[row] = s.mean;
      p.rstd[row] = rstd;
    }
    const int64_t begin = row * cols.end + cols.first;
    const auto store = [&](auto is_plain, auto to_fp8) {
      store_stream_row<kLayerNorm, kFull, decltype(is_plain)::value, decltype(to_fp8)::value>(
          p, in, cols, begin, s.mean, rstd, scale, amax);
    };
    const std::true_type yes;
    const std::false_type no;
    if (p.y)
      plain ? store(yes, no) : store(no, no);
    else if (p.scale)
      plain ? store(yes, yes) : store(no, yes);
  }
  wait_copies<0>();
  if (p.scale) finish_fp8(p, magnitude_bits(amax), seen);
}

// Threads of a row, more than kStreamThreads where it is too long.
template <typename T>
int64_t stream_threads(const NormFwd& p) {
  constexpr int64_t kValues = kStreamVecs<T> * kVec;
  return row_threads((p.cols + kValues - 1) / kValues);
}

template <typename T, bool kLayerNorm>
void launch_norm_stream(const NormFwd& p, const char* op, cudaStream_t stream) {
  const int64_t threads = stream_threads<T>(p);
  const bool full = threads % 32 == 0 && p.cols == threads * kStreamVecs<T> * kVec;
  const auto kernel =
      full ? norm_stream_kernel<T, kLayerNorm, true> : norm_stream_kernel<T, kLayerNorm, false>;
  const int64_t slots = threads < kNormThreads ? kNormThreads / threads : 1;
  const int64_t bytes = kStreamStages * kStreamVecs<T> * kVec * sizeof(T) * threads * slots;
  const int64_t turns = p.rows < kManyRows ? 1 : p.y ? 2 : 4, rows_each = slots * turns;
  const int64_t blocks = (p.rows + rows_each - 1) / rows_each;
  check_grid(blocks, op);
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads * slots),
           static_cast<size_t>(bytes), stream>>>(p, static_cast<int>(threads),
                                                 static_cast<int>(turns));
  check_cuda(cudaGetLastError(), op);
}

}  // namespace apex_te
