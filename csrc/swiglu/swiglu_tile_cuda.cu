// CUDA kernels of swiglu over tiles: FP8 results rowwise and columnwise in one pass, and gradients
// with dbias. 16-bit inputs and vector accesses; a thread of forward has 8 rows of 8 columns, one
// of backward 4.
//
// The kernels are compiled for each activation only. Dtype, format, biases and outputs are branches
// that a whole grid takes alike, once for 8 elements, which memory speed does not notice.
#include "common/gpu/column_sums.h"
#include "common/gpu/fp8_tile.h"
#include "swiglu/swiglu_device.h"

namespace apex_te {
namespace {

using Tile = FP8Tile<kSwigluTileRows>;
constexpr int kBlocks = 4;
constexpr int kRows = Tile::kRows;
constexpr int kBwdRows = kRows / 2, kBwdThreads = 2 * Tile::kThreads, kBwdBlocks = 2;
static_assert(Tile::kLanes == 16, "a warp of backward has the 8 rows of one patch");

__device__ __forceinline__ uint2 encode(const float* values, float scale, bool is_e5m2) {
  return is_e5m2 ? encode_values<E5M2>(values, scale) : encode_values<E4M3>(values, scale);
}

// kCount rows from `p` on, of which there are `rows`; a step is a distance of rows in bytes.
template <int kCount>
__device__ __forceinline__ void load_rows(const char* p, int64_t step, int rows, Words4* in) {
#pragma unroll
  for (int r = 0; r < kCount; ++r, p += step)
    in[r] = r < rows ? load_vec(reinterpret_cast<const BFloat16*>(p)) : Words4{};
}
__device__ __forceinline__ const char* address(const void* matrix, int64_t ld, int64_t row,
                                               int64_t col) {
  return static_cast<const char*>(matrix) + 2 * (row * ld + col);
}

template <int kCount, bool kHeld>
__device__ __forceinline__ void load_halves(const Swiglu& p, int64_t row, int64_t col, int rows,
                                            Words4* gate, Words4* up) {
  if constexpr (kHeld) {
    load_held<kCount>(p, row, col, rows, col < p.cols, gate);
    load_held<kCount>(p, row, p.cols + col, rows, col < p.cols, up);
  } else {
    load_rows<kCount>(address(p.gate, p.gate_ld, row, col), 2 * p.gate_ld, rows, gate);
    load_rows<kCount>(address(p.up, p.up_ld, row, col), 2 * p.up_ld, rows, up);
  }
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

template <Activation kAct, bool kHeld>
__global__ void __launch_bounds__(Tile::kThreads, kBlocks) swiglu_fwd_tile_kernel(const Swiglu p) {
  __shared__ uint32_t warp_amaxes[Tile::kThreads / 32];
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
  Words4 gate[kRows], up[kRows];
  load_halves<kRows, kHeld>(p, at.row, at.col, rows, gate, up);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float g[kVec], u[kVec];
    unpack16(gate[r], is_half, g);
    unpack16(up[r], is_half, u);
    if (p.gate_bias) {
      add(gate_bias, is_half, g);
      add(up_bias, is_half, u);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) g[i] = gated<kAct, false>(g[i], u[i], p.clamp);
    if (r < rows) fold_amax(g, amax);
    codes[r] = encode(g, scale, is_e5m2);
  }
  if (p.rowwise) Tile::store_rows<true>(p.rowwise, p.cols, at, codes);
  if (p.columnwise) Tile::stage_columns(codes, tile);
  stage_amax(amax, warp_amaxes);
  __syncthreads();
  if (p.columnwise) Tile::store_columns_most(p.columnwise, p.columnwise_ld, at, tile);
  finish_amax<Tile::kThreads>(p.amax, seen, warp_amaxes);
  if (blockIdx.x == 0 && block_row() == 0 && threadIdx.x == 0 && p.scale_inv)
    *p.scale_inv = 1.0f / scale;
}

__device__ __forceinline__ void store_8_floats(float* to, const float* values) {
  float4* p = reinterpret_cast<float4*>(to);
  p[0] = make_float4(values[0], values[1], values[2], values[3]);
  p[1] = make_float4(values[4], values[5], values[6], values[7]);
}

// 4 rows of codes, of which the other half of the warp has the same columns of the other 4, to the
// 8 rows of one of the two gradients: the lower half gets gate's, the upper half up's.
__device__ __forceinline__ void share_rows(const uint2* gate, const uint2* up, bool is_upper,
                                           uint2* codes) {
#pragma unroll
  for (int r = 0; r < kBwdRows; ++r) {
    const uint2 own = is_upper ? up[r] : gate[r], sent = is_upper ? gate[r] : up[r];
    const uint2 other = make_uint2(__shfl_xor_sync(0xFFFFFFFFu, sent.x, Tile::kLanes),
                                   __shfl_xor_sync(0xFFFFFFFFu, sent.y, Tile::kLanes));
    codes[r] = is_upper ? other : own;
    codes[r + kBwdRows] = is_upper ? own : other;
  }
}

// All loads of a thread are in flight at once, and twice the threads share a tile's arithmetic,
// which is what a small matrix waits for.
template <Activation kAct, bool kHeld>
__global__ void __launch_bounds__(kBwdThreads, kBwdBlocks) swiglu_bwd_tile_kernel(const Swiglu p) {
  constexpr int kWarps = kBwdThreads / 32;
  __shared__ uint32_t warp_amaxes[kWarps];
  __shared__ __align__(16) uint2 tiles[2][Tile::kSharedWords];
  __shared__ __align__(16) float sums[2][kWarps][Tile::kTileCols];
  const int lane = threadIdx.x % Tile::kLanes, warp = threadIdx.x / 32;
  const bool is_upper = threadIdx.x & Tile::kLanes;
  const Tile::Place at(p.rows, p.cols, lane, warp);
  const int first = is_upper ? kBwdRows : 0, rows = at.rows_present() - first;
  const int64_t row = at.row + first;
  const bool is_half = p.dtype == DType::kFloat16, is_e5m2 = p.fp8 == DType::kE5M2;
  const bool is_fp8 = p.scale;
  uint32_t amax = 0;
  uint2 gate_codes[kBwdRows], up_codes[kBwdRows];
  float gate_sums[kVec] = {}, up_sums[kVec] = {};
  const uint32_t seen = amax_so_far(p.amax);
  const float scale = is_fp8 ? *p.scale : 1.0f;
  const Words4 gate_bias = load_bias(p.gate_bias, at.col, at.cols);
  const Words4 up_bias = load_bias(p.up_bias, at.col, at.cols);
  Words4 gate[kBwdRows], up[kBwdRows], grad[kBwdRows];
  load_halves<kBwdRows, kHeld>(p, row, at.col, rows, gate, up);
  load_rows<kBwdRows>(address(p.grad_output, p.cols, row, at.col), 2 * p.cols, rows, grad);
#pragma unroll
  for (int r = 0; r < kBwdRows; ++r) {
    float g[kVec], u[kVec], d[kVec];
    unpack16(gate[r], is_half, g);
    unpack16(up[r], is_half, u);
    unpack16(grad[r], is_half, d);
    if (p.gate_bias) {
      add(gate_bias, is_half, g);
      add(up_bias, is_half, u);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      gated_gradient<kAct, false>(g[i], u[i], d[i], p.clamp, &g[i], &u[i]);
    if (is_fp8) {
      gate_codes[r] = encode(g, scale, is_e5m2);
      up_codes[r] = encode(u, scale, is_e5m2);
    }
    if (r >= rows) continue;
    fold_amax(g, amax);
    fold_amax(u, amax);
    if (p.dbias) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        gate_sums[i] += g[i];
        up_sums[i] += u[i];
      }
    }
    if (is_fp8) {
      if (!p.rowwise) continue;
      uint8_t* out = p.rowwise + (row + r) * 2 * p.cols + at.col;
      *reinterpret_cast<uint2*>(out) = gate_codes[r];
      *reinterpret_cast<uint2*>(out + p.cols) = up_codes[r];
    } else {
      const int64_t offset = (row + r) * p.grad_ld + at.col;
      store_vec_whole(static_cast<BFloat16*>(p.dgate) + offset, pack16(g, is_half));
      store_vec_whole(static_cast<BFloat16*>(p.dup) + offset, pack16(u, is_half));
    }
  }
  if (p.columnwise) {
    uint2 codes[kRows];
    share_rows(gate_codes, up_codes, is_upper, codes);
    Tile::stage_columns(codes, tiles[is_upper], lane, warp);
  }
  if (p.dbias) {
    let_next_kernel_start();
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      gate_sums[i] += __shfl_down_sync(0xFFFFFFFFu, gate_sums[i], Tile::kLanes);
      up_sums[i] += __shfl_down_sync(0xFFFFFFFFu, up_sums[i], Tile::kLanes);
    }
    if (!is_upper) {
      store_8_floats(&sums[0][warp][lane * kVec], gate_sums);
      store_8_floats(&sums[1][warp][lane * kVec], up_sums);
    }
  }
  stage_amax(amax, warp_amaxes);
  __syncthreads();
  if (p.columnwise) {
    const int half = threadIdx.x / Tile::kThreads;
    Tile::store_columns_most(p.columnwise + half * p.cols * p.columnwise_ld, p.columnwise_ld, at,
                             tiles[half], threadIdx.x % Tile::kThreads);
  }
  if (p.dbias) {
    static_assert(kBwdThreads == 2 * Tile::kTileCols, "a thread for each column sum");
    const int half = threadIdx.x / Tile::kTileCols, col = threadIdx.x % Tile::kTileCols;
    if (at.row0 < p.rows && at.col0 + col < p.cols) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += sums[half][w][col];
      p.workspace[at.row0 / kSwigluTileRows * 2 * p.cols + half * p.cols + at.col0 + col] = sum;
    }
  }
  finish_amax<kBwdThreads>(p.amax, seen, warp_amaxes);
  if (blockIdx.x == 0 && block_row() == 0 && threadIdx.x == 0 && p.scale_inv)
    *p.scale_inv = 1.0f / scale;
}

}  // namespace

void launch_swiglu_tile(const Swiglu& p, bool is_bwd, cudaStream_t stream) {
  dim3 blocks(1);  // without elements, one to write scale_inv
  if (p.rows && p.cols) blocks = Tile::grid(p.rows, p.cols, "swiglu");
  GatedKinds::choose(p.activation, [&](auto act) {
    constexpr Activation kAct = decltype(act)::value;
    const auto fwd =
        p.held_scales ? swiglu_fwd_tile_kernel<kAct, true> : swiglu_fwd_tile_kernel<kAct, false>;
    const auto bwd =
        p.held_scales ? swiglu_bwd_tile_kernel<kAct, true> : swiglu_bwd_tile_kernel<kAct, false>;
    if (is_bwd)
      bwd<<<blocks, kBwdThreads, 0, stream>>>(p);
    else
      fwd<<<blocks, Tile::kThreads, 0, stream>>>(p);
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
