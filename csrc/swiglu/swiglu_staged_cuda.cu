// CUDA kernels of swiglu over tiles of 16-bit inputs at any alignment: FP8 results and gradients
// with dbias of rows that do not begin at whole vectors (common/gpu/staged_rows.h). The sums are
// added in the order of swiglu_tile_cuda.cu.
//
// One kernel for each direction: the activation is a branch once for 8 elements.
#include "common/gpu/column_sums.h"
#include "common/gpu/fp8_tile.h"
#include "common/gpu/staged_rows.h"
#include "swiglu/swiglu_device.h"

namespace apex_te {
namespace {

using Tile = FP8Tile<kSwigluTileRows>;
// Rows of a thread, threads of a block, and blocks of a multiprocessor.
template <bool kBwd>
constexpr int kRows = kBwd ? Tile::kRows / 2 : Tile::kRows;
template <bool kBwd>
constexpr int kThreads = Tile::kThreads * Tile::kRows / kRows<kBwd>;
template <bool kBwd>
constexpr int kBlocks = kBwd ? 3 : 5;

// A block's shared memory. Forward has a result in place of the gate, backward one in place of gate
// and up; the tiles of backward lie in place of the gradient, which is read by then.
template <bool kBwd>
struct Memory {
  using Rows = StagedRows<kRows<kBwd>>;
  static constexpr int kGroups = kThreads<kBwd> / Tile::kLanes, kWarps = kThreads<kBwd> / 32;
  Rows halves[2][kGroups];
  union {
    Rows grad[kBwd ? kGroups : 1];
    __align__(16) uint2 tiles[kBwd ? 2 : 1][Tile::kSharedWords];
  };
  float sums[kBwd ? 2 : 1][kBwd ? kWarps : 1][kBwd ? Tile::kTileCols : 1];
  uint32_t warp_amaxes[kWarps];
};

__device__ __forceinline__ void load_bias(const void* bias, const Tile::Place& at, bool is_half,
                                          float* values) {
  const BFloat16* from = static_cast<const BFloat16*>(bias);
  unpack16(from ? load_shifted(from + at.col, at.cols - at.col, from, from + at.cols) : Words4{},
           is_half, values);
}

template <bool kBwd>
__global__ void __launch_bounds__(kThreads<kBwd>, kBlocks<kBwd>)
    swiglu_staged_kernel(const Swiglu p) {
  constexpr int kHalves = kBwd ? 2 : 1, kLanes = Tile::kLanes;
  extern __shared__ __align__(16) unsigned char shared[];
  Memory<kBwd>& memory = *reinterpret_cast<Memory<kBwd>*>(shared);
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  Tile::Place at(p.rows, p.cols, lane, 0);
  at.row += group * kRows<kBwd>;
  const StagedPlace place(at.row, at.col0, at.rows - at.row, at.cols - at.col0);
  const auto gate = place.of_16_bits(p.gate, p.gate_ld), up = place.of_16_bits(p.up, p.up_ld);
  const auto grad = place.of_16_bits(p.grad_output, p.cols);
  place.fetch(gate, p.gate, memory.halves[0][group]);
  place.fetch(up, p.up, memory.halves[1][group]);
  if constexpr (kBwd) place.fetch(grad, p.grad_output, memory.grad[group]);
  const bool is_half = p.dtype == DType::kFloat16, is_e5m2 = p.fp8 == DType::kE5M2;
  const bool is_fp8 = p.scale;
  const float scale = is_fp8 ? *p.scale : 1.0f;
  const uint32_t seen = amax_so_far(p.amax);
  float biases[2][kVec], sums[kHalves][kVec] = {};
  load_bias(p.gate_bias, at, is_half, biases[0]);
  load_bias(p.up_bias, at, is_half, biases[1]);
  const int n = place.cols - lane * kVec;
  uint32_t amax = 0;
  finish_fetches();
#pragma unroll 1
  for (int r = 0; r < kRows<kBwd>; ++r) {
    float values[2][kVec], grads[kVec] = {};
    unpack16(place.read(gate, memory.halves[0][group], r), is_half, values[0]);
    unpack16(place.read(up, memory.halves[1][group], r), is_half, values[1]);
    if constexpr (kBwd) unpack16(place.read(grad, memory.grad[group], r), is_half, grads);
    if (p.gate_bias) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        values[0][i] += biases[0][i];
        values[1][i] += biases[1][i];
      }
    }
    GatedKinds::choose(p.activation, [&](auto act) {
      constexpr Activation kAct = decltype(act)::value;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (kBwd)
          gated_gradient<kAct, false>(values[0][i], values[1][i], grads[i], p.clamp, &values[0][i],
                                      &values[1][i]);
        else
          values[0][i] = gated<kAct, false>(values[0][i], values[1][i], p.clamp);
      }
    });
    __syncwarp();  // all have read the rows that codes replace
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if (n < kVec) {  // no parameter of an activation makes something of what does not exist
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[h][i] = i < n ? values[h][i] : 0.0f;
      }
      if (r < place.rows) {
        fold_amax(values[h], amax);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sums[h][i] += values[h][i];
      }
      if (!is_fp8) {
        store_staged(place.of(static_cast<uint16_t*>(h ? p.dup : p.dgate), p.grad_ld).row(r),
                     pack16(values[h], is_half).words, place.length(r), lane);
        continue;
      }
      const uint2 codes =
          is_e5m2 ? encode_values<E5M2>(values[h], scale) : encode_values<E4M3>(values[h], scale);
      memory.halves[h][group].codes(r, lane) = codes;
      if (p.rowwise)
        store_staged(place.of(p.rowwise + h * p.cols, kHalves * p.cols).row(r), {codes.x, codes.y},
                     place.length(r), lane);
    }
  }
  stage_amax(amax, memory.warp_amaxes);
  if constexpr (kBwd) {
    if (p.dbias) let_next_kernel_start();
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float sum = sums[h][i] + __shfl_down_sync(0xFFFFFFFFu, sums[h][i], kLanes);
        if (threadIdx.x % 32 < kLanes) memory.sums[h][threadIdx.x / 32][lane * kVec + i] = sum;
      }
    __syncthreads();
  }
  const int half = threadIdx.x / Tile::kThreads, thread = threadIdx.x % Tile::kThreads;
  if (p.columnwise) {
    constexpr int kParts = Tile::kRows / kRows<kBwd>;
    uint2 codes[Tile::kRows];
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r)
      codes[r] = memory.halves[half][thread / kLanes * kParts + r / kRows<kBwd>].codes(
          r % kRows<kBwd>, lane);
    Tile::stage_columns(codes, memory.tiles[half], lane, thread / kLanes);
  }
  __syncthreads();
  if (p.columnwise)
    Tile::store_columns_most(p.columnwise + half * p.cols * p.columnwise_ld, p.columnwise_ld, at,
                             memory.tiles[half], thread);
  if constexpr (kBwd) {
    static_assert(kThreads<kBwd> == 2 * Tile::kTileCols, "a thread for each column sum");
    const int of = threadIdx.x / Tile::kTileCols, col = threadIdx.x % Tile::kTileCols;
    if (p.dbias && at.row0 < p.rows && at.col0 + col < p.cols) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kThreads<kBwd> / 32; ++w) sum += memory.sums[of][w][col];
      p.workspace[at.row0 / kSwigluTileRows * 2 * p.cols + of * p.cols + at.col0 + col] = sum;
    }
  }
  finish_amax<kThreads<kBwd>>(p.amax, seen, memory.warp_amaxes);
  if (blockIdx.x == 0 && block_row() == 0 && threadIdx.x == 0 && p.scale_inv)
    *p.scale_inv = 1.0f / scale;
}

template <bool kBwd>
void launch(const Swiglu& p, cudaStream_t stream) {
  const auto kernel = swiglu_staged_kernel<kBwd>;
  allow_shared(reinterpret_cast<const void*>(kernel));
  kernel<<<Tile::grid(p.rows, p.cols, "swiglu"), kThreads<kBwd>, sizeof(Memory<kBwd>), stream>>>(p);
  check_cuda(cudaGetLastError(), "swiglu");
}

}  // namespace

void launch_swiglu_staged(const Swiglu& p, bool is_bwd, cudaStream_t stream) {
  is_bwd ? launch<true>(p, stream) : launch<false>(p, stream);
  if (!p.dbias) return;
  const int64_t lines = (p.rows + kSwigluTileRows - 1) / kSwigluTileRows;
  if (p.dtype == DType::kFloat16)
    launch_column_sums<Half>(p.workspace, lines, 2 * p.cols, p.dbias, stream);
  else
    launch_column_sums<BFloat16>(p.workspace, lines, 2 * p.cols, p.dbias, stream);
}

}  // namespace apex_te
