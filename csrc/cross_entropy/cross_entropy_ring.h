// The kernel of cross_entropy for rows that fill most of a multiprocessor's shared memory.
#pragma once

#include "common/async_copy.h"
#include "cross_entropy/cross_entropy_row.h"

namespace apex_te {
namespace {

// Persistent blocks. A producer warp streams a block's rows through a ring of
// chunks in shared memory, kRingThreads consumers take them in the same order: every chunk once for
// the statistics, then, for the gradient, the last `kept` ones, still there, and the others again,
// read from L2. While one row's gradient is written, the next row is on its way.
struct Ring {
  int slots, kept;  // chunks; kept < slots, so that copies stay in flight between the passes
};

// A place in the order of fills: fills, uses and releases of chunks all follow it.
struct RingPlace {
  int slot = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void step(const Ring& ring) {
    if (++slot < ring.slots) return;
    slot = 0;
    parity ^= 1;
  }
};

constexpr int kRingThreads = 512, kRingWarps = kRingThreads / 32;  // consumers
constexpr int kChunkBytes = 32 << 10, kMaxSlots = 8;

template <typename T>
struct Chunk {
  static constexpr int kVecs = kChunkBytes / kVec / sizeof(T), kSteps = kVecs / kRingThreads;
};

struct RingShared {
  uint64_t full[kMaxSlots], empty[kMaxSlots];
  Stats stats[2][kRingWarps];
};

// Chunks of one row and how many of them are read again.
template <typename T>
struct RowChunks {
  int count, again;
  __device__ RowChunks(int num_vecs, bool with_grad, const Ring& ring)
      : count((num_vecs + Chunk<T>::kVecs - 1) / Chunk<T>::kVecs),
        again(with_grad && count > ring.kept ? count - ring.kept : 0) {}
};

template <typename T>
__device__ __forceinline__ void produce(const Params& p, const Ring& ring, unsigned char* chunks,
                                        RingShared& shared) {
  RingPlace place;
  TargetStream targets(p, blockIdx.x);
  bool wrapped = false;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    if (targets.take(p, r + gridDim.x) == p.target.ignore_index) continue;
    const Row<T> row(p.logits, r, p.cols);
    const RowChunks<T> parts(row.num_vecs, p.grad, ring);
    for (int i = 0; i < parts.count + parts.again; ++i) {
      const int begin = (i < parts.count ? i : i - parts.count) * Chunk<T>::kVecs;
      const int vecs = min(Chunk<T>::kVecs, row.num_vecs - begin);
      if (wrapped) barrier_wait(&shared.empty[place.slot], place.parity ^ 1);
      copy_chunk(chunks + place.slot * kChunkBytes, row.data + row.col(begin),
                 vecs * kVec * sizeof(T), &shared.full[place.slot]);
      place.step(ring);
      wrapped |= place.slot == 0;
    }
  }
}

// Merges the consumers' statistics in a fixed order; in every consumer.
__device__ __forceinline__ Stats merge(Stats stats, Stats* warps) {
  const float max = warp_fmax(stats.max);
  stats.raise(max);
  stats.exp_sum = warp_sum(stats.exp_sum);
  stats.sum = warp_sum(stats.sum);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = stats;
  asm volatile("bar.sync 1, %0;" ::"n"(kRingWarps * 32) : "memory");
  Stats total{-FLT_MAX, 0.0f, 0.0f};
#pragma unroll
  for (int w = 0; w < kRingWarps; ++w) total.max = fmaxf(total.max, warps[w].max);
#pragma unroll
  for (int w = 0; w < kRingWarps; ++w) {
    Stats part = warps[w];
    part.raise(total.max);
    total.exp_sum += part.exp_sum;
    total.sum += part.sum;
  }
  return total;
}

template <typename T>
__device__ __forceinline__ void consume(const Params& p, const Ring& ring, unsigned char* chunks,
                                        RingShared& shared) {
  constexpr int kSteps = Chunk<T>::kSteps;
  const bool with_sum = p.label_smoothing != 0.0f;
  const float factor = grad_factor(p);
  RingPlace place;
  TargetStream targets(p, blockIdx.x);
  unsigned turn = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const int64_t target = targets.take(p, r + gridDim.x);
    if (target == p.target.ignore_index) {
      clear_row<T>(p, r, kRingThreads);
      continue;
    }
    const Row<T> row(p.logits, r, p.cols);
    const RowChunks<T> parts(row.num_vecs, p.grad, ring);
    const int edge = row.edge_col();
    const float edge_logit = edge >= 0 ? row.at(edge) : -INFINITY;
    const float target_logit = threadIdx.x == 0 ? target_logit_of(row, target) : 0.0f;
    Stats stats{-FLT_MAX, 0.0f, 0.0f};
    RingPlace kept = place;
    for (int c = 0; c < parts.count; ++c) {
      const T* chunk = reinterpret_cast<const T*>(chunks + place.slot * kChunkBytes);
      const int vecs = row.num_vecs - c * Chunk<T>::kVecs;
      barrier_wait(&shared.full[place.slot], place.parity);
      Vec8<T> in[kSteps];
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        in[k] = load_or_neutral(chunk, static_cast<int>(threadIdx.x) + k * kRingThreads, vecs);
      if (!p.grad || c < parts.again) release_chunk(&shared.empty[place.slot]);
      float max = stats.max;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) max = fmaxf(max, max_of(in[k]));
      if (max > stats.max) stats.raise(max);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        add_exps(in[k], stats);
        if (with_sum && static_cast<int>(threadIdx.x) + k * kRingThreads < vecs)
          stats.sum += sum_of(in[k]);
      }
      place.step(ring);
      if (c < parts.again) kept = place;
    }
    if (edge >= 0) {
      stats.raise(fmaxf(stats.max, edge_logit));
      stats.exp_sum += fast_exp(edge_logit - stats.max);
      stats.sum += edge_logit;
    }
    const Stats total = merge(stats, shared.stats[turn++ % 2]);
    const RowGrad g = finish_row(p, r, target, target_logit, total, factor);
    if (!p.grad) continue;
    T* grad = static_cast<T*>(p.grad) + r * p.cols;
    place = kept;
    for (int i = 0, c = parts.again; i < parts.count; ++i, ++c) {
      if (c == parts.count) c = 0;
      const T* chunk = reinterpret_cast<const T*>(chunks + place.slot * kChunkBytes);
      const int begin = c * Chunk<T>::kVecs;
      barrier_wait(&shared.full[place.slot], place.parity);
      Vec8<T> in[kSteps];
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        in[k] = load_or_neutral(chunk, static_cast<int>(threadIdx.x) + k * kRingThreads,
                                row.num_vecs - begin);
      release_chunk(&shared.empty[place.slot]);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int v = begin + static_cast<int>(threadIdx.x) + k * kRingThreads;
        if (v < row.num_vecs) store_grad<T, true>(grad, row.col(v), in[k], g);
      }
      place.step(ring);
    }
    if (edge >= 0) store_edge_grad(grad, edge, edge_logit, g);
  }
}

template <typename T>
__global__ void __launch_bounds__(kRingThreads + 32)
    cross_entropy_fwd_ring_kernel(const Params p, const Ring ring) {
  extern __shared__ __align__(16) unsigned char chunks[];
  __shared__ RingShared shared;
  if (threadIdx.x < static_cast<unsigned>(ring.slots)) {
    barrier_init(&shared.full[threadIdx.x], kCopyArrivals);
    barrier_init(&shared.empty[threadIdx.x], kRingThreads);
  }
  __syncthreads();
  if (threadIdx.x >= kRingThreads)
    produce<T>(p, ring, chunks, shared);
  else
    consume<T>(p, ring, chunks, shared);
}

// One block a multiprocessor, with all the shared memory that it may have.
template <typename T>
void launch_ring(const Params& p, cudaStream_t stream) {
  const auto kernel = cross_entropy_fwd_ring_kernel<T>;
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int slots = (most - static_cast<int>(sizeof(RingShared))) / kChunkBytes;
  const Ring ring{min(kMaxSlots, slots), min(kMaxSlots, slots) - 1};
  const int bytes = ring.slots * kChunkBytes;
  check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "cudaFuncSetAttribute");
  const int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount);
  kernel<<<static_cast<unsigned>(min(p.rows, processors)), kRingThreads + 32, bytes, stream>>>(
      p, ring);
}

}  // namespace
}  // namespace apex_te
