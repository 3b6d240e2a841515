// The row map on the device: tiles of tokens are counted, then each tile adds up the counts before
// it and numbers its copies in the order of tokens. Integers only, so the order is always the same.
#pragma once

#include "common/gpu/ballot.h"
#include "common/gpu/dependent_launch.h"
#include "moe_permute/moe_permute.h"

namespace apex_te {
namespace {

constexpr int kMaxRouteThreads = 512;  // few enough for both kernels and the copies' at once
constexpr int kSumPartials = 33;       // of exclusive_sums
constexpr int kAhead = 8;              // loads in flight of a lane

// Threads of a block: as many as shared memory has room for counts of each warp.
inline int route_threads(int experts) {
  return experts <= 512 ? kMaxRouteThreads : kMaxRouteThreads / 2;
}

// Exclusive sums of `values` in place, by all threads of a block; returns the total. `partials` has
// kSumPartials elements. In unsigned arithmetic, which wraps where sizes make no sense.
template <typename Value>
__device__ __forceinline__ Value exclusive_sums(Value* values, int n, Value* partials) {
  const int threads = blockDim.x, thread = threadIdx.x, each = (n + threads - 1) / threads;
  const int first = min(n, thread * each), last = min(n, first + each);
  const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
  const auto sums_of_lanes = [&](Value sum) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const Value before = __shfl_sync(0xFFFFFFFFu, sum, (lane + 32 - offset) % 32);
      if (lane >= offset) sum += before;
    }
    return sum;
  };
  Value own = 0;
  for (int i = first; i < last; ++i) own += values[i];
  const Value sum = sums_of_lanes(own);
  if (lane == 31) partials[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    const Value all = sums_of_lanes(lane < warps ? partials[lane] : 0);
    __syncwarp();
    partials[1 + lane] = all;  // 33 of them
    if (lane == 0) partials[0] = 0;
  }
  __syncthreads();
  const Value total = partials[warps];
  Value running = partials[warp] + sum - own;
  for (int i = first; i < last; ++i) {
    const Value value = values[i];
    values[i] = running;
    running += value;
  }
  __syncthreads();
  return total;
}

// The tokens of a warp.
struct Run {
  int64_t first, last;
  __device__ Run(const Routing& p) {
    const int64_t warps = blockDim.x / 32, each = (p.tile + warps - 1) / warps;
    first = min(p.map.tokens, blockIdx.x * p.tile + threadIdx.x / 32 * each);
    last = min(min(p.map.tokens, (blockIdx.x + 1) * p.tile), first + each);
  }
};

// Walks a warp's tokens [first, last) in order. `next` [num_experts] holds how many copies each
// expert has had, in shared memory of this warp. place(token, slot, column, number) is called for
// each copy, dropped(token, slot, value) for an index that is no expert, finish(token, n) once.
template <typename Element, typename Place, typename Finish>
__device__ __forceinline__ void walk_mask(const Routing& p, int64_t first, int64_t last,
                                          uint32_t* next, const Place& place,
                                          const Finish& finish) {
  const int lane = threadIdx.x % 32, experts = p.num_experts;
  const int words = (experts + 31) / 32, items = static_cast<int>(last - first) * words;
  // 32-bit arithmetic: it is instructions that take the time
  const Element* ahead = static_cast<const Element*>(p.routes) + first * experts + lane;
  int ahead_expert = lane, word = 0, n = 0;
  int64_t token = first;
  for (int i = 0; i < items; i += kAhead) {
    bool routed[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      routed[k] = i + k < items && ahead_expert < experts && *ahead != 0;
      ahead += 32;
      ahead_expert += 32;
      if (ahead_expert - lane >= experts) {
        ahead += experts - (ahead_expert - lane);
        ahead_expert = lane;
      }
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (i + k >= items) break;
      const uint32_t lanes = warp_ballot(routed[k]);
      const int expert = 32 * word + lane;
      if (routed[k]) {
        const int slot = n + __popc(lanes & ((1u << lane) - 1));
        place(token, slot, expert, next[expert]++);
      }
      n += __popc(lanes);
      if (++word == words) {
        if (lane == 0) finish(token, n);
        word = 0, ++token, n = 0;
      }
    }
  }
}
template <typename Place, typename Finish>
__device__ __forceinline__ void walk_mask(const Routing& p, const Run& run, uint32_t* next,
                                          const Place& place, const Finish& finish) {
  if (p.bytes == 1)
    walk_mask<uint8_t>(p, run.first, run.last, next, place, finish);
  else
    walk_mask<int32_t>(p, run.first, run.last, next, place, finish);
}

template <typename Place, typename Drop>
__device__ __forceinline__ void walk_index(const Routing& p, int64_t first, int64_t last,
                                           uint32_t* next, const Place& place, const Drop& drop) {
  const int lane = threadIdx.x % 32, width = p.map.width;
  const int64_t begin = first * width, end = last * width;
  const int bits = 32 - __clz(p.num_experts);
  for (int64_t start = begin; start < end; start += 32) {
    const int64_t i = start + lane;
    const int32_t expert = i < end ? p.index(i) : kDropped;
    const bool kept = expert >= 0 && expert < p.num_experts;
    uint32_t same = warp_ballot(kept);  // lanes of the same expert
    for (int bit = 0; bit < bits; ++bit) {
      const bool is_set = expert >> bit & 1;
      const uint32_t lanes = warp_ballot(is_set);
      same &= is_set ? lanes : ~lanes;
    }
    const int rank = __popc(same & ((1u << lane) - 1));
    const uint32_t base = kept ? next[expert] : 0;
    __syncwarp();
    if (kept && rank == 0) next[expert] = base + __popc(same);
    __syncwarp();
    if (i >= end) continue;
    if (kept)
      place(i / width, static_cast<int>(i % width), expert, base + rank);
    else
      drop(i / width, static_cast<int>(i % width), expert);
  }
}

// Into next[warp][expert]: how many copies of each warp's tokens each expert gets.
__device__ __forceinline__ void count_tile(const Routing& p, const Run& run, uint32_t* next) {
  const int cells = static_cast<int>(blockDim.x / 32) * p.num_experts;
  for (int i = threadIdx.x; i < cells; i += blockDim.x) next[i] = 0;
  __syncthreads();
  uint32_t* mine = next + threadIdx.x / 32 * p.num_experts;
  if (p.is_index())
    walk_index(
        p, run.first, run.last, mine, [](int64_t, int, int, uint32_t) {},
        [](int64_t, int, int32_t) {});
  else
    walk_mask(p, run, mine, [](int64_t, int, int, uint32_t) {}, [](int64_t, int) {});
  __syncthreads();
}

// Tokens of an expert over all warps.
__device__ __forceinline__ uint32_t count_of(const Routing& p, const uint32_t* next, int expert) {
  const int cells = static_cast<int>(blockDim.x / 32) * p.num_experts;
  uint32_t sum = 0;
  for (int i = expert; i < cells; i += p.num_experts) sum += next[i];
  return sum;
}

__global__ void __launch_bounds__(kMaxRouteThreads) moe_count_kernel(const Routing p) {
  extern __shared__ uint32_t next[];  // [warps, num_experts]
  let_next_kernel_start();
  count_tile(p, Run(p), next);
  for (int e = threadIdx.x; e < p.num_experts; e += blockDim.x)
    p.counts[static_cast<int64_t>(blockIdx.x) * p.num_experts + e] =
        static_cast<int32_t>(count_of(p, next, e));
}

__device__ __forceinline__ int32_t rows_that_fit(const Routing& p, uint32_t start, uint32_t rows) {
  return start >= p.num_rows ? 0 : static_cast<int32_t>(min(p.num_rows - start, int64_t(rows)));
}

// Sums over the experts before one: of their rows with padding below, of their copies above.
__device__ __forceinline__ uint32_t start_of(uint64_t sums) { return static_cast<uint32_t>(sums); }
__device__ __forceinline__ uint32_t padding_of(uint64_t sums) {
  return start_of(sums) - static_cast<uint32_t>(sums >> 32);
}

// The map's last two rows, from these sums and how many copies each expert gets.
__device__ __forceinline__ void write_summary(const Routing& p, const uint64_t* sums,
                                              const uint32_t* counts, uint32_t total) {
  const int width = p.map.width;
  const uint32_t align = p.align;
  if (threadIdx.x == 0) {
    *p.map.in_use() = static_cast<int32_t>(min(p.num_rows, int64_t(total)));
    *p.map.starts() = p.is_index() ? 0 : p.num_experts;
  }
  for (int e = threadIdx.x; e < p.num_experts; e += blockDim.x) {
    const uint32_t start = start_of(sums[e]);
    const int32_t rows = rows_that_fit(p, start, counts[e]);
    if (p.tokens_per_expert) p.tokens_per_expert[e] = rows;
    if (p.is_index()) continue;
    p.map.in_use()[1 + e] = rows;
    p.map.in_use()[1 + width + e] =
        rows_that_fit(p, start, (counts[e] + align - 1) / align * align);
    p.map.starts()[1 + e] = static_cast<int32_t>(min(p.num_rows, int64_t(start)));
    p.map.starts()[1 + width + e] = static_cast<int32_t>(padding_of(sums[e]));
  }
}

__global__ void __launch_bounds__(kMaxRouteThreads) moe_assign_kernel(const Routing p) {
  extern __shared__ uint32_t next[];  // [warps, num_experts]
  const int experts = p.num_experts;
  const int warps = blockDim.x / 32;
  uint32_t* before = next + warps * experts;  // [num_experts]: copies of earlier tiles
  uint32_t* counts = before + experts;        // of all tiles
  uint64_t* sums = reinterpret_cast<uint64_t*>(counts + experts);  // behind an even number of words
  uint64_t* partials = sums + experts;
  const Run run(p);
  for (int e = threadIdx.x; e < 2 * experts; e += blockDim.x) before[e] = 0;
  let_next_kernel_start();
  count_tile(p, run, next);  // and its barriers
  wait_for_previous_kernel();
  if (p.tiles > 1) {
    // Threads side by side read experts side by side; more of them share an expert's tiles.
    const int threads = blockDim.x, columns = min(threads, (experts + 31) / 32 * 32);
    const int share = threadIdx.x / columns, shares = threads / columns;
    for (int e = threadIdx.x % columns; share < shares && e < experts; e += columns) {
      uint32_t earlier = 0, all = 0;
#pragma unroll 8
      for (int64_t tile = share; tile < p.tiles; tile += shares) {
        const uint32_t count = p.counts[tile * experts + e];
        all += count;
        earlier += tile < blockIdx.x ? count : 0;
      }
      atomicAdd(before + e, earlier);
      atomicAdd(counts + e, all);
    }
  } else {
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = count_of(p, next, e);
  }
  __syncthreads();
  const uint32_t align = p.align;
  for (int e = threadIdx.x; e < experts; e += blockDim.x)
    sums[e] = (counts[e] + align - 1) / align * align | static_cast<uint64_t>(counts[e]) << 32;
  __syncthreads();
  const uint64_t total = exclusive_sums(sums, experts, partials);
  if (blockIdx.x == 0) write_summary(p, sums, counts, start_of(total));
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    uint32_t row = start_of(sums[e]) + before[e];
    for (int warp = 0; warp < warps; warp += 8) {  // 8 or 16 of them
      uint32_t count[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) count[i] = next[(warp + i) * experts + e];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        next[(warp + i) * experts + e] = row;
        row += count[i];
      }
    }
  }
  __syncthreads();
  uint32_t* mine = next + threadIdx.x / 32 * experts;
  const int width = p.map.width;
  if (p.is_index()) {
    const auto put = [&](int64_t token, int slot, int32_t row) {
      if (slot == 0) *p.map.of(token) = width;
      p.map.put(token, slot, row, slot);
    };
    walk_index(
        p, run.first, run.last, mine,
        [&](int64_t token, int slot, int, uint32_t row) {
          put(token, slot, p.place(static_cast<int32_t>(row)));
        },
        [&](int64_t token, int slot, int32_t index) {
          put(token, slot, index < 0 ? kDropped : kNoExpert);
        });
  } else {
    walk_mask(
        p, run, mine,
        [&](int64_t token, int slot, int expert, uint32_t row) {
          p.map.put(token, slot, p.place(static_cast<int32_t>(row)), expert);
        },
        [&](int64_t token, int n) { *p.map.of(token) = n; });
  }
}

inline void launch_route(const Routing& p, cudaStream_t stream) {
  const int threads = route_threads(p.num_experts);
  const size_t counted = sizeof(uint32_t) * (threads / 32) * p.num_experts;
  const size_t all =
      counted + sizeof(uint32_t) * 4 * p.num_experts + sizeof(uint64_t) * kSumPartials;
  if (all > 48 * 1024)  // more has to be asked for
    allow_shared(reinterpret_cast<const void*>(moe_assign_kernel));
  if (p.tiles <= 1) {  // and without tokens the summary is still to be written
    moe_assign_kernel<<<1, threads, all, stream>>>(p);
  } else {
    moe_count_kernel<<<static_cast<unsigned>(p.tiles), threads, counted, stream>>>(p);
    check_cuda(cudaGetLastError(), "moe_permute");
    launch_dependent_shared(moe_assign_kernel, p.tiles, threads, all, stream, p);
  }
  check_cuda(cudaGetLastError(), "moe_permute");
}

}  // namespace
}  // namespace apex_te
