// Ring of shared memory through which one warp of a block hands the others tiles of both operands,
// and the order in which clusters of two blocks take tiles of the result.
#pragma once

#include "common/gpu/cluster.h"
#include "common/gpu/tensor_copy.h"
#include "dense_gemm/dense_gemm.h"

namespace apex_te {

constexpr int kTileM = 128, kTileK = 128;
constexpr int kConsumers = 256, kThreads = kConsumers + 128;
constexpr int kWarpRows = 16;  // of a tile, to each warp of the consumers
constexpr size_t kSharedLimit = 227 * 1024;

// How a tile of kTileM x kColumns is made. kInterval: stages of kTileK products whose sums are made
// in the matrix units before they are added up; 0: all. kStaggered: the second warpgroup adds up in
// the middle of the first one's intervals. kGated: the first half of a tile's columns are gates,
// the second half the ups of the same outputs.
template <int kColumns_, int kStages_, int kInterval_, bool kStaggered_ = false,
          bool kGated_ = false>
struct Variant {
  static constexpr int kColumns = kColumns_, kStages = kStages_, kInterval = kInterval_;
  static constexpr bool kStaggered = kStaggered_;
  static constexpr bool kGated = kGated_;
  static constexpr uint32_t kBytesA = kTileM * kTileK, kBytesB = kColumns * kTileK;
  static constexpr uint32_t kStageBytes = kBytesA + kBytesB;
  // The result leaves through shared memory of each warp, kStaged columns at a time in boxes of
  // kBox columns: as many as there is room for.
  static constexpr size_t kRoom =
      (kSharedLimit - 512 - static_cast<size_t>(kStages) * kStageBytes) / (kConsumers / 32);
  static constexpr bool fits(int columns) {
    return columns * kWarpRows * 2 <= static_cast<int>(kRoom);
  }
  static constexpr int kStaged = fits(kColumns) ? kColumns : kColumns / 2;
  static constexpr int kBox = kStaged % 64 == 0 ? 64 : 32;
  static constexpr uint32_t kBoxBytes = kWarpRows * kBox * 2;
  static constexpr uint32_t kStagedBytes = kWarpRows * kStaged * 2;
  static_assert(fits(kStaged) && kStaged % kBox == 0, "room for the result");
};

template <int kStages>
struct Control {
  uint64_t full[kStages], empty[kStages];
};

template <typename V>
constexpr size_t kSharedBytes =
    V::kStages * V::kStageBytes + kConsumers / 32 * V::kStagedBytes + sizeof(Control<V::kStages>);

// The two blocks of a cluster take tiles that lie one below the other and share their part of b; of
// a last row of tiles without a pair they take tiles side by side, which share their part of a.
struct Order {
  int m_tiles, n_tiles, strip, turns;
};

inline int64_t tiles_of(int64_t extent, int64_t tile) { return (extent + tile - 1) / tile; }

// Turns of all clusters together.
inline int64_t turns_of(const DenseGemm& g, int columns) {
  const int64_t m_tiles = tiles_of(g.m, kTileM), n_tiles = tiles_of(g.n, columns);
  return m_tiles / 2 * n_tiles + m_tiles % 2 * ((n_tiles + 1) / 2);
}

// out, added: what the epilogue stores, and what it reads or adds. act: FP8 data of a gated
// activation.
struct alignas(128) Params {
  CUtensorMap a, b, out, added, act;
  DenseGemm g;
  Gated gated;
  Order order;
  uint64_t keep_a, keep_b, keep_out, keep_hidden;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Tile {
  int row, column;  // the first of the result
  bool shares_b;
};

// The tile of this block in the cluster's turn: strips of `strip` tiles, in each row by row.
__device__ __forceinline__ Tile tile_of(const Order& order, int turn, int rank, int columns) {
  const int both = order.m_tiles / 2, paired = both * order.n_tiles;
  if (turn >= paired)
    return {(order.m_tiles - 1) * kTileM, ((turn - paired) * 2 + rank) * columns, false};
  const int strip = turn / (both * order.strip);
  const int width = min(order.strip, order.n_tiles - strip * order.strip);
  const int within = turn - strip * order.strip * both;
  return {(within / width * 2 + rank) * kTileM, (strip * order.strip + within % width) * columns,
          true};
}

template <typename V>
struct Ring {
  uint32_t stages;
  Control<V::kStages>* control;
  __device__ __forceinline__ uint32_t a(int stage) const { return stages + stage * V::kStageBytes; }
  // By a whole warp that has done with a stage; both blocks may have copied into it.
  __device__ __forceinline__ void release(int stage) const {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < 2) arrive_at(shared_address(&control->empty[stage]), lane);
  }
  __device__ __forceinline__ void start() const {
    for (int i = 0; i < V::kStages; ++i) {
      barrier_init(&control->full[i], 1);
      barrier_init(&control->empty[i], 2 * kConsumers / 32);  // the warps of both blocks
    }
  }
};

__device__ __forceinline__ int stages_of(const DenseGemm& g) {
  return static_cast<int>((g.k + kTileK - 1) / kTileK);
}

// The stages of one tile, by one thread. What the epilogue reads is prefetched into the L2 cache
// towards the end.
template <typename V, typename Epilogue>
__device__ __forceinline__ void copy_tile(const Params& p, const Ring<V>& ring, const Tile& tile,
                                          int rank, int blocks, Place<V::kStages>* place) {
  const int prefetch_at = blocks - min(blocks, 8);
  for (int i = 0; i < blocks; ++i, place->next()) {
    const int column = i * kTileK;
    barrier_wait(&ring.control->empty[place->at], place->phase ^ 1);
    barrier_expect(&ring.control->full[place->at], V::kStageBytes);
    const uint32_t full = shared_address(&ring.control->full[place->at]);
    const uint32_t a = ring.a(place->at), b = a + V::kBytesA;
    if (tile.shares_b) {
      copy_box(a, p.a, column, tile.row, full, p.keep_a);
      copy_box(a + V::kBytesA / 2, p.a, column, tile.row + kTileM / 2, full, p.keep_a);
      const uint32_t to = b + rank * (V::kBytesB / 2);
      if constexpr (V::kGated)
        copy_box_of_to_both(to, p.b, column, tile.column / 2, rank, full, p.keep_b);
      else
        copy_box_to_both(to, p.b, column, tile.column + rank * (V::kColumns / 2), full, p.keep_b);
    } else {
      const int half = rank * kTileM / 2;
      copy_box_to_both(a + half * kTileK, p.a, column, tile.row + half, full);
      if constexpr (V::kGated) {
        copy_box_of(b, p.b, column, tile.column / 2, 0, full);
        copy_box_of(b + V::kBytesB / 2, p.b, column, tile.column / 2, 1, full);
      } else {
        copy_box(b, p.b, column, tile.column, full);
        copy_box(b + V::kBytesB / 2, p.b, column, tile.column + V::kColumns / 2, full);
      }
    }
    if (i == prefetch_at) Epilogue::prefetch(p, tile);
  }
}

// By one thread: the stages of all tiles of the block.
template <typename V, typename Epilogue>
__device__ __forceinline__ void copy_tiles(const Params& p, const Ring<V>& ring) {
  const int rank = static_cast<int>(cluster_rank());
  const int turns = p.order.turns, blocks = stages_of(p.g);
  Place<V::kStages> place;
  for (int turn = static_cast<int>(blockIdx.x / 2); turn < turns;
       turn += static_cast<int>(gridDim.x / 2))
    copy_tile<V, Epilogue>(p, ring, tile_of(p.order, turn, rank, V::kColumns), rank, blocks,
                           &place);
}

#endif

}  // namespace apex_te
