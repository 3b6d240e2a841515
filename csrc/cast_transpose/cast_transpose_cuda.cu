// CUDA kernels of cast_transpose.
//
// Rowwise only: vectors of 16 bytes in and 8 out, two in flight for each thread.
// With the columnwise copy: tiles of 256 x 128 (common/gpu/fp8_tile.h); a thread's 8 loads of 16
// bytes are all in flight.
#include "cast_transpose/cast_transpose.h"
#include "common/gpu/column_sums.h"
#include "common/gpu/fp8_tile.h"
#include "common/numerics/with_dtype.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

using Tile = FP8Tile<kCastTransposeTileRows>;
constexpr int kTileRows = kCastTransposeTileRows;
constexpr int kTileCols = Tile::kTileCols;
constexpr int kLanes = Tile::kLanes;
constexpr int kRows = Tile::kRows;
static_assert(kRows == kCastTransposeRowsPerThread, "rows of one partial bias sum");
constexpr int kTileThreads = Tile::kThreads;
constexpr int kThreads = 256;  // of the rowwise kernel
constexpr int kSteps = 2;      // vectors a thread of the rowwise kernel has in flight

struct Params {
  const void* x;
  int64_t rows, cols;
  const float* scale;
  uint8_t *rowwise, *columnwise;
  int64_t ld;  // row length of columnwise
  float *amax, *scale_inv, *workspace;
  void* dbias;  // written by the tiles themselves if there is one row of tiles, else null
  const int32_t* noop;
};

// Encodes 8 values to 8 bytes and adds them to sums, if any.
template <typename T, typename Format>
__device__ __forceinline__ uint2 encode_vec(const Vec8<T>& v, float scale, float* sums = nullptr) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = pair_of(v, i);
    pairs[i] = encode_fp8x2<Format>(pair.x * scale, pair.y * scale);
    if (sums) {
      sums[2 * i] += pair.x;
      sums[2 * i + 1] += pair.y;
    }
  }
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Shared memory of a block that casts a tile.
template <bool kDbias>
struct TileMemory {
  __align__(16) uint2 tile[Tile::kSharedWords];
  uint32_t warp_amaxes[kTileThreads / 32];
  float sums[kDbias ? kTileThreads / 32 : 1][kDbias ? kTileCols : 1];
};

// Casts tile number `index`. kAligned: x, the outputs and both extents allow vector accesses
// without a bounds check inside a vector. Otherwise vectors are shifted to where they lie
// (common/gpu/shifted.h).
template <typename T, typename Format, bool kAligned, bool kDbias, typename Memory>
__device__ __forceinline__ void cast_tile(const Params& p, unsigned index, Memory& memory) {
  uint32_t* warp_amaxes = memory.warp_amaxes;
  uint2* tile = memory.tile;
  auto& sums = memory.sums;
  const Tile::Place at(p.rows, p.cols, index);
  Vec8<T> in[kRows];
  const T* x = static_cast<const T*>(p.x);
  kAligned ? Tile::load<T, true>(x, p.cols, at, in) : Tile::load_any(x, at, in);
  const float scale = *p.scale;
  const uint32_t seen = amax_so_far(p.amax);
  uint32_t amax = 0;
  uint2 codes[kRows];
  float column_sums[kVec] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    fold_amax(in[r], amax);
    codes[r] = encode_vec<T, Format>(in[r], scale, kDbias ? column_sums : nullptr);
  }
  if (p.rowwise)
    kAligned ? Tile::store_rows<true>(p.rowwise, p.cols, at, codes)
             : Tile::store_rows_any(p.rowwise, at, codes);
  if (p.columnwise) Tile::stage_columns(codes, tile);
  if (kDbias) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      // The upper half of a warp holds the next rows of the same columns.
      const float sum = column_sums[c] + __shfl_down_sync(0xFFFFFFFFu, column_sums[c], kLanes);
      if (threadIdx.x % 32 < kLanes) sums[threadIdx.x / 32][threadIdx.x % kLanes * kVec + c] = sum;
    }
  }
  stage_amax(amax_bits(T{}, amax), warp_amaxes);
  __syncthreads();
  const Tile::Place to = at.again();
  if (p.columnwise)
    kAligned ? Tile::store_columns<true>(p.columnwise, p.ld, to, tile)
             : Tile::store_columns_any(p.columnwise, p.ld, to, tile);
  if (kDbias && to.row0 < p.rows && threadIdx.x < kTileCols && to.col0 + threadIdx.x < p.cols) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kTileThreads / 32; ++w) sum += sums[w][threadIdx.x];
    const int64_t col = to.col0 + threadIdx.x;
    if (p.dbias)  // 0.0f makes -0 a 0, as the sum of several lines does
      static_cast<T*>(p.dbias)[col] = from_float<T>(sum + 0.0f);
    else
      p.workspace[to.row0 / kTileRows * p.cols + col] = sum;
  }
  finish_amax<kTileThreads>(p.amax, seen, warp_amaxes);
  if (index == 0 && threadIdx.x == 0 && p.scale_inv) *p.scale_inv = 1.0f / scale;
}

template <typename T, typename Format, bool kAligned, bool kDbias>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 4 && !kAligned ? 1 : 2)
    cast_transpose_tile_kernel(const Params p) {
  if (p.noop && *p.noop != 0) return;
  __shared__ TileMemory<kDbias> memory;
  cast_tile<T, Format, kAligned, kDbias>(p, blockIdx.x, memory);
}

// The first `tiles` blocks cast the first matrix, the others the second one.
template <typename Format, bool kDbias>
__global__ void __launch_bounds__(kTileThreads, 2)
    cast_transpose_pair_kernel(const Params first, const Params second, const unsigned tiles) {
  __shared__ TileMemory<kDbias> memory;
  if (blockIdx.x < tiles)
    cast_tile<BFloat16, Format, true, kDbias>(first, blockIdx.x, memory);
  else
    cast_tile<BFloat16, E4M3, true, false>(second, blockIdx.x - tiles, memory);
}

// Rowwise, or amax alone: no tile. A step is kSteps vectors a thread, all in flight.
template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads) cast_rowwise_kernel(const Params p) {
  if (p.noop && *p.noop != 0) return;
  __shared__ uint32_t warp_amaxes[kThreads / 32];
  const int64_t numel = p.rows * p.cols;
  const T* x = static_cast<const T*>(p.x);
  uint32_t amax = 0;
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * kThreads * kSteps + threadIdx.x) * kVec;
  Vec8<T> in[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t i = begin + k * kThreads * kVec;
    in[k] = kAligned && i + kVec <= numel ? load_vec(x + i) : load_partial(x + i, numel - i);
  }
  const float scale = *p.scale;
  const uint32_t seen = amax_so_far(p.amax);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t i = begin + k * kThreads * kVec;
    fold_amax(in[k], amax);
    const uint2 codes = encode_vec<T, Format>(in[k], scale);
    if (!p.rowwise) continue;
    if (kAligned && i + kVec <= numel) {
      *reinterpret_cast<uint2*>(p.rowwise + i) = codes;
    } else {
      store_codes_partial(p.rowwise + i, codes, numel - i);
    }
  }
  stage_amax(amax_bits(T{}, amax), warp_amaxes);
  __syncthreads();
  finish_amax<kThreads>(p.amax, seen, warp_amaxes);
  if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv) *p.scale_inv = 1.0f / scale;
}

template <typename T, typename Format>
void launch(const CastTranspose& c, const Params& p, cudaStream_t stream) {
  const bool in_aligned = is_aligned(p.x, 16) && p.cols % kVec == 0;
  if (!p.columnwise && !c.dbias) {
    const bool aligned = is_aligned(p.x, 16) && is_aligned(p.rowwise, 8);
    constexpr int64_t kPerBlock = kThreads * kSteps * kVec;
    const int64_t blocks = (p.rows * p.cols + kPerBlock - 1) / kPerBlock;
    if (blocks > 0x7FFFFFFF)
      fail(kApexTeUnsupported, "cast_transpose: x must have fewer than 2^44 elements");
    const auto kernel =
        aligned ? cast_rowwise_kernel<T, Format, true> : cast_rowwise_kernel<T, Format, false>;
    kernel<<<static_cast<unsigned>(blocks ? blocks : 1), kThreads, 0, stream>>>(p);
  } else {
    const int64_t row_tiles = (p.rows + kTileRows - 1) / kTileRows;
    const int64_t tiles = row_tiles * ((p.cols + kTileCols - 1) / kTileCols);
    if (tiles > 0x7FFFFFFF)
      fail(kApexTeUnsupported, "cast_transpose: x must have fewer than 2^46 elements");
    const bool aligned = in_aligned && fp8_tile_aligned(p.ld, p.cols, p.rowwise, p.columnwise);
    const auto kernel = c.dbias ? (aligned ? cast_transpose_tile_kernel<T, Format, true, true>
                                           : cast_transpose_tile_kernel<T, Format, false, true>)
                                : (aligned ? cast_transpose_tile_kernel<T, Format, true, false>
                                           : cast_transpose_tile_kernel<T, Format, false, false>);
    // An empty x has no tile, but scale_inv is still due: one block writes it.
    kernel<<<static_cast<unsigned>(tiles ? tiles : 1), kTileThreads, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), "cast_transpose");
    if (c.dbias && !p.dbias)
      launch_column_sums<T>(p.workspace, row_tiles, p.cols, c.dbias.data<T>(), stream, p.noop);
  }
  check_cuda(cudaGetLastError(), "cast_transpose");
}

template <typename T>
void launch_format(const CastTranspose& c, const Params& p, cudaStream_t stream) {
  with_fp8_format(c.fp8, [&](auto format) { launch<T, decltype(format)>(c, p, stream); });
}

void launch_cast(const CastTranspose& c, const Params& p, cudaStream_t stream) {
  with_dtype(c.x.dtype(), [&](auto zero) { launch_format<decltype(zero)>(c, p, stream); });
}

Params params_of(const CastTranspose& c) {
  const bool is_one_line = c.dbias && c.rows > 0 && c.rows <= kTileRows;
  return {c.x.data<void>(),
          c.rows,
          c.cols,
          c.scale,
          c.rowwise,
          c.columnwise,
          c.ld,
          c.amax,
          c.scale_inv,
          c.workspace,
          is_one_line ? c.dbias.data<void>() : nullptr,
          c.noop};
}

// More tiles than this keep a GPU busy for longer than a launch takes.
constexpr int64_t kMaxPairTiles = 528;

// The pair's kernel takes the matrix, as the first or the second of two.
bool fits_pair(const CastTranspose& c, const Params& p, bool is_first) {
  if (c.x.dtype() != DType::kBFloat16 || c.rows == 0 || c.cols == 0) return false;
  if (c.fp8 != DType::kE4M3 && !(is_first && c.fp8 == DType::kE5M2)) return false;
  if (c.dbias && !p.dbias) return false;  // another kernel adds several lines up
  return is_aligned(p.x, 16) && fp8_tile_aligned(p.ld, p.cols, p.rowwise, p.columnwise);
}

template <typename Format>
void launch_pair(const Params& first, const Params& second, int64_t tiles, int64_t all,
                 cudaStream_t stream) {
  const auto kernel = first.dbias ? cast_transpose_pair_kernel<Format, true>
                                  : cast_transpose_pair_kernel<Format, false>;
  kernel<<<static_cast<unsigned>(all), kTileThreads, 0, stream>>>(first, second,
                                                                  static_cast<unsigned>(tiles));
  check_cuda(cudaGetLastError(), "cast_transpose_pair");
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(cast_transpose) {
  using namespace apex_te;
  const CastTranspose c = check_cast_transpose(args);
  const DeviceGuard guard(args.device_id());
  launch_cast(c, params_of(c), static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(cast_transpose_pair) {
  using namespace apex_te;
  const CastTranspose a = check_cast_with_dbias(args), b = check_cast(args);
  const DeviceGuard guard(args.device_id());
  const Params first = params_of(a), second = params_of(b);
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const int64_t tiles = Tile::num_tiles(a.rows, a.cols);
  const int64_t all = tiles + Tile::num_tiles(b.rows, b.cols);
  if (all > kMaxPairTiles || !fits_pair(a, first, true) || !fits_pair(b, second, false)) {
    launch_cast(a, first, stream);
    launch_cast(b, second, stream);
  } else if (a.fp8 == DType::kE5M2) {
    launch_pair<E5M2>(first, second, tiles, all, stream);
  } else {
    launch_pair<E4M3>(first, second, tiles, all, stream);
  }
}
