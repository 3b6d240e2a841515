// CUDA kernels of swiglu over tiles: FP8 results rowwise and transposed in one pass, and gradients
// with dbias. 16-bit inputs and vector accesses; a thread has 8 rows of 8 columns.
//
// The kernels are compiled for each activation only. Dtype, format, biases and outputs are branches
// that a whole grid takes alike, once for 8 elements, which memory speed does not notice.
#include "common/column_sums.h"
#include "common/fp8_tile.h"
#include "swiglu/swiglu_device.h"

namespace apex_te {
namespace {

using Tile = FP8Tile<kSwigluTileRows>;
constexpr int kWarps = Tile::kThreads / 32;
// Backward holds 4 rows of its three inputs at a time: all 8 would cost a fourth block on a
// multiprocessor (4% slower on an H200).
constexpr int kFwdBatch = 8, kBwdBatch = 4;
constexpr int kBlocks = 4;
constexpr int kRows = Tile::kRows;

__device__ __forceinline__ uint2 encode(const float* values, float scale, bool is_e5m2) {
  return is_e5m2 ? encode_values<E5M2>(values, scale) : encode_values<E4M3>(values, scale);
}

// kBatch rows from `p` on, of which there are `rows`; a step is a distance of rows in bytes.
template <int kBatch>
__device__ __forceinline__ void load_rows(const char* p, int64_t step, int rows, Words4* in) {
#pragma unroll
  for (int r = 0; r < kBatch; ++r, p += step)
    in[r] = r < rows ? load_vec(reinterpret_cast<const BFloat16*>(p)) : Words4{};
}
__device__ __forceinline__ const char* address(const void* matrix, int64_t ld, int64_t row,
                                               int64_t col) {
  return static_cast<const char*>(matrix) + 2 * (row * ld + col);
}

__device__ __forceinline__ void add(const Words4& addends, bool is_half, float* values) {
  float a[kVec];
  unpack16(addends, is_half, a);
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] += a[i];
}

__device__ __forceinline__ Words4 load_bias(const void* bias, int64_t col, int64_t cols) {
  return bias && col < cols ? load_vec(static_cast<const BFloat16*>(bias) + col) : Words4{};
}

// The transposed store; rows that are no multiple of 16 go byte by byte.
__device__ __forceinline__ void store_columns(uint8_t* out, int64_t rows, const Tile::Place& at,
                                              const uint2* tile) {
  if (rows % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    Tile::store_columns<true>(out, rows, at, tile);
  } else {
    Tile::store_columns<false>(out, rows, at, tile);
  }
}

template <Activation kAct>
__global__ void __launch_bounds__(Tile::kThreads, kBlocks) swiglu_fwd_tile_kernel(const Swiglu p) {
  constexpr int kBatch = kFwdBatch;
  __shared__ uint32_t warp_amaxes[kWarps];
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  const Tile::Place at(p.rows, p.cols, threadIdx.x % Tile::kLanes, threadIdx.x / Tile::kLanes);
  const int rows = at.rows_present();
  const bool is_half = p.dtype == DType::kFloat16, is_e5m2 = p.fp8 == DType::kE5M2;
  uint32_t amax = 0;
  uint2 codes[kRows];
  const uint32_t seen = amax_so_far(p.amax);
  const float scale = *p.scale;
  const Words4 gate_bias = load_bias(p.gate_bias, at.col, at.cols);
  const Words4 up_bias = load_bias(p.up_bias, at.col, at.cols);
  const char* gate_from = address(p.gate, p.gate_ld, at.row, at.col);
  const char* up_from = address(p.up, p.up_ld, at.row, at.col);
#pragma unroll
  for (int r0 = 0; r0 < kRows; r0 += kBatch) {
    Words4 gate[kBatch], up[kBatch];
    load_rows<kBatch>(gate_from + r0 * 2 * p.gate_ld, 2 * p.gate_ld, rows - r0, gate);
    load_rows<kBatch>(up_from + r0 * 2 * p.up_ld, 2 * p.up_ld, rows - r0, up);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      float g[kVec], u[kVec];
      unpack16(gate[r], is_half, g);
      unpack16(up[r], is_half, u);
      if (p.gate_bias) {
        add(gate_bias, is_half, g);
        add(up_bias, is_half, u);
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) g[i] = gated<kAct>(g[i], u[i]);
      if (r0 + r < rows) fold_amax(g, amax);
      codes[r0 + r] = encode(g, scale, is_e5m2);
    }
  }
  if (p.rowwise) Tile::store_rows<true>(p.rowwise, p.cols, at, codes);
  if (p.transposed) Tile::stage_columns(codes, tile);
  stage_amax(amax, warp_amaxes);
  __syncthreads();
  if (p.transposed) store_columns(p.transposed, p.rows, at, tile);
  finish_amax<Tile::kThreads>(p.amax, seen, warp_amaxes);
  if (blockIdx.x == 0 && block_row() == 0 && threadIdx.x == 0 && p.scale_inv)
    *p.scale_inv = 1.0f / scale;
}

template <Activation kAct>
__global__ void __launch_bounds__(Tile::kThreads, kBlocks) swiglu_bwd_tile_kernel(const Swiglu p) {
  constexpr int kBatch = kBwdBatch;
  __shared__ uint32_t warp_amaxes[kWarps];
  __shared__ __align__(16) uint2 tiles[2][Tile::kSharedWords];
  __shared__ float sums[2][kWarps][Tile::kTileCols];
  const Tile::Place at(p.rows, p.cols, threadIdx.x % Tile::kLanes, threadIdx.x / Tile::kLanes);
  const int rows = at.rows_present();
  const bool is_half = p.dtype == DType::kFloat16, is_e5m2 = p.fp8 == DType::kE5M2;
  const bool is_fp8 = p.scale;
  uint32_t amax = 0;
  uint2 gate_codes[kRows], up_codes[kRows];
  float gate_sums[kVec] = {}, up_sums[kVec] = {};
  const uint32_t seen = amax_so_far(p.amax);
  const float scale = is_fp8 ? *p.scale : 1.0f;
  const Words4 gate_bias = load_bias(p.gate_bias, at.col, at.cols);
  const Words4 up_bias = load_bias(p.up_bias, at.col, at.cols);
  const char* gate_from = address(p.gate, p.gate_ld, at.row, at.col);
  const char* up_from = address(p.up, p.up_ld, at.row, at.col);
  const char* grad_from = address(p.grad_output, p.cols, at.row, at.col);
#pragma unroll
  for (int r0 = 0; r0 < kRows; r0 += kBatch) {
    Words4 gate[kBatch], up[kBatch], grad[kBatch];
    load_rows<kBatch>(gate_from + r0 * 2 * p.gate_ld, 2 * p.gate_ld, rows - r0, gate);
    load_rows<kBatch>(up_from + r0 * 2 * p.up_ld, 2 * p.up_ld, rows - r0, up);
    load_rows<kBatch>(grad_from + r0 * 2 * p.cols, 2 * p.cols, rows - r0, grad);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      float g[kVec], u[kVec], d[kVec];
      unpack16(gate[r], is_half, g);
      unpack16(up[r], is_half, u);
      unpack16(grad[r], is_half, d);
      if (p.gate_bias) {
        add(gate_bias, is_half, g);
        add(up_bias, is_half, u);
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) gated_gradient<kAct>(g[i], u[i], d[i], &g[i], &u[i]);
      if (r0 + r < rows) {
        fold_amax(g, amax);
        fold_amax(u, amax);
        if (p.dbias) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            gate_sums[i] += g[i];
            up_sums[i] += u[i];
          }
        }
        if (!is_fp8) {
          const int64_t offset = (at.row + r0 + r) * p.grad_ld + at.col;
          store_vec_whole(static_cast<BFloat16*>(p.dgate) + offset, pack16(g, is_half));
          store_vec_whole(static_cast<BFloat16*>(p.dup) + offset, pack16(u, is_half));
        }
      }
      gate_codes[r0 + r] = encode(g, scale, is_e5m2);
      up_codes[r0 + r] = encode(u, scale, is_e5m2);
    }
  }
  if (p.rowwise) {
    Tile::store_rows<true>(p.rowwise, 2 * p.cols, at, gate_codes);
    Tile::store_rows<true>(p.rowwise + p.cols, 2 * p.cols, at, up_codes);
  }
  if (p.transposed) {
    Tile::stage_columns(gate_codes, tiles[0]);
    Tile::stage_columns(up_codes, tiles[1]);
  }
  if (p.dbias) {
    const int lane = threadIdx.x % Tile::kLanes, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      // The upper half of a warp holds the next rows of the same columns.
      const float g = gate_sums[i] + __shfl_down_sync(0xFFFFFFFFu, gate_sums[i], Tile::kLanes);
      const float u = up_sums[i] + __shfl_down_sync(0xFFFFFFFFu, up_sums[i], Tile::kLanes);
      if (threadIdx.x % 32 < Tile::kLanes) {
        sums[0][warp][lane * kVec + i] = g;
        sums[1][warp][lane * kVec + i] = u;
      }
    }
  }
  stage_amax(amax, warp_amaxes);
  __syncthreads();
  if (p.transposed) {
    store_columns(p.transposed, p.rows, at, tiles[0]);
    store_columns(p.transposed + p.cols * p.rows, p.rows, at, tiles[1]);
  }
  if (p.dbias) {
    for (int c = threadIdx.x; c < 2 * Tile::kTileCols; c += Tile::kThreads) {
      const int half = c / Tile::kTileCols, col = c % Tile::kTileCols;
      if (at.row0 >= p.rows || at.col0 + col >= p.cols) continue;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += sums[half][w][col];
      p.workspace[at.row0 / kSwigluTileRows * 2 * p.cols + half * p.cols + at.col0 + col] = sum;
    }
  }
  finish_amax<Tile::kThreads>(p.amax, seen, warp_amaxes);
  if (blockIdx.x == 0 && block_row() == 0 && threadIdx.x == 0 && p.scale_inv)
    *p.scale_inv = 1.0f / scale;
}

}  // namespace

void launch_swiglu_tile(const Swiglu& p, bool is_bwd, cudaStream_t stream) {
  dim3 blocks(1);  // without elements, one to write scale_inv
  if (p.rows && p.cols) blocks = Tile::grid(p.rows, p.cols, "swiglu");
  GatedKinds::choose(p.activation, [&](auto act) {
    constexpr Activation kAct = decltype(act)::value;
    if (is_bwd)
      swiglu_bwd_tile_kernel<kAct><<<blocks, Tile::kThreads, 0, stream>>>(p);
    else
      swiglu_fwd_tile_kernel<kAct><<<blocks, Tile::kThreads, 0, stream>>>(p);
  });
  check_cuda(cudaGetLastError(), "swiglu");
  if (!p.dbias) return;
  const int64_t lines = (p.rows + kSwigluTileRows - 1) / kSwigluTileRows;
  if (p.dtype == DType::kFloat16)
    launch_column_sums<Half>(p.workspace, lines, 2 * p.cols, p.dbias, stream);
  else
    launch_column_sums<BFloat16>(p.workspace, lines, 2 * p.cols, p.dbias, stream);
}

}  // namespace apex_te
