// The kernel of cross_entropy for rows that fill most of a multiprocessor's shared memory.
#pragma once

#include "common/gpu/async_copy.h"
#include "common/gpu/cluster.h"
#include "cross_entropy/cross_entropy_row.h"

namespace apex_te {
namespace {

// Persistent blocks. A producer warp streams a block's rows through a ring of
// chunks in shared memory, kRingThreads consumers take them in the same order: every chunk once for
// the statistics, then, for the gradient, the last `kept` ones, still there, and the others again,
// read from L2. While one row's gradient is written, the next row is on its way. The blocks of a
// cluster share a row, so that less of it is read again and the last round of rows is shorter.
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

constexpr int kMaxSplit = 8;           // blocks of a row
constexpr int kPartBytes = 160 << 10;  // a longer row has more blocks
constexpr int kLongestPartBytes = 400 << 10;

struct RingShared {
  uint64_t full[kMaxSlots], empty[kMaxSlots];
  Stats stats[2][kRingWarps];
  uint64_t exchange[2];  // count what the blocks of a cluster send
  float2 parts[2][kMaxSplit], sums[2][kMaxSplit];
};

// A block's part of a row, whole cache lines: its vectors, in chunks, and how many of these are
// read again. The first part has the columns outside the vectors, too.
template <typename T>
struct RowPart {
  int first, vecs, count, again;
  __device__ RowPart(const Row<T>& row, bool with_grad, const Ring& ring) {
    constexpr int kLine = 128 / kVec / sizeof(T);
    const int size = static_cast<int>(cluster_size()), rank = static_cast<int>(cluster_rank());
    const int each = ((row.num_vecs + size - 1) / size + kLine - 1) / kLine * kLine;
    first = min(rank * each, row.num_vecs);
    vecs = min(each, row.num_vecs - first);
    count = (vecs + Chunk<T>::kVecs - 1) / Chunk<T>::kVecs;
    again = with_grad && count > ring.kept ? count - ring.kept : 0;
  }
  // Exactly one part of a row owns a target, or what stands for one outside the row.
  __device__ bool owns(const Row<T>& row, int64_t target) const {
    const int64_t begin = row.col(first);
    return target >= begin && target < begin + vecs * kVec ||
           cluster_rank() == 0 && (target < row.head || target >= row.col(row.num_vecs));
  }
};

template <typename T>
__device__ __forceinline__ void produce(const Params& p, const Ring& ring, unsigned char* chunks,
                                        RingShared& shared) {
  RingPlace place;
  TargetStream targets(p, blockIdx.x / cluster_size());
  bool wrapped = false;
  const int64_t step = gridDim.x / cluster_size();
  for (int64_t r = blockIdx.x / cluster_size(); r < p.rows; r += step) {
    if (targets.take(p, r + step) == p.target.ignore_index) continue;
    const Row<T> row(p.logits, r, p.cols);
    const RowPart<T> part(row, p.grad, ring);
    for (int i = 0; i < part.count + part.again; ++i) {
      const int begin = (i < part.count ? i : i - part.count) * Chunk<T>::kVecs;
      const int vecs = min(Chunk<T>::kVecs, part.vecs - begin);
      if (wrapped) barrier_wait(&shared.empty[place.slot], place.parity ^ 1);
      copy_chunk(chunks + place.slot * kChunkBytes, row.data + row.col(part.first + begin),
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

// Merges the parts of a cluster's blocks, each of which sends its own to all; in every consumer. A
// block waits for every part that is sent to it, so it ends only when no other writes to it.
__device__ __forceinline__ Stats merge_parts(const Stats& part, bool with_sum, unsigned turn,
                                             RingShared& shared) {
  const unsigned which = turn % 2, size = cluster_size();
  uint64_t* const exchange = &shared.exchange[which];
  if (threadIdx.x == 0) barrier_expect(exchange, size * (with_sum ? 16 : 8));
  if (threadIdx.x < size) {
    const uint32_t rank = cluster_rank();
    store_remote_async(&shared.parts[which][rank], exchange, threadIdx.x, part.max, part.exp_sum);
    if (with_sum)
      store_remote_async(&shared.sums[which][rank], exchange, threadIdx.x, part.sum, 0.0f);
  }
  barrier_wait(exchange, turn / 2 % 2);
  Stats total{-FLT_MAX, 0.0f, 0.0f};
  for (unsigned k = 0; k < size; ++k) total.max = fmaxf(total.max, shared.parts[which][k].x);
  for (unsigned k = 0; k < size; ++k) {
    Stats other{shared.parts[which][k].x, shared.parts[which][k].y, 0.0f};
    other.raise(total.max);
    total.exp_sum += other.exp_sum;
    if (with_sum) total.sum += shared.sums[which][k].x;
  }
  return total;
}

template <typename T>
__device__ __forceinline__ void consume(const Params& p, const Ring& ring, unsigned char* chunks,
                                        RingShared& shared) {
  constexpr int kSteps = Chunk<T>::kSteps;
  const bool with_sum = p.label_smoothing != 0.0f;
  const float factor = grad_factor(num_valid_of(p));
  RingPlace place;
  TargetStream targets(p, blockIdx.x / cluster_size());
  unsigned turn = 0;
  const int64_t step = gridDim.x / cluster_size();
  for (int64_t r = blockIdx.x / cluster_size(); r < p.rows; r += step) {
    const int64_t target = targets.take(p, r + step);
    if (target == p.target.ignore_index) {
      clear_row<T>(p, r, kRingThreads, cluster_rank(), cluster_size());
      continue;
    }
    const Row<T> row(p.logits, r, p.cols);
    const RowPart<T> part(row, p.grad, ring);
    const int edge = cluster_rank() == 0 ? row.edge_col() : -1;
    const float edge_logit = edge >= 0 ? row.at(edge) : -INFINITY;
    const bool is_owner = threadIdx.x == 0 && part.owns(row, target);
    const float target_logit = is_owner ? target_logit_of(row, target) : 0.0f;
    Stats stats{-FLT_MAX, 0.0f, 0.0f};
    RingPlace kept = place;
    for (int c = 0; c < part.count; ++c) {
      const T* chunk = reinterpret_cast<const T*>(chunks + place.slot * kChunkBytes);
      const int vecs = part.vecs - c * Chunk<T>::kVecs;
      barrier_wait(&shared.full[place.slot], place.parity);
      Vec8<T> in[kSteps];
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        in[k] = load_or_neutral(chunk, static_cast<int>(threadIdx.x) + k * kRingThreads, vecs);
      if (!p.grad || c < part.again) release_chunk(&shared.empty[place.slot]);
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
      if (c < part.again) kept = place;
    }
    if (edge >= 0) {
      stats.raise(fmaxf(stats.max, edge_logit));
      stats.exp_sum += fast_exp(edge_logit - stats.max);
      stats.sum += edge_logit;
    }
    stats = merge(stats, shared.stats[turn % 2]);
    if (cluster_size() > 1) stats = merge_parts(stats, with_sum, turn, shared);
    ++turn;
    const RowGrad g = finish_row(p, r, target, target_logit, stats, factor, is_owner);
    if (!p.grad) continue;
    T* grad = static_cast<T*>(p.grad) + r * p.cols;
    place = kept;
    for (int i = 0, c = part.again; i < part.count; ++i, ++c) {
      if (c == part.count) c = 0;
      const T* chunk = reinterpret_cast<const T*>(chunks + place.slot * kChunkBytes);
      const int begin = c * Chunk<T>::kVecs;
      barrier_wait(&shared.full[place.slot], place.parity);
      Vec8<T> in[kSteps];
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        in[k] = load_or_neutral(chunk, static_cast<int>(threadIdx.x) + k * kRingThreads,
                                part.vecs - begin);
      release_chunk(&shared.empty[place.slot]);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int v = begin + static_cast<int>(threadIdx.x) + k * kRingThreads;
        if (v < part.vecs) store_grad<T, true>(grad, row.col(part.first + v), in[k], g);
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
  if (threadIdx.x < 2) barrier_init(&shared.exchange[threadIdx.x], 1);
  __syncthreads();
  if (cluster_size() > 1) cluster_sync();  // every block of the cluster has begun
  if (threadIdx.x >= kRingThreads)
    produce<T>(p, ring, chunks, shared);
  else
    consume<T>(p, ring, chunks, shared);
}

// Blocks of a cluster for rows of `bytes` that are read twice. The kernel as it is on this device
// may not support clusters.
inline int ring_split(const void* kernel, int64_t bytes) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  int split = 1;
  while (attributes.ptxVersion >= 90 && split < kMaxSplit && bytes > split * int64_t{kPartBytes})
    split *= 2;
  return split;
}

// One block a multiprocessor, with all the shared memory that it may have. False where a block's
// part of a row is too long for that: too little of it would stay in shared memory.
template <typename T>
bool launch_ring(const Params& p, cudaStream_t stream) {
#if defined(__HIP_PLATFORM_AMD__)
  return false;  // kHasCountedBarriers
#else
  const auto kernel = cross_entropy_fwd_ring_kernel<T>;
  const auto* address = reinterpret_cast<const void*>(kernel);
  const int64_t row_bytes = p.cols * static_cast<int64_t>(sizeof(T));
  int split = p.grad ? ring_split(address, row_bytes) : 1;
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int slots = (most - static_cast<int>(sizeof(RingShared))) / kChunkBytes;
  const Ring ring{min(kMaxSlots, slots), min(kMaxSlots, slots) - 1};
  const int bytes = ring.slots * kChunkBytes, threads = kRingThreads + 32;
  allow_shared(address);
  int64_t at_once = clusters_at_once(address, threads, split, bytes);
  while (at_once == 0 && split > 1) {
    split /= 2;
    at_once = clusters_at_once(address, threads, split, bytes);
  }
  if (p.grad && row_bytes > split * int64_t{kLongestPartBytes}) return false;
  launch_cluster(kernel, min(p.rows, at_once) * split, threads, split, bytes, stream, p, ring);
  return true;
#endif
}

}  // namespace
}  // namespace apex_te
