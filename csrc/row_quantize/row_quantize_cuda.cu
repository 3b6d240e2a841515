// CUDA kernels of row_quantize.
//
// Rows alone: some warps hold a row, or two, in registers, and read the rest of a long one again.
// Columns, or both: amaxes first, by atomics on the tensors of the scales, then tiles of 128 x 128
// (common/gpu/fp8_tile.h), which begin with what the first pass read last and the L2 cache still
// has. Both read the matrix: columns alone go in slabs that stay in L2 between the passes. The
// kernels start while the one before ends: only the first begins where another op may still write.
#include <algorithm>

#include "common/gpu/block_1x128.h"
#include "common/gpu/dependent_launch.h"
#include "common/numerics/with_dtype.h"
#include "row_quantize/row_quantize.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

using Tile = BlockTile;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kHeld = 8;                       // vectors of rows that a thread holds
constexpr int64_t kWarpCols = 32 * kVec;       // columns of a warp's vectors
constexpr int64_t kMaxBlocks = 1LL << 31;      // of rows; each then takes several
constexpr int kStep = 4;                       // rows of a warp whose loads are in flight
constexpr int64_t kAmaxRows = kStep * kWarps;  // of a step of a block that looks for amaxes
static_assert(Tile::kThreads == kThreads, "a tile's threads");
static_assert(kWarpCols == kThreads, "a thread for each amax of a warp's columns");

// Blocks of an SM, which bound the registers of a thread.
template <typename T, bool kAligned>
constexpr int kBlocks = kAligned && sizeof(T) == 2 ? 3 : 2;

// Whether scales divide, and the format, are branches of a whole grid: a kernel for each would take
// twice as long to compile.
__device__ __forceinline__ float scale_of(const RowQuantize& p, uint32_t amax) {
  return p.rule.divides ? p.rule.scale_of<true>(amax) : p.rule.scale_of<false>(amax);
}
__device__ __forceinline__ float inverse_of(const RowQuantize& p, uint32_t amax, float scale) {
  return p.rule.divides ? p.rule.inverse_of<true>(amax, scale)
                        : p.rule.inverse_of<false>(amax, scale);
}
// Codes of 8 values, number i by the scale scale(i).
template <typename Scale>
__device__ __forceinline__ uint2 encode(const RowQuantize& p, float* values, const Scale& scale) {
  if (p.rule.divides) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = Divisor(scale(i)).quotient<4>(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] *= scale(i);
  }
  return AnyFormat<>{p.fp8 == DType::kE5M2}.encode(values);
}

// kCount vectors: number i begins at column col(i) of row(i); zeros where there is no element.
template <int kCount, typename T, bool kAligned, typename Row, typename Col>
__device__ __forceinline__ void load(const RowQuantize& p, const Row& row, const Col& col,
                                     Vec8<T>* in) {
  const T* x = static_cast<const T*>(p.x);
  const auto address = [&](int i) { return x + row(i) * p.cols + col(i); };
  const auto left = [&](int i) { return row(i) < p.rows ? p.cols - col(i) : 0; };
  if constexpr (!kAligned) {
    constexpr int kOnce = kCount * sizeof(T) > 16 ? 16 / sizeof(T) : kCount;  // of the registers
#pragma unroll
    for (int i = 0; i < kCount; i += kOnce)
      load_all_shifted<kOnce>([&](int k) { return address(i + k); },
                              [&](int k) { return left(i + k); }, x, x + p.rows * p.cols, in + i);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) in[i] = left(i) > 0 ? load_vec(address(i)) : Vec8<T>{};
  }
}

// What the elements of 8 columns from c on are multiplied by, if columns have scales.
template <bool kAligned>
__device__ __forceinline__ Vec8<float> factors_of(const RowQuantize& p, int64_t c) {
  if (!p.column_scale || c >= p.cols) return Vec8<float>{};
  return kAligned ? load_vec(p.column_scale + c) : load_partial(p.column_scale + c, p.cols - c);
}
template <typename T>
__device__ __forceinline__ void values_of(const RowQuantize& p, const Vec8<T>& v,
                                          const Vec8<float>& factors, float* values) {
  unpack(v, values);
  if (!p.column_scale) return;
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] *= __uint_as_float(factors.words[i]);
}

// Magnitudes are kept as Magnitude has them, or as floats' bits if columns have scales.
template <typename T>
__device__ __forceinline__ uint32_t row_bits(const RowQuantize& p, uint32_t amax) {
  return p.column_scale ? amax : amax_bits(T{}, amax);
}

template <typename T>
__device__ __forceinline__ uint32_t larger_of(const RowQuantize& p, uint32_t a, uint32_t b) {
  return p.column_scale ? max(a, b) : Magnitude<T>::larger(a, b);
}

// Bits that atomics left in the tensor of the scales.
__device__ __forceinline__ uint32_t amax_of(const float* amaxes, int64_t i) {
  return *reinterpret_cast<const volatile uint32_t*>(amaxes + i);
}
__device__ __forceinline__ void raise(float* amaxes, int64_t i, uint32_t bits) {
  atomicMax(reinterpret_cast<unsigned int*>(amaxes + i), bits);
}

// team_warps warps hold kRows rows; a block has one such team or several.
template <typename T, bool kAligned, int kRows>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kAligned>)
    rows_kernel(const RowQuantize p, const int team_warps) {
  static_assert(kRows <= 2, "scales of rows");
  constexpr int kVecs = kHeld / kRows;
  constexpr bool kHasRest = kRows == 1 || !kAligned;  // rows may be longer than a team holds
  __shared__ uint32_t warps[kRows][kWarps];
  const int lane = threadIdx.x % 32, team = threadIdx.x / 32 / team_warps;
  const int64_t step = team_warps * kWarpCols;
  const int64_t first = (static_cast<int>(threadIdx.x) - team * team_warps * 32) * kVec;
  const int64_t block_rows = blockDim.x / 32 / team_warps * kRows;
  for (int64_t row0 = blockIdx.x * block_rows; row0 < p.rows; row0 += gridDim.x * block_rows) {
    const int64_t row = row0 + team * kRows;
    Vec8<T> in[kHeld];  // of a row after the other
    load<kHeld, T, kAligned>(
        p, [&](int i) { return row + i / kVecs; }, [&](int i) { return first + i % kVecs * step; },
        in);
    uint32_t amaxes[kRows] = {};
    const auto fold = [&](const Vec8<T>& v, const Vec8<float>& factors, uint32_t& amax) {
      if (!p.column_scale) return fold_amax(v, amax);
      float values[kVec];
      values_of(p, v, factors, values);
      fold_amax(values, amax);
    };
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (k * step >= p.cols) break;
      const Vec8<float> factors = factors_of<kAligned>(p, first + k * step);
#pragma unroll
      for (int r = 0; r < kRows; ++r) fold(in[r * kVecs + k], factors, amaxes[r]);
    }
    // The rest of rows that are longer than a team holds.
    const auto load_again = [&](int r, int64_t c) {
      Vec8<T> v;
      load<1, T, kAligned>(p, [&](int) { return row + r; }, [&](int) { return c; }, &v);
      return v;
    };
    if constexpr (kHasRest) {
#pragma unroll 1
      for (int r = 0; r < kRows; ++r) {
        uint32_t amax = 0;
#pragma unroll 1
        for (int64_t c = kVecs * step + first; c < p.cols; c += step)
          fold(load_again(r, c), factors_of<kAligned>(p, c), amax);
#pragma unroll
        for (int k = 0; k < kRows; ++k)
          if (k == r) amaxes[k] = larger_of<T>(p, amaxes[k], amax);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) amaxes[r] = warp_max(row_bits<T>(p, amaxes[r]));
    if (team_warps > 1) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (lane == 0) warps[r][threadIdx.x / 32] = amaxes[r];
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        for (int w = 0; w < team_warps; ++w)
          amaxes[r] = max(amaxes[r], warps[r][team * team_warps + w]);
    }
    float scales[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      scales[r] = scale_of(p, amaxes[r]);
      if (first == 0 && row + r < p.rows)
        p.rowwise_scale_inv[row + r] = inverse_of(p, amaxes[r], scales[r]);
    }
    const auto store = [&](const Vec8<T>& v, const Vec8<float>& factors, int64_t c, int r) {
      float values[kVec];
      values_of(p, v, factors, values);
      const float scale = kRows == 1 || r == 0 ? scales[0] : scales[kRows - 1];
      const uint2 codes = encode(p, values, [=](int) { return scale; });
      uint8_t* out = p.rowwise + (row + r) * p.cols + c;
      if (!kAligned)
        store_codes_of_lanes<32>(out - lane * kVec, codes,
                                 row + r < p.rows ? p.cols - c + lane * kVec : 0, lane);
      else if (c < p.cols && row + r < p.rows)
        *reinterpret_cast<uint2*>(out) = codes;
    };
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (k * step >= p.cols) break;
      const Vec8<float> factors = factors_of<kAligned>(p, first + k * step);
#pragma unroll
      for (int r = 0; r < kRows; ++r) store(in[r * kVecs + k], factors, first + k * step, r);
    }
    if constexpr (kHasRest) {
#pragma unroll 1
      for (int r = 0; r < kRows; ++r)
#pragma unroll 1
        for (int64_t c = kVecs * step + first; c - lane * kVec < p.cols; c += step)
          store(load_again(r, c), factors_of<kAligned>(p, c), c, r);
    }
    if (team_warps > 1) __syncthreads();  // before the next rows' amaxes
  }
}

// Zeros for the amaxes.
__global__ void __launch_bounds__(kThreads) clear_kernel(const RowQuantize p) {
  let_next_kernel_start();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p.rowwise_scale_inv && i < p.rows) p.rowwise_scale_inv[i] = 0.0f;
  if (i < p.cols) p.columnwise_scale_inv[i] = 0.0f;
}

// Raises the amaxes, bits in the tensors of the scales, to those of block_rows rows (a multiple of
// kAmaxRows) of kWarpCols columns. first_col: of the slab, a multiple of kWarpCols.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const RowQuantize p, const int64_t first_col, const int64_t block_rows) {
  using M = Magnitude<T>;
  let_next_kernel_start();
  constexpr int kPitch = 36;  // of the warp's column i of each lane: no bank conflicts
  __shared__ uint32_t warps[kWarps][kVec * kPitch];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // From the last on: the tiles begin with the first.
  const int64_t above = (p.rows + block_rows - 1) / block_rows - 1 - block_row();
  const int64_t row0 = above * block_rows;
  const int64_t first = first_col + (gridDim.x - 1 - blockIdx.x) * kWarpCols;
  const int64_t col = first + lane * kVec;
  if (above < 0) return;
  const int64_t end = min(p.rows, row0 + block_rows);
  const Vec8<float> factors = factors_of<kAligned>(p, col);
  uint32_t amaxes[kVec] = {};
  bool has_waited = false;
#pragma unroll 1
  for (int64_t r0 = row0 + warp * kStep; r0 < end; r0 += kAmaxRows) {
    Vec8<T> in[kStep];
    load<kStep, T, kAligned>(p, [&](int i) { return r0 + i; }, [&](int) { return col; }, in);
    uint32_t of_lane = 0;  // lane i gets the amax of row i
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      uint32_t row = 0;
      if (p.column_scale) {
        float values[kVec];
        values_of(p, in[i], factors, values);
#pragma unroll
        for (int k = 0; k < kVec; ++k) {
          const uint32_t bits = magnitude_bits(values[k]);
          amaxes[k] = max(amaxes[k], bits);
          row = max(row, bits);
        }
      } else {
#pragma unroll
        for (int w = 0; w < M::kWords; ++w) {
          const uint32_t word = M::of(in[i].words[w]);
          amaxes[w] = M::larger(amaxes[w], word);
          row = M::larger(row, word);
        }
      }
      if (!p.rowwise_scale_inv) continue;
      row = warp_max(row_bits<T>(p, row));
      if (lane == i) of_lane = row;
    }
    if (!p.rowwise_scale_inv) continue;
    if (!has_waited) wait_for_previous_kernel();
    has_waited = true;
    if (lane < kStep && r0 + lane < end) raise(p.rowwise_scale_inv, r0 + lane, of_lane);
  }
  if (!has_waited) wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    warps[warp][i * kPitch + lane] =
        p.column_scale ? amaxes[i] : M::bits(amaxes[i / M::kPerWord], i % M::kPerWord);
  __syncthreads();
  const int64_t c = first + threadIdx.x;
  if (c >= p.cols) return;
  uint32_t amax = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w)
    amax = max(amax, warps[w][threadIdx.x % kVec * kPitch + threadIdx.x / kVec]);
  raise(p.columnwise_scale_inv, c, amax);
}

// Casts a tile by the scales of the amaxes.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kAligned>)
    tiles_kernel(const RowQuantize p, const int64_t first_col) {
  let_next_kernel_start();
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  __shared__ __align__(16) float scales[2 * kBlock];  // of rows, of columns
  const int lane = threadIdx.x % Tile::kLanes, group = threadIdx.x / Tile::kLanes;
  Tile::Place at(p.rows, p.cols, lane, group);
  at.col0 += first_col, at.col += first_col;
  if (at.row0 >= p.rows) return;
  Vec8<T> in[kVec];
  load<kVec, T, kAligned>(p, [&](int i) { return at.row + i; }, [&](int) { return at.col; }, in);
  const Vec8<float> factors = factors_of<kAligned>(p, at.col);
  wait_for_previous_kernel();
  {
    const bool of_row = threadIdx.x < kBlock;
    const float* amaxes = of_row ? p.rowwise_scale_inv : p.columnwise_scale_inv;
    const int64_t i = (of_row ? at.row0 : at.col0) + threadIdx.x % kBlock;
    scales[threadIdx.x] =
        amaxes && i < (of_row ? p.rows : p.cols) ? scale_of(p, amax_of(amaxes, i)) : 1.0f;
  }
  __syncthreads();
  uint2 codes[kVec];
  if (p.rowwise) {
#pragma unroll
    for (int r = 0; r < kVec; ++r) {
      float values[kVec];
      values_of(p, in[r], factors, values);
      const float scale = scales[group * kVec + r];
      codes[r] = encode(p, values, [=](int) { return scale; });
    }
    kAligned ? Tile::store_rows<true>(p.rowwise, p.cols, at, codes)
             : Tile::store_rows_any(p.rowwise, at, codes);
  }
  float by[kVec];
#pragma unroll
  for (int c = 0; c < kVec; ++c) by[c] = scales[kBlock + lane * kVec + c];
#pragma unroll
  for (int r = 0; r < kVec; ++r) {
    float values[kVec];
    values_of(p, in[r], factors, values);
    codes[r] = encode(p, values, [&](int c) { return by[c]; });
  }
  Tile::stage_columns(codes, tile);
  __syncthreads();
  Tile::store_columns_any(p.columnwise, p.ld, at.again(), tile);
}

// Makes scales of amaxes.
__global__ void __launch_bounds__(kThreads) scale_kernel(const RowQuantize p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  wait_for_previous_kernel();
  const auto finish = [&](float* amaxes, int64_t count) {
    if (!amaxes || i >= count) return;
    const uint32_t amax = amax_of(amaxes, i);
    amaxes[i] = inverse_of(p, amax, scale_of(p, amax));
  };
  finish(p.rowwise_scale_inv, p.rows);
  finish(p.columnwise_scale_inv, p.cols);
}

template <typename T, bool kAligned, int kRows>
void launch_rows(const RowQuantize& p, int64_t warps, cudaStream_t stream) {
  const int team_warps = static_cast<int>(warps);
  const int teams = team_warps == 1 ? kWarps : 1;  // of a warp each, which needs no barrier
  const int64_t blocks = (p.rows + teams * kRows - 1) / (teams * kRows);
  rows_kernel<T, kAligned, kRows><<<static_cast<unsigned>(std::min(blocks, kMaxBlocks - 1)),
                                    32 * teams * team_warps, 0, stream>>>(p, team_warps);
  check_cuda(cudaGetLastError(), "row_quantize");
}

// Columns of a slab: all where rows need amaxes of all, where most of the matrix stays in the L2
// cache anyway, where not even a warp's columns do, and where launches would take long.
int64_t slab_cols(const RowQuantize& p, int64_t size) {
  constexpr int64_t kMostSlabs = 8;
  const int64_t most = device_attribute(cudaDevAttrL2CacheSize) / 3, column = p.rows * size;
  if (p.rowwise || p.cols * column <= 2 * most || kWarpCols * column > most) return p.cols;
  const int64_t strips = (p.cols + kWarpCols - 1) / kWarpCols,
                of_slab = most / (kWarpCols * column);
  const int64_t slabs = (strips + of_slab - 1) / of_slab;
  return slabs > kMostSlabs ? p.cols : (strips + slabs - 1) / slabs * kWarpCols;
}

template <typename T, bool kAligned>
void launch(const RowQuantize& p, cudaStream_t stream) {
  if (!p.columnwise_scale_inv) {
    if (p.rows == 0) return;
    const auto warps_of = [&](int64_t vecs) {  // that hold so many of a row
      return std::max<int64_t>((p.cols + vecs * kWarpCols - 1) / (vecs * kWarpCols), 1);
    };
    // Two rows at once where one would leave more than an eighth of its warps' vectors unused, or
    // where they share scales of columns.
    const int64_t of_two = warps_of(kHeld / 2), of_one = warps_of(kHeld);
    const bool fills = 8 * p.cols >= 7 * of_one * kHeld * kWarpCols;
    if (!kAligned || (of_two <= kWarps && (p.column_scale || !fills)))
      return launch_rows<T, kAligned, 2>(p, std::min<int64_t>(of_two, kWarps), stream);
    const int64_t warps = std::min<int64_t>(of_one, kWarps);
    return launch_rows<T, true, 1>(p, warps, stream);
  }
  const int64_t lines = std::max(p.cols, p.rowwise_scale_inv ? p.rows : 0);
  if (lines == 0) return;
  const auto line_blocks = static_cast<unsigned>((lines + kThreads - 1) / kThreads);
  clear_kernel<<<line_blocks, kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "row_quantize");
  const int64_t width = p.rows > 0 ? slab_cols(p, sizeof(T)) : p.cols;
  const int64_t block_rows = (width < p.cols ? 2 : 4) * kAmaxRows;
  for (int64_t col = 0; col < p.cols && p.rows > 0; col += width) {
    const int64_t cols = std::min(width, p.cols - col);
    const dim3 grid = grid_of((p.rows + block_rows - 1) / block_rows,
                              (cols + kWarpCols - 1) / kWarpCols, "row_quantize");
    launch_dependent_grid(amax_kernel<T, kAligned>, grid, kThreads, 0, stream, p, col, block_rows);
    launch_dependent_grid(tiles_kernel<T, kAligned>, Tile::grid(p.rows, cols, "row_quantize"),
                          kThreads, 0, stream, p, col);
  }
  launch_dependent(scale_kernel, line_blocks, kThreads, stream, p);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(row_quantize) {
  using namespace apex_te;
  const RowQuantize p = check_row_quantize(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const bool aligned = p.cols % kVec == 0 && is_aligned(p.x, 16) && is_aligned(p.rowwise, 8) &&
                       is_aligned(p.column_scale, 16);
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    aligned ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
  });
}
