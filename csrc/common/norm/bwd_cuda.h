// Backward of the norms: dx and the partial weight gradients in one pass over dy and x.
//
// A persistent grid of one block a multiprocessor: `slots` rows at a time, a thread owns the same
// columns of all its rows, whose weight gradients it keeps in registers. Coming rows are on their
// way to shared memory (cp.async; a thread reads only what it copied, so no barrier), and the sums
// of rms_norm's next rows are taken before the current ones are written, so that nothing waits for
// the exchange of sums. Rows longer than a block go to a cluster. The blocks' sums of weight
// gradients meet in a workspace, which a second kernel adds in a fixed order.
//
// Rows that vectors do not fit (any_row_cuda.h) are copied by warps, with the words at the ends of
// a warp's columns, and dx leaves by way of the memory from which dy has been read.
#pragma once

#include "common/gpu/async_copy.h"
#include "common/gpu/dependent_launch.h"
#include "common/norm/any_row_cuda.h"

namespace apex_te {

constexpr int kBwdVecs = 2;  // vectors of a thread in a row
template <bool kLayerNorm>   // whether sums are taken a row ahead: layer_norm lacks the registers
constexpr bool kBwdAhead = !kLayerNorm;
template <bool kLayerNorm>
constexpr int kBwdStages = kBwdAhead<kLayerNorm> ? 3 : 2;  // rows of a slot in shared memory
constexpr int kMaxBwdCluster = 16;
template <typename T, bool kLayerNorm, bool kCluster, bool kAny>  // of a block, as registers allow
constexpr int kBwdThreads = sizeof(T) == 4 || kAny ? 512
                            : !kLayerNorm          ? 1024
                            : kCluster             ? 512
                                                   : 640;

// True if weight gradients are added in sums of kFoldRows rows, and these sums to each other, since
// the rounding of long sums would show. rms_norm's float32 kernel has the registers for it.
template <typename T, bool kLayerNorm>
constexpr bool kBwdFolds = !kLayerNorm && sizeof(T) == 4;
constexpr int kFoldRows = 16;

struct BwdShape {
  int threads;  // of a row in a block
  int slots;    // rows of a block at a time
  int chunks;   // of shared memory: bwd_chunks
};

// A chunk of shared memory has an array's vectors of the rows of all slots: dy and x for each
// stage, d_residual, which is needed later, for two rows. Behind the chunks lie the rows' mean and
// rstd for each stage, copied by the first lane of a row in each warp.
inline int bwd_chunks(int stages, bool has_residual) { return 2 * stages + (has_residual ? 2 : 0); }

// A thread's own rows in shared memory: vector k of a chunk, in 16-byte words that neighbouring
// threads interleave. kAny: the columns that `lanes` threads of a warp have of a row are a run,
// which begins where it does in a word of global memory and is followed by one more word.
template <typename T, bool kAny>
struct BwdRing {
  static constexpr int kWords = sizeof(T) / 2;  // of 16 bytes in a vector
  float4* base;
  int lanes, lane;

  __device__ __forceinline__ float4* word(int chunk, int k, int w) const {
    return base + ((chunk * kBwdVecs + k) * kWords + w) * blockDim.x + threadIdx.x;
  }
  __device__ __forceinline__ float4* run(int chunk, int k) const {
    const int runs = blockDim.x / lanes;
    return base + ((chunk * kBwdVecs + k) * runs + threadIdx.x / lanes) * (lanes * kWords + 1);
  }
  __device__ __forceinline__ float4* end(int chunks) const {
    return kAny ? run(chunks, 0) - threadIdx.x / lanes * (lanes * kWords + 1)
                : word(chunks, 0, 0) - threadIdx.x;
  }
  __device__ __forceinline__ void fetch(int chunk, int k, const T* p) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      copy_async16(word(chunk, k, w), reinterpret_cast<const float4*>(p) + w);
  }
  // The run of n elements at p; begin, end: the memory that may be read.
  __device__ __forceinline__ void fetch_run(int chunk, int k, const T* p, int n, const T* begin,
                                            const T* end) const {
    const int size = n * static_cast<int>(sizeof(T));
    const RunWords words(p, size, begin, end);
    float4* to = run(chunk, k);
    if (!words.inside)
      return copy_end_run(reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(p), size,
                          lane, lanes);
#pragma unroll
    for (int w = 0; w <= kWords; ++w) {
      const int i = w * lanes + lane;
      if (i < words.count && (w < kWords || lane == 0)) copy_async16(to + i, words.base + i * 16);
    }
  }
  __device__ __forceinline__ Vec8<T> raw(int chunk, int k) const {
    Vec8<T> v;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint4 q = *reinterpret_cast<const uint4*>(word(chunk, k, w));
      v.words[4 * w] = q.x, v.words[4 * w + 1] = q.y;
      v.words[4 * w + 2] = q.z, v.words[4 * w + 3] = q.w;
    }
    return v;
  }
  // The first n of the thread's elements of a run that begins `shift` bytes into its first word.
  __device__ __forceinline__ Vec8<T> of_run(int chunk, int k, int shift, int n) const {
    Vec8<T> v;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint4 q = bytes_at(run(chunk, k), (lane * kWords + w) * 16 + shift);
      v.words[4 * w] = q.x, v.words[4 * w + 1] = q.y;
      v.words[4 * w + 2] = q.z, v.words[4 * w + 3] = q.w;
    }
    keep_first(n, &v);
    return v;
  }
};

// A barrier of the threads of a slot: no slot waits for another's reduction.
__device__ __forceinline__ void sync_slot(int slot, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(slot + 1), "r"(threads) : "memory");
}

// Adds the slots' sums of each column in order and writes them to the block's line. Shared memory
// has 4 of each 8 columns in one plane and the other 4 in a second; a single slot needs none.
template <bool kAny>
__device__ __forceinline__ void write_line(const float (*sums)[kVec], const BwdShape& shape,
                                           float4* shared, float* line, int cols) {
  const int plane = shape.threads * kBwdVecs;
  const int slot = threadIdx.x / shape.threads, t = threadIdx.x % shape.threads;
  const auto write = [&](int col, float4 four) {
    if (!kAny) {
      *reinterpret_cast<float4*>(line + col) = four;
      return;
    }
    const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (col + i < cols) line[col + i] = values[i];
  };
  if (shape.slots == 1) {
#pragma unroll
    for (int k = 0; k < kBwdVecs; ++k) {
      const int col = (k * shape.threads + t) * kVec;
      if (col >= cols) break;
      write(col, make_float4(sums[k][0], sums[k][1], sums[k][2], sums[k][3]));
      write(col + 4, make_float4(sums[k][4], sums[k][5], sums[k][6], sums[k][7]));
    }
    return;
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kBwdVecs; ++k)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      shared[(2 * slot + half) * plane + k * shape.threads + t] = make_float4(
          sums[k][4 * half], sums[k][4 * half + 1], sums[k][4 * half + 2], sums[k][4 * half + 3]);
  __syncthreads();
  for (int j = threadIdx.x; j < 2 * plane; j += blockDim.x) {
    const int col = j % plane * kVec + j / plane * 4;
    if (col >= cols) continue;
    double sum[4] = {};  // there may be 128 slots
    for (int s = 0; s < shape.slots; ++s) {
      const float4 part = shared[2 * s * plane + j];
      sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
    }
    write(col, make_float4(static_cast<float>(sum[0]), static_cast<float>(sum[1]),
                           static_cast<float>(sum[2]), static_cast<float>(sum[3])));
  }
}

// Gamma of a block's columns in shared memory: 4 of each 8 columns in one plane, 4 in another.
struct SharedGamma {
  float4* base;
  int plane;

  __device__ __forceinline__ void put(int v, const float* gamma) const {
    base[v] = make_float4(gamma[0], gamma[1], gamma[2], gamma[3]);
    base[v + plane] = make_float4(gamma[4], gamma[5], gamma[6], gamma[7]);
  }
  __device__ __forceinline__ void get(int v, float* gamma) const {
    const float4 low = base[v], high = base[v + plane];
    gamma[0] = low.x, gamma[1] = low.y, gamma[2] = low.z, gamma[3] = low.w;
    gamma[4] = high.x, gamma[5] = high.y, gamma[6] = high.z, gamma[7] = high.w;
  }
};

// Adds the weight gradients of kFoldRows rows to those of the rows before.
__device__ __forceinline__ void fold_rows(float (&rows)[kBwdVecs][kVec],
                                          float (&folded)[kBwdVecs][kVec]) {
#pragma unroll
  for (int k = 0; k < kBwdVecs; ++k)
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      folded[k][i] += rows[k][i];
      rows[k][i] = 0.0f;
    }
}

// dy becomes dx of 8 columns, without the gradient of the residual. kAny: there may be one column,
// whose g is the mean of g.
template <bool kLayerNorm, bool kAny>
__device__ __forceinline__ void input_gradient(float* dy, const float* xhat, const float* gamma,
                                               float mean_gx, float mean_g, float rstd) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float g = kLayerNorm && !kAny ? fmaf(dy[i], gamma[i], -mean_g)
                    : kLayerNorm        ? dy[i] * gamma[i] - mean_g
                                        : dy[i] * gamma[i];
    dy[i] = fmaf(-xhat[i], mean_gx, g) * rstd;
  }
}

template <typename T, bool kLayerNorm, bool kCluster, bool kAny>
__global__ void __launch_bounds__(kBwdThreads<T, kLayerNorm, kCluster, kAny>, 1)
    norm_bwd_kernel(const NormBwd p, const BwdShape shape) {
  extern __shared__ float4 dynamic[];
  constexpr int kSums = kLayerNorm ? 2 : 1;  // over a row: of g * xhat and of g
  constexpr bool kAhead = kBwdAhead<kLayerNorm>;
  constexpr int kStages = kBwdStages<kLayerNorm>;
  static_assert(kAhead || kBwdThreads<T, kLayerNorm, kCluster, kAny> / 64 < 16,
                "a barrier for each slot");
  static_assert(!kAny || !kCluster, "a run lies within a row of one block");
  const RowRanks ranks{kCluster ? static_cast<int>(cluster_size()) : 1,
                       kCluster ? static_cast<int>(cluster_rank()) : 0};
  const int line = blockIdx.x / ranks.count, lines = gridDim.x / ranks.count;
  const int slot = threadIdx.x / shape.threads, t = threadIdx.x - slot * shape.threads;
  // Shared memory: the ring, gamma, sums of two rows and a barrier each, statistics of rows.
  const int warp_threads = min(shape.threads, 32);  // of a row
  const BwdRing<T, kAny> ring{dynamic, warp_threads, t % warp_threads};
  const SharedGamma gammas{ring.end(shape.chunks), shape.threads * kBwdVecs};
  float2* parts = reinterpret_cast<float2*>(gammas.base + 2 * gammas.plane);
  const int parts_size = ranks.count * (blockDim.x / 32);
  uint64_t* exchange = reinterpret_cast<uint64_t*>(parts + 2 * parts_size);
  float2* statistics = reinterpret_cast<float2*>(exchange + 2) + threadIdx.x / warp_threads;
  const int statistics_size = blockDim.x / warp_threads;

  const int step = shape.threads * kVec;
  const int col = ranks.rank * kBwdVecs * step + t * kVec;  // of the first vector
  const int cols = static_cast<int>(p.cols);
  const int64_t stride = static_cast<int64_t>(lines) * shape.slots;  // of this thread's rows
  int64_t row = static_cast<int64_t>(line) * shape.slots + slot;
  const auto fetch = [&](const void* array, int64_t from, int chunk) {
    if (from >= p.rows) return;
    const T* all = static_cast<const T*>(array);
    const T* begin = all + from * p.cols + col;
    if (kAny) {
      const int back = ring.lane * kVec;
#pragma unroll 1
      for (int k = 0; k < kBwdVecs; ++k) {
        const int n = cols - (col + k * step - back);
        if (n > 0)
          ring.fetch_run(chunk, k, begin + k * step - back, min(n, warp_threads * kVec), all,
                         all + p.rows * p.cols);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kBwdVecs; ++k)
        if (col + k * step < cols) ring.fetch(chunk, k, begin + k * step);
    }
  };
  const auto fetch_row = [&](int64_t from, int stage) {
    fetch(p.dy, from, 2 * stage);
    fetch(p.x, from, 2 * stage + 1);
    if (from < p.rows && t % warp_threads == 0) {
      float2* to = statistics + stage * statistics_size;
      if (kLayerNorm) copy_async4(&to->x, p.mean + from);
      copy_async4(&to->y, p.rstd + from);
    }
  };
  if (threadIdx.x == 0 && ranks.count > 1) {
    // A loop and its branch: racecheck takes a predicated init for a write by every thread.
#pragma unroll 1
    for (int i = 0; i < 2; ++i) barrier_init(exchange + i, 1);
  }
  fetch_row(row, 0);
  if (p.d_residual) fetch(p.d_residual, row, 2 * kStages);
  commit_copies();
  if (kAhead) {
    fetch_row(row + stride, 1);
    commit_copies();
  }
  if (kAny) {
    load_any_params<T>(gammas.base, gammas.plane, p.params.weight, p.params.is_fp32,
                       p.params.gamma_offset, 0, gammas.plane * kVec, cols);
  } else if (slot == 0) {
#pragma unroll
    for (int k = 0; k < kBwdVecs; ++k) {
      if (col + k * step >= cols) continue;
      float gamma[kVec];
      load_gamma<T>(p.params, col + k * step, gamma);
      gammas.put(k * shape.threads + t, gamma);
    }
  }
  if (ranks.count > 1)
    cluster_sync();  // every block of the cluster has begun
  else
    __syncthreads();

  float dweight[kBwdVecs][kVec] = {}, dbias[kBwdVecs][kVec] = {};
  constexpr bool kFolds = kBwdFolds<T, kLayerNorm>;
  float folded[kBwdVecs][kVec] = {};
  const float inverse = 1.0f / static_cast<float>(p.cols);
  constexpr bool kHold = !kAhead && !kCluster && sizeof(T) == 2;  // between both passes
  Vec8<T> held_dy[kBwdVecs], held_x[kBwdVecs];
  // Vector k of a row of an array in shared memory.
  const auto raw = [&](const void* array, int64_t from, int chunk, int k) {
    if (!kAny) return ring.raw(chunk, k);
    const int shift = offset_of(static_cast<const T*>(array) + from * p.cols);
    return ring.of_run(chunk, k, shift, cols - (col + k * step));
  };
  const auto read = [&](int64_t from, int stage, int k, float2 s, float* xhat, float* dy,
                        float* gamma) {
    if (kHold) {
      unpack(held_dy[k], dy);
      unpack(held_x[k], xhat);
    } else {
      unpack(raw(p.dy, from, 2 * stage, k), dy);
      unpack(raw(p.x, from, 2 * stage + 1, k), xhat);
    }
    gammas.get(k * shape.threads + t, gamma);
#pragma unroll
    for (int i = 0; i < kVec; ++i) xhat[i] = (kLayerNorm ? xhat[i] - s.x : xhat[i]) * s.y;
  };
  // The sums of a row that this warp has; the weight gradients grow.
  const auto sums_of = [&](int64_t from, int stage, float (&sums)[kSums]) {
    const float2 s = statistics[stage * statistics_size];
    const int live_cols = from < p.rows ? cols : 0;
#pragma unroll
    for (int k = 0; k < kBwdVecs; ++k) {
      if (col + k * step >= live_cols) continue;
      float xhat[kVec], dy[kVec], gamma[kVec];
      if (kHold) {
        held_dy[k] = raw(p.dy, from, 2 * stage, k);
        held_x[k] = raw(p.x, from, 2 * stage + 1, k);
      }
      read(from, stage, k, s, xhat, dy, gamma);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float g = dy[i] * gamma[i];
        sums[0] = fmaf(g, xhat[i], sums[0]);
        if (kLayerNorm) sums[kSums - 1] += g;
        dweight[k][i] = fmaf(dy[i], xhat[i], dweight[k][i]);
        if (kLayerNorm) dbias[k][i] += dy[i];
      }
    }
    warp_sums(sums, shape.threads);
  };
  float sums[kSums] = {};
  // dx of the row from its sums.
  const auto store_row = [&](int stage, int turn) {
    const float2 s = statistics[stage * statistics_size];
    const float mean_gx = sums[0] * inverse, mean_g = kLayerNorm ? sums[kSums - 1] * inverse : 0.0f;
    const int live_cols = row < p.rows ? cols : 0;
#pragma unroll
    for (int k = 0; k < kBwdVecs; ++k) {
      const bool has = col + k * step < live_cols;
      if (!kAny && !has) continue;
      T* to = static_cast<T*>(p.dx) + row * p.cols + col + k * step;
      Vec8<T> out;
      if (has) {
        float xhat[kVec], dy[kVec], gamma[kVec];
        read(row, stage, k, s, xhat, dy, gamma);
        input_gradient<kLayerNorm, kAny>(dy, xhat, gamma, mean_gx, mean_g, s.y);
        if (p.d_residual) {
          unpack(raw(p.d_residual, row, 2 * kStages + turn, k), xhat);
#pragma unroll
          for (int i = 0; i < kVec; ++i) dy[i] += xhat[i];
        }
        pack(dy, &out);
        if (!kAny) store_vec(to, out);
      }
      if (!kAny) continue;
      T* run = reinterpret_cast<T*>(ring.run(2 * stage, k));
      const int back = ring.lane * kVec;
      const int n = min(live_cols - (col + k * step - back), warp_threads * kVec);
      __syncwarp();  // dy of the run has been read
      if (has) store_vec(run + back, out);
      store_words<1>(run, to - back, max(n, 0) * static_cast<int>(sizeof(T)), ring.lane,
                     warp_threads);
    }
  };
  const bool with_parts = needs_parts(shape.threads, ranks);
  int stage = 0, turn = 0, unfolded = 0;
  unsigned exchange_phase = 0;
  if (kAhead) {
    wait_copies<1>();
    __syncwarp();
    sums_of(row, 0, sums);
    if (with_parts) put_sums(sums, ranks, parts, exchange);
  }
  for (; row - slot < p.rows; row += stride) {  // as often in every slot and block of a cluster
    const int next_stage = stage == kStages - 1 ? 0 : stage + 1;
    __syncwarp();  // the statistics of the row before are read
    fetch_row(row + (kStages - 1) * stride, stage == 0 ? kStages - 1 : stage - 1);
    if (p.d_residual) fetch(p.d_residual, row + stride, 2 * kStages + (turn ^ 1));
    commit_copies();
    wait_copies<1>();
    __syncwarp();
    const bool more = kAhead && row - slot + stride < p.rows;
    float next_sums[kSums] = {};
    if (more) sums_of(row + stride, next_stage, next_sums);
    if (!kAhead) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
      sums_of(row, stage, sums);
      if (with_parts) put_sums(sums, ranks, parts + turn * parts_size, exchange + turn);
    }
    if (with_parts) {
      if (kCluster)
        barrier_wait(exchange + turn, exchange_phase);
      else if (kAhead)
        __syncthreads();
      else
        sync_slot(slot, shape.threads);
      take_sums(sums, shape.threads, ranks, parts + turn * parts_size);
      exchange_phase ^= turn;
      if (more) put_sums(next_sums, ranks, parts + (turn ^ 1) * parts_size, exchange + (turn ^ 1));
    }
    if (kHold) keep_packed(held_dy), keep_packed(held_x);
    store_row(stage, turn);
#pragma unroll
    for (int i = 0; i < kSums && kAhead; ++i) sums[i] = next_sums[i];
    stage = next_stage;
    turn ^= 1;
    if (kFolds && ++unfolded == kFoldRows) {
      fold_rows(dweight, folded);
      unfolded = 0;
    }
  }
  if (kFolds) fold_rows(dweight, folded);
  wait_copies<0>();
  let_next_kernel_start();
  const int64_t width = kSums * p.cols;
  const int block_col = ranks.rank * kBwdVecs * step;
  float* to = p.workspace + line * width + block_col;
  if (p.dweight) write_line<kAny>(kFolds ? folded : dweight, shape, dynamic, to, cols - block_col);
  if (kLayerNorm && p.dbias) write_line<kAny>(dbias, shape, dynamic, to + p.cols, cols - block_col);
}

}  // namespace apex_te
