// CUDA kernels of row_quantize: a block for each row; for columns, their amaxes first, by atomics
// on the tensor of their scales, then tiles of 128 x 128 (common/gpu/fp8_tile.h).
#include "common/gpu/amax.h"
#include "common/gpu/block_1x128.h"
#include "common/numerics/with_dtype.h"
#include "row_quantize/row_quantize.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

using Tile = BlockTile;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMaxBlocks = 1 << 20;     // of rows; each then takes several
constexpr int64_t kStrip = 32 * kVec;       // columns of a block that looks for amaxes
constexpr int64_t kAmaxRows = 16 * kWarps;  // and its rows
static_assert(Tile::kThreads == kThreads, "a tile's threads");

// 8 elements of a row from column c on, zeros behind the last.
template <typename T, bool kAligned>
__device__ __forceinline__ void load_values(const RowQuantize& p, int64_t r, int64_t c,
                                            float* values) {
  const T* x = static_cast<const T*>(p.x) + r * p.cols + c;
  unpack(kAligned ? load_vec(x) : load_partial(x, p.cols - c), values);
  if (!p.column_scale) return;
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (kAligned || c + i < p.cols) values[i] *= p.column_scale[c + i];
}

template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads) rows_kernel(const RowQuantize p) {
  __shared__ uint32_t warps[kWarps];
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    uint32_t amax = 0;
    float values[kVec];
    for (int64_t c = threadIdx.x * kVec; c < p.cols; c += kThreads * kVec) {
      load_values<T, kAligned>(p, r, c, values);
      fold_amax(values, amax);
    }
    stage_amax(amax, warps);
    __syncthreads();
    amax = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) amax = max(amax, warps[w]);
    const float scale = p.rule.template scale_of<Format::kDivides>(amax);
    if (threadIdx.x == 0)
      p.rowwise_scale_inv[r] = p.rule.template inverse_of<Format::kDivides>(amax, scale);
    uint8_t* out = p.rowwise + r * p.cols;
    for (int64_t c = threadIdx.x * kVec; c < p.cols; c += kThreads * kVec) {
      load_values<T, kAligned>(p, r, c, values);
      const uint2 codes = encode_row<float>(Format{}, values, scale);
      if (kAligned)
        *reinterpret_cast<uint2*>(out + c) = codes;
      else
        store_codes_partial(out + c, codes, p.cols - c);
    }
    __syncthreads();  // before the next row's amaxes
  }
}

// Raises the amaxes of 256 columns, bits in columnwise_scale_inv, to those of kAmaxRows rows.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) column_amax_kernel(const RowQuantize p) {
  __shared__ uint32_t warps[kWarps][kStrip];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kStrip, col = first + lane * kVec;
  const int64_t row0 = block_row() * kAmaxRows;
  if (row0 >= p.rows) return;
  const int64_t end = min(p.rows, row0 + kAmaxRows);
  uint32_t amaxes[kVec] = {};
  if (col < p.cols) {
    for (int64_t r = row0 + warp; r < end; r += kWarps) {
      float values[kVec];
      load_values<T, kAligned>(p, r, col, values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) amaxes[i] = max(amaxes[i], magnitude_bits(values[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) warps[warp][i * 32 + lane] = amaxes[i];
  __syncthreads();
  const int i = threadIdx.x / 32;  // column `i` of a lane's eight
  const int64_t c = first + lane * kVec + i;
  if (c >= p.cols) return;
  uint32_t amax = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) amax = max(amax, warps[w][i * 32 + lane]);
  atomicMax(reinterpret_cast<unsigned int*>(p.columnwise_scale_inv) + c, amax);
}

template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2) columns_kernel(const RowQuantize p) {
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  __shared__ float scales[Tile::kTileCols];
  const int lane = threadIdx.x % Tile::kLanes;
  const Tile::Place at(p.rows, p.cols, lane, threadIdx.x / Tile::kLanes);
  if (at.row0 >= p.rows) return;
  if (threadIdx.x < Tile::kTileCols && at.col0 + threadIdx.x < p.cols)
    scales[threadIdx.x] = p.rule.template scale_of<Format::kDivides>(
        float_bits(p.columnwise_scale_inv[at.col0 + threadIdx.x]));
  __syncthreads();
  uint2 codes[Tile::kRows] = {};
  if (at.col < p.cols) {
    using By = Scaling<float, Format::kDivides>;
    By by[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) by[c] = By(scales[lane * kVec + c]);
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r) {
      if (at.row + r >= p.rows) break;
      float values[kVec];
      load_values<T, kAligned>(p, at.row + r, at.col, values);
#pragma unroll
      for (int c = 0; c < kVec; ++c) values[c] = by[c](values[c]);
      codes[r] = Format{}.encode(values);
    }
  }
  Tile::stage_columns(codes, tile);
  __syncthreads();
  Tile::store_columns_any(p.columnwise, p.ld, at.again(), tile);
}

// Makes scales of the columns' amaxes.
template <bool kDivides>
__global__ void __launch_bounds__(kThreads) column_scale_kernel(const RowQuantize p) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= p.cols) return;
  const uint32_t amax = float_bits(p.columnwise_scale_inv[c]);
  p.columnwise_scale_inv[c] =
      p.rule.template inverse_of<kDivides>(amax, p.rule.template scale_of<kDivides>(amax));
}

void check_launch() { check_cuda(cudaGetLastError(), "row_quantize"); }

template <typename T, typename Format, bool kAligned>
void launch(const RowQuantize& p, cudaStream_t stream) {
  if (p.rowwise_scale_inv && p.rows > 0) {
    const auto blocks = static_cast<unsigned>(p.rows < kMaxBlocks ? p.rows : kMaxBlocks);
    rows_kernel<T, Format, kAligned><<<blocks, kThreads, 0, stream>>>(p);
    check_launch();
  }
  if (!p.columnwise_scale_inv || p.cols == 0) return;
  const auto bytes = static_cast<size_t>(p.cols) * sizeof(float);
  check_cuda(cudaMemsetAsync(p.columnwise_scale_inv, 0, bytes, stream), "row_quantize");
  if (p.rows > 0) {
    const dim3 grid = grid_of((p.rows + kAmaxRows - 1) / kAmaxRows, (p.cols + kStrip - 1) / kStrip,
                              "row_quantize");
    column_amax_kernel<T, kAligned><<<grid, kThreads, 0, stream>>>(p);
    check_launch();
    const dim3 tiles = Tile::grid(p.rows, p.cols, "row_quantize");
    columns_kernel<T, Format, kAligned><<<tiles, kThreads, 0, stream>>>(p);
    check_launch();
  }
  const auto blocks = static_cast<unsigned>((p.cols + kThreads - 1) / kThreads);
  column_scale_kernel<Format::kDivides><<<blocks, kThreads, 0, stream>>>(p);
  check_launch();
}

template <typename T, typename Format>
void launch_format(const RowQuantize& p, cudaStream_t stream) {
  const bool aligned = p.cols % kVec == 0 && is_aligned(p.x, 16) && is_aligned(p.rowwise, 8);
  aligned ? launch<T, Format, true>(p, stream) : launch<T, Format, false>(p, stream);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(row_quantize) {
  using namespace apex_te;
  const RowQuantize p = check_row_quantize(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_divides(p.rule, [&](auto divides) {
      constexpr bool kDivides = decltype(divides)::value;
      p.fp8 == DType::kE5M2 ? launch_format<T, OneFormat<E5M2, kDivides>>(p, stream)
                            : launch_format<T, OneFormat<E4M3, kDivides>>(p, stream);
    });
  });
}
