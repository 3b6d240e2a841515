// Ring of shared memory through which the warps of a block hand each other tiles of both operands
// and the tiles' numbers, and the warp that fills the ring.
#pragma once

#include "common/gpu/tensor_copy.h"
#include "grouped_gemm/grouped_gemm_schedule.h"

namespace apex_te {

constexpr int kPlans = 4;  // tiles of the result that the copying warp may be ahead
constexpr int kConsumers = 256, kThreads = kConsumers + 128;
// The result leaves through shared memory of each warp, some of a tile's columns at a time: 16 rows
// in boxes of 64 columns, of 32 in float32.
constexpr int kBoxRows = 16, kBoxN = 64, kWideBoxN = 32;
constexpr uint32_t kBoxBytes = kBoxRows * kBoxN * 2;
// How the sums of a stage are scaled: not at all, with kSplit in float32; by a factor of each row
// and block of 128 columns; by one of each row and one of each column, which those of a block of
// columns may share.
enum class Scaling { kFast, kSplit, kRowsAndBlocks, kRowsAndColumns, kRowsAndColumnBlocks };
template <Scaling kScaling>
constexpr bool kHasColumnScales =
    kScaling == Scaling::kRowsAndColumns || kScaling == Scaling::kRowsAndColumnBlocks;
template <Scaling kScaling>
constexpr bool kHasBlockScales = kScaling == Scaling::kRowsAndBlocks || kHasColumnScales<kScaling>;
// Sums that are scaled take more registers, and narrower tiles.
template <Scaling kScaling>
constexpr int kTileN = kHasBlockScales<kScaling> ? 192 : 256;
template <Scaling kScaling>
constexpr int kStages = kHasBlockScales<kScaling> ? 5 : 4;
constexpr uint32_t kBytesA = kTileM * kTileK;
template <Scaling kScaling>
constexpr uint32_t kBytesB = kTileN<kScaling> * kTileK;
template <Scaling kScaling>
constexpr uint32_t kStageBytes = kBytesA + kBytesB<kScaling>;
// Block scales travel with their stage, first those of rows.
constexpr uint32_t kScaleBytesA = kTileM * 4;
template <Scaling kScaling>
constexpr uint32_t kScaleBytes = kHasColumnScales<kScaling> ? kScaleBytesA + kTileN<kScaling> * 4
                                 : kScaling == Scaling::kRowsAndBlocks ? kScaleBytesA + 16
                                                                       : 0;
template <Scaling kScaling>
constexpr int kStagedColumns = kHasBlockScales<kScaling> ? 64 : 128;
template <Scaling kScaling>
constexpr uint32_t kStagedBytes = kStagedColumns<kScaling> / kBoxN * kBoxBytes;

struct alignas(128) Params {
  CUtensorMap a, b, out;
  GroupedGemm g;
};

// A tile that the consumers are told of; group -1: there are no more.
struct Plan {
  int group, begin, end, m, n;
};

template <Scaling kScaling>
struct Control {
  uint64_t full[kStages<kScaling>], empty[kStages<kScaling>];  // first: Ring has their addresses
  uint64_t planned[kPlans], read[kPlans];
  Plan plans[kPlans];
};

// Shared memory: the stages, the result's room, scales, control.
template <Scaling kScaling>
constexpr uint32_t kScalesBegin =
    kStages<kScaling> * kStageBytes<kScaling> + kConsumers / 32 * kStagedBytes<kScaling>;
template <Scaling kScaling>
constexpr uint32_t kControlBegin =
    kScalesBegin<kScaling> + kStages<kScaling> * kScaleBytes<kScaling>;
template <Scaling kScaling>
constexpr size_t kSharedBytes = kControlBegin<kScaling> + sizeof(Control<kScaling>);
static_assert(kSharedBytes<Scaling::kSplit> <= 227 * 1024 &&
                  kSharedBytes<Scaling::kRowsAndBlocks> <= 227 * 1024 &&
                  kSharedBytes<Scaling::kRowsAndColumns> <= 227 * 1024,
              "what a block may have on sm_90");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <Scaling kScaling>
struct Ring {
  uint32_t stages, scales, barriers;
  Control<kScaling>* control;
  __device__ __forceinline__ uint32_t a(int stage) const {
    return stages + stage * kStageBytes<kScaling>;
  }
  __device__ __forceinline__ uint32_t b(int stage) const { return a(stage) + kBytesA; }
  // Scales of the stage's rows, and behind them of its columns or blocks of columns.
  __device__ __forceinline__ uint32_t scales_of(int stage) const {
    return scales + stage * kScaleBytes<kScaling>;
  }
  __device__ __forceinline__ void wait(const Place<kStages<kScaling>>& place) const {
    barrier_wait(barriers + place.at * 8, place.phase);
  }
  // By a whole warp that has done with a stage; both blocks may have copied into it.
  __device__ __forceinline__ void release(int stage) const {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < 2) arrive_at(barriers + (kStages<kScaling> + stage) * 8, lane);
  }
};

template <Scaling kScaling>
__device__ __forceinline__ void start(const Ring<kScaling>& ring) {
  constexpr int kScaleWarps = kScaling == Scaling::kRowsAndBlocks;  // copy_scales
  for (int i = 0; i < kStages<kScaling>; ++i) {
    barrier_init(&ring.control->full[i], 1 + kScaleWarps);
    barrier_init(&ring.control->empty[i], 2 * kConsumers / 32);  // the warps of both blocks
  }
  for (int i = 0; i < kPlans; ++i) {
    barrier_init(&ring.control->planned[i], 1);
    barrier_init(&ring.control->read[i], kConsumers + kScaleWarps);
  }
}

__device__ __forceinline__ int length_of(const GroupedGemm& g, int begin, int end) {
  return g.contract ? end - begin : static_cast<int>(g.k);
}

// Bytes of at most `most` floats from number `first` on of a line.
__device__ __forceinline__ uint32_t bytes_of_floats(int64_t line, int first, int most) {
  return static_cast<uint32_t>(max(min(line - first, static_cast<int64_t>(most)), int64_t{0}) * 4);
}

// The stages of one tile, by one thread.
template <Scaling kScaling>
__device__ __forceinline__ void copy_tile(const Params& p, const Ring<kScaling>& ring,
                                          const Tile& tile, int rank,
                                          Place<kStages<kScaling>>* place) {
  constexpr int kN = kTileN<kScaling>;
  const GroupedGemm& g = p.g;
  const int blocks = tiles_of(length_of(g, tile.begin, tile.end), kTileK);
  const int a_row = (g.contract ? 0 : tile.begin) + tile.m * kTileM;
  const int b_row = (g.contract ? 0 : tile.group * static_cast<int>(g.n)) + tile.n * kN;
  int column = g.contract ? tile.begin : 0;
  uint32_t a_bytes = 0, b_bytes = 0;
  const float *a_scales = nullptr, *b_scales = nullptr;
  if constexpr (kHasColumnScales<kScaling>) {
    const int64_t line = tile.begin / kBlock + tile.group;
    a_bytes = bytes_of_floats(g.a_line, tile.m * kTileM, kTileM);
    b_bytes = bytes_of_floats(g.b_line, tile.n * kN, kN);
    a_scales = g.a_scale_inv + line * g.a_line + tile.m * kTileM;
    b_scales = g.b_scale_inv + line * g.b_line + tile.n * kN;
  }
  for (int i = 0; i < blocks; ++i, column += kTileK, place->next()) {
    barrier_wait(&ring.control->empty[place->at], place->phase ^ 1);
    barrier_expect(&ring.control->full[place->at], kStageBytes<kScaling> + a_bytes + b_bytes);
    const uint32_t full = shared_address(&ring.control->full[place->at]);
    const uint32_t a = ring.a(place->at), b = ring.b(place->at);
    if constexpr (kHasColumnScales<kScaling>) {
      const uint32_t scales = ring.scales_of(place->at);
      copy_bytes(scales, a_scales + i * g.a_line, a_bytes, full);
      if (b_bytes) copy_bytes(scales + kScaleBytesA, b_scales + i * g.b_line, b_bytes, full);
    }
    if (tile.shares_b) {
      const int half = rank * kN / 2;
      copy_box(a, p.a, column, a_row, full);
      copy_box(a + kBytesA / 2, p.a, column, a_row + kTileM / 2, full);
      copy_box_to_both(b + half * kTileK, p.b, column, b_row + half, full);
    } else {
      const int half = rank * kTileM / 2;
      copy_box_to_both(a + half * kTileK, p.a, column, a_row + half, full);
      copy_box(b, p.b, column, b_row, full);
      copy_box(b + kBytesB<kScaling> / 2, p.b, column, b_row + kN / 2, full);
    }
  }
}

// By one warp: all tiles of the block, which the consumers are told.
template <Scaling kScaling>
__device__ __forceinline__ void copy_tiles(const Params& p, const Ring<kScaling>& ring) {
  const int rank = static_cast<int>(cluster_rank());
  const bool leads = threadIdx.x % 32 == 0;
  Place<kStages<kScaling>> stage;
  Place<kPlans> plan;
  Walk walk(p.g, kTileN<kScaling>, rank);
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

// By one warp: the scales of rows and of blocks of columns, whose rows begin anywhere.
__device__ __forceinline__ void copy_scales(const Params& p,
                                            const Ring<Scaling::kRowsAndBlocks>& ring) {
  constexpr int kN = kTileN<Scaling::kRowsAndBlocks>;
  const GroupedGemm& g = p.g;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int blocks = tiles_of(g.k, kTileK);
  Place<kStages<Scaling::kRowsAndBlocks>> place;
  for (Place<kPlans> plan;; plan.next()) {
    barrier_wait(&ring.control->planned[plan.at], plan.phase);
    const Plan planned = ring.control->plans[plan.at];
    __syncwarp();
    if (lane == 0) barrier_arrive(&ring.control->read[plan.at]);
    if (planned.group < 0) break;
    // For rows and columns that do not exist any scale will do.
    const int64_t row = planned.begin + planned.m * kTileM + lane * 4;
    const float* from[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) from[j] = g.a_scale_inv + min(row + j, g.m - 1);
    const int64_t column = static_cast<int64_t>(planned.n) * kN / kBlock + lane % 2;
    const float* of_block =
        g.b_scale_inv + (planned.group * g.b_lines + min(column, g.b_lines - 1)) * g.b_line;
    float next[4], next_of_block = __ldg(of_block);
#pragma unroll
    for (int j = 0; j < 4; ++j) next[j] = __ldg(from[j]);
    for (int i = 0; i < blocks; ++i, place.next()) {
      const float4 rows = make_float4(next[0], next[1], next[2], next[3]);
      const float block = next_of_block;
      if (i + 1 < blocks) {
        next_of_block = __ldg(of_block + i + 1);
#pragma unroll
        for (int j = 0; j < 4; ++j) next[j] = __ldg(from[j] + (i + 1) * g.a_line);
      }
      barrier_wait(&ring.control->empty[place.at], place.phase ^ 1);
      const uint32_t to = ring.scales_of(place.at);
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + lane * 16), "f"(rows.x),
                   "f"(rows.y), "f"(rows.z), "f"(rows.w)
                   : "memory");
      if (lane < 2)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + kScaleBytesA + lane * 4), "f"(block)
                     : "memory");
      __syncwarp();
      if (lane == 0) barrier_arrive(&ring.control->full[place.at]);
    }
  }
}

#endif

}  // namespace apex_te
