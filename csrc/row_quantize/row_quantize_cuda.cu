// CUDA kernels of row_quantize: a row in the registers of some warps, which read the rest of a long
// one again; for columns, their amaxes first, by atomics on the tensor of their scales, then tiles
// of 128 x 128 (common/gpu/fp8_tile.h).
#include <algorithm>

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
constexpr int kHeld = 8;                           // vectors of a row that a thread holds
constexpr int64_t kMaxBlocks = 1LL << 31;          // of rows; each then takes several
constexpr int64_t kStrip = 32 * kVec;              // columns of a block that looks for amaxes
constexpr int kStep = 4;                           // rows of a warp whose loads are in flight
constexpr int64_t kAmaxRows = 4 * kStep * kWarps;  // and of a block
static_assert(Tile::kThreads == kThreads, "a tile's threads");

// 8 elements from number i on, of which n are left in the row; zeros behind them.
template <typename T, bool kAligned>
__device__ __forceinline__ Vec8<T> load(const RowQuantize& p, int64_t i, int64_t n) {
  const T* x = static_cast<const T*>(p.x);
  if (!kAligned) return load_shifted(x + i, n, x, x + p.rows * p.cols);
  return n > 0 ? load_vec(x + i) : Vec8<T>{};
}

// The values of 8 elements from column c on.
template <typename T, bool kAligned>
__device__ __forceinline__ void values_of(const RowQuantize& p, const Vec8<T>& v, int64_t c,
                                          float* values) {
  unpack(v, values);
  if (!p.column_scale || c >= p.cols) return;
  const float* from = p.column_scale + c;
  const Vec8<float> scales = kAligned ? load_vec(from) : load_partial(from, p.cols - c);
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] *= __uint_as_float(scales.words[i]);
}

// Raises an amax, unless it is seen to be as large; it may be seen late.
__device__ __forceinline__ void raise(float* amax, uint32_t bits) {
  if (bits > *reinterpret_cast<const volatile uint32_t*>(amax))
    atomicMax(reinterpret_cast<unsigned int*>(amax), bits);
}

template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, kAligned && sizeof(T) == 2 ? 3 : 2)
    rows_kernel(const RowQuantize p, const Format format) {
  __shared__ uint32_t warps[kWarps];
  const int64_t step = static_cast<int64_t>(blockDim.x) * kVec, first = threadIdx.x * kVec;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const int64_t begin = r * p.cols;
    Vec8<T> in[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t c = k * step + first;
      in[k] = load<T, kAligned>(p, begin + c, p.cols - c);
    }
    uint32_t amax = 0;
    const auto fold = [&](const Vec8<T>& v, int64_t c) {
      float values[kVec];
      values_of<T, kAligned>(p, v, c, values);
      fold_amax(values, amax);
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) fold(in[k], k * step + first);
    for (int64_t c = kHeld * step + first; c < p.cols; c += step)
      fold(load<T, kAligned>(p, begin + c, p.cols - c), c);
    stage_amax(amax, warps);
    __syncthreads();
    amax = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) amax = max(amax, warps[w]);
    const float scale = p.rule.template scale_of<Format::kDivides>(amax);
    if (threadIdx.x == 0)
      p.rowwise_scale_inv[r] = p.rule.template inverse_of<Format::kDivides>(amax, scale);
    const int lane = threadIdx.x % 32;
    const auto store = [&](const Vec8<T>& v, int64_t c) {
      float values[kVec];
      values_of<T, kAligned>(p, v, c, values);
      const uint2 codes = encode_row<float>(format, values, scale);
      uint8_t* out = p.rowwise + begin + c;
      if (!kAligned)
        store_codes_shifted(out, codes, p.cols - c, lane, 32, true);
      else if (c < p.cols)
        *reinterpret_cast<uint2*>(out) = codes;
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) store(in[k], k * step + first);
    for (int64_t c = kHeld * step + first; c - lane * kVec < p.cols; c += step)
      store(load<T, kAligned>(p, begin + c, p.cols - c), c);
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
  for (int64_t r0 = row0 + warp; r0 < end; r0 += kStep * kWarps) {
    Vec8<T> in[kStep];
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      const int64_t r = r0 + k * kWarps;
      in[k] = load<T, kAligned>(p, r * p.cols + col, r < end ? p.cols - col : 0);
    }
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      float values[kVec];
      values_of<T, kAligned>(p, in[k], col, values);
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
  raise(p.columnwise_scale_inv + c, amax);
}

template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    columns_kernel(const RowQuantize p, const Format format) {
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  __shared__ float scales[Tile::kTileCols];
  const int lane = threadIdx.x % Tile::kLanes;
  const Tile::Place at(p.rows, p.cols, lane, threadIdx.x / Tile::kLanes);
  if (at.row0 >= p.rows) return;
  Vec8<T> in[Tile::kRows];
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r)
    in[r] = load<T, kAligned>(p, (at.row + r) * p.cols + at.col,
                              at.row + r < p.rows ? p.cols - at.col : 0);
  if (threadIdx.x < Tile::kTileCols && at.col0 + threadIdx.x < p.cols)
    scales[threadIdx.x] = p.rule.template scale_of<Format::kDivides>(
        float_bits(p.columnwise_scale_inv[at.col0 + threadIdx.x]));
  __syncthreads();
  using By = Scaling<float, Format::kDivides>;
  By by[kVec];
#pragma unroll
  for (int c = 0; c < kVec; ++c) by[c] = By(at.col + c < p.cols ? scales[lane * kVec + c] : 1.0f);
  uint2 codes[Tile::kRows];
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r) {
    float values[kVec];
    values_of<T, kAligned>(p, in[r], at.col, values);
#pragma unroll
    for (int c = 0; c < kVec; ++c) values[c] = by[c](values[c]);
    codes[r] = format.encode(values);
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
void launch(const RowQuantize& p, const Format& format, cudaStream_t stream) {
  if (p.rowwise_scale_inv && p.rows > 0) {
    constexpr int64_t kOfWarp = 32 * kHeld * kVec;
    const int64_t warps = std::min<int64_t>((p.cols + kOfWarp - 1) / kOfWarp, kWarps);
    const int threads = 32 * static_cast<int>(std::max<int64_t>(warps, 1));
    const auto blocks = static_cast<unsigned>(std::min(p.rows, kMaxBlocks - 1));
    rows_kernel<T, Format, kAligned><<<blocks, threads, 0, stream>>>(p, format);
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
    columns_kernel<T, Format, kAligned><<<tiles, kThreads, 0, stream>>>(p, format);
    check_launch();
  }
  const auto blocks = static_cast<unsigned>((p.cols + kThreads - 1) / kThreads);
  column_scale_kernel<Format::kDivides><<<blocks, kThreads, 0, stream>>>(p);
  check_launch();
}

template <typename T, bool kDivides>
void launch_format(const RowQuantize& p, cudaStream_t stream) {
  const bool aligned = p.cols % kVec == 0 && is_aligned(p.x, 16) && is_aligned(p.rowwise, 8) &&
                       is_aligned(p.column_scale, 16);
  const AnyFormat<kDivides> format{p.fp8 == DType::kE5M2};
  aligned ? launch<T, AnyFormat<kDivides>, true>(p, format, stream)
          : launch<T, AnyFormat<kDivides>, false>(p, format, stream);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(row_quantize) {
  using namespace apex_te;
  const RowQuantize p = check_row_quantize(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(p.dtype, [&](auto zero) {
    with_divides(p.rule, [&](auto divides) {
      launch_format<decltype(zero), decltype(divides)::value>(p, stream);
    });
  });
}
