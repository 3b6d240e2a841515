// Ring of shared memory through which the warps of a block hand each other tiles of both operands
// and the tiles' numbers, and the warp that fills the ring.
#pragma once

#include "common/gpu/tensor_copy.h"
#include "grouped_gemm/grouped_gemm_schedule.h"

namespace apex_te {

constexpr int kStages = 4;
constexpr int kPlans = 4;  // tiles of the result that the copying warp may be ahead
constexpr int kConsumers = 256, kThreads = kConsumers + 128;
constexpr uint32_t kBytesA = kTileM * kTileK, kBytesB = kTileN * kTileK;
constexpr uint32_t kStageBytes = kBytesA + kBytesB;
// The result leaves through shared memory of each warp, half of a tile's columns at a time: 16 rows
// in boxes of 64 columns.
constexpr int kBoxRows = 16, kBoxN = 64, kStagedN = 128;
constexpr uint32_t kBoxBytes = kBoxRows * kBoxN * 2, kStagedBytes = kStagedN / kBoxN * kBoxBytes;

struct alignas(128) Params {
  CUtensorMap a, b, out;
  GroupedGemm g;
};

// A tile that the consumers are told of; group -1: there are no more.
struct Plan {
  int group, begin, end, m, n;
};

struct Control {
  uint64_t full[kStages], empty[kStages];
  uint64_t planned[kPlans], read[kPlans];
  Plan plans[kPlans];
};

constexpr size_t kSharedBytes =
    kStages * kStageBytes + kConsumers / 32 * kStagedBytes + sizeof(Control);
static_assert(kSharedBytes <= 227 * 1024, "what a block may have on sm_90");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Ring {
  uint32_t stages;
  Control* control;
  __device__ __forceinline__ uint32_t a(int stage) const { return stages + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t b(int stage) const { return a(stage) + kBytesA; }
  // By a whole warp that has done with a stage; both blocks may have copied into it.
  __device__ __forceinline__ void release(int stage) const {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < 2) arrive_at(shared_address(&control->empty[stage]), lane);
  }
};

__device__ __forceinline__ void start(const Ring& ring) {
  for (int i = 0; i < kStages; ++i) {
    barrier_init(&ring.control->full[i], 1);
    barrier_init(&ring.control->empty[i], 2 * kConsumers / 32);  // the warps of both blocks
  }
  for (int i = 0; i < kPlans; ++i) {
    barrier_init(&ring.control->planned[i], 1);
    barrier_init(&ring.control->read[i], kConsumers);
  }
}

__device__ __forceinline__ int length_of(const GroupedGemm& g, int begin, int end) {
  return g.contract ? end - begin : static_cast<int>(g.k);
}

// The stages of one tile, by one thread.
__device__ __forceinline__ void copy_tile(const Params& p, const Ring& ring, const Tile& tile,
                                          int rank, Place<kStages>* place) {
  const GroupedGemm& g = p.g;
  const int blocks = tiles_of(length_of(g, tile.begin, tile.end), kTileK);
  const int a_row = (g.contract ? 0 : tile.begin) + tile.m * kTileM;
  const int b_row = (g.contract ? 0 : tile.group * static_cast<int>(g.n)) + tile.n * kTileN;
  int column = g.contract ? tile.begin : 0;
  for (int i = 0; i < blocks; ++i, column += kTileK, place->next()) {
    barrier_wait(&ring.control->empty[place->at], place->phase ^ 1);
    barrier_expect(&ring.control->full[place->at], kStageBytes);
    const uint32_t full = shared_address(&ring.control->full[place->at]);
    const uint32_t a = ring.a(place->at), b = ring.b(place->at);
    if (tile.shares_b) {
      const int half = rank * kTileN / 2;
      copy_box(a, p.a, column, a_row, full);
      copy_box(a + kBytesA / 2, p.a, column, a_row + kTileM / 2, full);
      copy_box_to_both(b + half * kTileK, p.b, column, b_row + half, full);
    } else {
      const int half = rank * kTileM / 2;
      copy_box_to_both(a + half * kTileK, p.a, column, a_row + half, full);
      copy_box(b, p.b, column, b_row, full);
      copy_box(b + kBytesB / 2, p.b, column, b_row + kTileN / 2, full);
    }
  }
}

// By one warp: all tiles of the block, which the consumers are told.
__device__ __forceinline__ void copy_tiles(const Params& p, const Ring& ring) {
  const int rank = static_cast<int>(cluster_rank());
  const bool leads = threadIdx.x % 32 == 0;
  Place<kStages> stage;
  Place<kPlans> plan;
  Walk walk(p.g, rank);
  Tile tile;
  bool more = true;
  for (int turn = static_cast<int>(blockIdx.x / 2); more; turn += static_cast<int>(gridDim.x / 2)) {
    more = walk.find(turn, &tile);
    if (leads) {
      barrier_wait(&ring.control->read[plan.at], plan.phase ^ 1);
      ring.control->plans[plan.at] =
          more ? Plan{tile.group, tile.begin, tile.end, tile.m, tile.n} : Plan{-1, 0, 0, 0, 0};
      barrier_arrive(&ring.control->planned[plan.at]);
      plan.next();
      if (more) copy_tile(p, ring, tile, rank, &stage);
    }
    __syncwarp();
  }
}

#endif

}  // namespace apex_te
