// CUDA kernels of cast_transpose.
//
// Rowwise only: vectors of 16 bytes in and 8 out, two in flight for each thread.
// With the transposed copy: tiles of 256 x 128; a thread loads 8 rows of 8 columns (16 bytes each,
// all in flight), encodes them, stores the rows, transposes its 8 x 8 codes in registers and passes
// them through shared memory, so that every column of the tile leaves as 256 contiguous bytes. The
// shared tile is swizzled: both its sides are free of bank conflicts.
#include <type_traits>

#include "cast_transpose/cast_transpose.h"
#include "common/gpu.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kTileRows = kCastTransposeTileRows;
constexpr int kTileCols = 128;
constexpr int kVec = 8;                   // columns of one thread
constexpr int kLanes = kTileCols / kVec;  // threads across a tile
constexpr int kRows = kCastTransposeRowsPerThread;
constexpr int kTileThreads = kLanes * kTileRows / kRows;
constexpr int kThreads = 256;  // of the rowwise kernel
constexpr int kSteps = 2;      // vectors a thread of the rowwise kernel has in flight

constexpr int kDbiasThreads = 64;

struct Params {
  const void* x;
  int64_t rows, cols;
  const float* scale;
  uint8_t *rowwise, *transposed;
  float *amax, *scale_inv, *workspace;
  const int32_t* noop;
};

// 8 consecutive elements as they were loaded: 16 bytes, 32 for float.
template <typename T>
struct Vec8 {
  uint32_t words[2 * sizeof(T)];
};

template <typename T>
__device__ __forceinline__ Vec8<T> load_vec(const T* p) {
  Vec8<T> v;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) {
    const uint4 w = reinterpret_cast<const uint4*>(p)[i];
    v.words[4 * i] = w.x;
    v.words[4 * i + 1] = w.y;
    v.words[4 * i + 2] = w.z;
    v.words[4 * i + 3] = w.w;
  }
  return v;
}

// The first n of 8 elements, one by one; the rest are zero.
template <typename T>
__device__ __forceinline__ Vec8<T> load_partial(const T* p, int64_t n) {
  Vec8<T> v = {};
  using Bits = typename std::conditional<sizeof(T) == 4, uint32_t, uint16_t>::type;
  const Bits* bits = reinterpret_cast<const Bits*>(p);
  constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (i < n) v.words[i / kPerWord] |= static_cast<uint32_t>(bits[i]) << 16 * (i % kPerWord);
  return v;
}

// Elements 2i and 2i + 1 as floats.
__device__ __forceinline__ float2 pair_of(const Vec8<float>& v, int i) {
  return make_float2(__uint_as_float(v.words[2 * i]), __uint_as_float(v.words[2 * i + 1]));
}
__device__ __forceinline__ float2 pair_of(const Vec8<BFloat16>& v, int i) {
  return make_float2(__uint_as_float(v.words[i] << 16), __uint_as_float(v.words[i] & 0xFFFF0000u));
}
__device__ __forceinline__ float2 pair_of(const Vec8<Half>& v, int i) {
  return make_float2(to_float(Half{static_cast<uint16_t>(v.words[i])}),
                     to_float(Half{static_cast<uint16_t>(v.words[i] >> 16)}));
}

// Running maximum of magnitudes, kept as the type's own bits: two at a time for 16-bit types, which
// order like their values (NaN above infinity).
template <typename T>
__device__ __forceinline__ void fold_amax(const Vec8<T>& v, uint32_t& amax) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(2 * sizeof(T)); ++i)
    amax = sizeof(T) == 4 ? max(amax, v.words[i] & 0x7FFFFFFFu)
                          : max_u16x2(amax, v.words[i] & 0x7FFF7FFFu);
}
__device__ __forceinline__ uint32_t amax_bits(float, uint32_t amax) { return amax; }
__device__ __forceinline__ uint32_t amax_bits(BFloat16, uint32_t amax) {
  return max(amax << 16, amax & 0xFFFF0000u);
}
__device__ __forceinline__ uint32_t amax_bits(Half, uint32_t amax) {
  const uint32_t bits = max(amax & 0xFFFFu, amax >> 16);
  return float_bits(to_float(Half{static_cast<uint16_t>(bits)}));
}

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

// The tensor's amax so far, read by thread 0 while the data loads. A later, larger value only makes
// the atomic at the end superfluous.
__device__ __forceinline__ uint32_t amax_so_far(const Params& p) {
  return p.amax && threadIdx.x == 0 ? *reinterpret_cast<volatile uint32_t*>(p.amax) : 0u;
}
// Each warp leaves its amax; after a barrier thread 0 folds them into the tensor's. The atomic
// comes last in a kernel and returns nothing: no thread waits for it.
__device__ __forceinline__ void stage_amax(uint32_t amax, uint32_t* warps) {
  amax = warp_max(amax);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
}
template <int kBlock>
__device__ __forceinline__ void finish_scalars(const Params& p, float scale, uint32_t seen,
                                               const uint32_t* warps) {
  if (threadIdx.x != 0) return;
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kBlock / 32; ++i) amax = max(amax, warps[i]);
  if (p.amax && amax > seen) atomicMax(reinterpret_cast<unsigned int*>(p.amax), amax);
  if (blockIdx.x == 0 && p.scale_inv) *p.scale_inv = 1.0f / scale;
}

// Transposes 4 x 4 bytes held in four words.
__device__ __forceinline__ void transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                           uint32_t* out) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab_low, cd_low, 0x5410);
  out[1] = __byte_perm(ab_low, cd_low, 0x7632);
  out[2] = __byte_perm(ab_high, cd_high, 0x5410);
  out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// Place of an 8-byte chunk (8 rows of one column) in the shared tile.
__device__ __forceinline__ int chunk_of(int col, int row_chunk) {
  return col * (kTileRows / 8) + (row_chunk ^ (col / kVec));
}

// Where a thread works: its first row and column, and its tile's.
struct Place {
  int64_t row0, col0, row, col;
  __device__ explicit Place(const Params& p) {
    const int64_t col_tiles = (p.cols + kTileCols - 1) / kTileCols;
    const int64_t row_tile = blockIdx.x / col_tiles;
    row0 = row_tile * kTileRows;
    col0 = (blockIdx.x - row_tile * col_tiles) * kTileCols;
    row = row0 + threadIdx.x / kLanes * kRows;
    col = col0 + threadIdx.x % kLanes * kVec;
  }
};

template <typename T, bool kAligned>
__device__ __forceinline__ void load_tile(const Params& p, const Place& at, Vec8<T>* in) {
  const T* x = static_cast<const T*>(p.x) + at.row * p.cols + at.col;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (kAligned) {
      in[r] = at.row + r < p.rows && at.col < p.cols ? load_vec(x + r * p.cols) : Vec8<T>{};
    } else {
      in[r] = load_partial(x + r * p.cols, at.row + r < p.rows ? p.cols - at.col : 0);
    }
  }
}

template <bool kAligned>
__device__ __forceinline__ void store_rows(const Params& p, const Place& at, const uint2* codes) {
  uint8_t* out = p.rowwise + at.row * p.cols + at.col;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (at.row + r >= p.rows) break;
    if (kAligned) {
      if (at.col < p.cols) *reinterpret_cast<uint2*>(out + r * p.cols) = codes[r];
    } else {
#pragma unroll
      for (int c = 0; c < kVec; ++c)
        if (at.col + c < p.cols)
          out[r * p.cols + c] =
              static_cast<uint8_t>((c < 4 ? codes[r].x : codes[r].y) >> 8 * (c % 4));
    }
  }
}

// A thread's 8 x 8 codes, transposed, into the shared tile.
__device__ __forceinline__ void stage_columns(const uint2* codes, uint2* tile) {
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  uint32_t low[kVec], high[kVec];  // of column c: rows 0-3 and 4-7
  transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, low);
  transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, low + 4);
  transpose4(codes[4].x, codes[5].x, codes[6].x, codes[7].x, high);
  transpose4(codes[4].y, codes[5].y, codes[6].y, codes[7].y, high + 4);
#pragma unroll
  for (int c = 0; c < kVec; ++c)
    tile[chunk_of(lane * kVec + c, group)] = make_uint2(low[c], high[c]);
}

// The shared tile to the transposed output: 16 threads write the 256 bytes of one column.
template <bool kAligned>
__device__ __forceinline__ void store_columns(const Params& p, const Place& at, const uint2* tile) {
  constexpr int kParts = kTileRows / 16;
  const int part = threadIdx.x % kParts;
#pragma unroll
  for (int c = threadIdx.x / kParts; c < kTileCols; c += kTileThreads / kParts) {
    if (at.col0 + c >= p.cols) break;
    const int swizzle = c / kVec;
    const uint4 pair = reinterpret_cast<const uint4*>(tile)[c * kParts + (part ^ (swizzle >> 1))];
    const uint4 bytes = swizzle & 1 ? make_uint4(pair.z, pair.w, pair.x, pair.y) : pair;
    uint8_t* out = p.transposed + (at.col0 + c) * p.rows + at.row0 + part * 16;
    if (kAligned) {
      if (at.row0 + part * 16 < p.rows) *reinterpret_cast<uint4*>(out) = bytes;
    } else {
      const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (at.row0 + part * 16 + i < p.rows)
          out[i] = static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4));
    }
  }
}

// kAligned: x, the outputs and both extents allow vector accesses without a bounds check inside
// a vector. Otherwise every access is checked and done by element.
template <typename T, typename Format, bool kAligned, bool kDbias>
__global__ void __launch_bounds__(kTileThreads, 2) cast_transpose_tile_kernel(const Params p) {
  if (p.noop && *p.noop != 0) return;
  __shared__ uint32_t warp_amaxes[kTileThreads / 32];
  __shared__ __align__(16) uint2 tile[kTileRows * kTileCols / 8];
  __shared__ float sums[kDbias ? kTileThreads / 32 : 1][kDbias ? kTileCols : 1];
  const Place at(p);
  Vec8<T> in[kRows];
  load_tile<T, kAligned>(p, at, in);
  const float scale = *p.scale;
  const uint32_t seen = amax_so_far(p);
  uint32_t amax = 0;
  uint2 codes[kRows];
  float column_sums[kVec] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    fold_amax(in[r], amax);
    codes[r] = encode_vec<T, Format>(in[r], scale, kDbias ? column_sums : nullptr);
  }
  if (p.rowwise) store_rows<kAligned>(p, at, codes);
  if (p.transposed) stage_columns(codes, tile);
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
  if (p.transposed) store_columns<kAligned>(p, at, tile);
  if (kDbias && at.row0 < p.rows && threadIdx.x < kTileCols && at.col0 + threadIdx.x < p.cols) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kTileThreads / 32; ++w) sum += sums[w][threadIdx.x];
    p.workspace[at.row0 / kTileRows * p.cols + at.col0 + threadIdx.x] = sum;
  }
  finish_scalars<kTileThreads>(p, scale, seen, warp_amaxes);
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
  const uint32_t seen = amax_so_far(p);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t i = begin + k * kThreads * kVec;
    fold_amax(in[k], amax);
    const uint2 codes = encode_vec<T, Format>(in[k], scale);
    if (!p.rowwise) continue;
    if (kAligned && i + kVec <= numel) {
      *reinterpret_cast<uint2*>(p.rowwise + i) = codes;
    } else {
#pragma unroll
      for (int c = 0; c < kVec; ++c)
        if (i + c < numel)
          p.rowwise[i + c] = static_cast<uint8_t>((c < 4 ? codes.x : codes.y) >> 8 * (c % 4));
    }
  }
  stage_amax(amax_bits(T{}, amax), warp_amaxes);
  __syncthreads();
  finish_scalars<kThreads>(p, scale, seen, warp_amaxes);
}

// Adds the tiles' sums of a column in order of rows.
template <typename T>
__global__ void dbias_kernel(const float* sums, int64_t tiles, int64_t cols, T* dbias,
                             const int32_t* noop) {
  if (noop && *noop != 0) return;
  constexpr int kInFlight = 16;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kDbiasThreads + threadIdx.x;
  if (c >= cols) return;
  float sum = 0.0f;
  int64_t tile = 0;
  for (; tile + kInFlight <= tiles; tile += kInFlight) {
    float parts[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) parts[i] = sums[(tile + i) * cols + c];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) sum += parts[i];
  }
  for (; tile < tiles; ++tile) sum += sums[tile * cols + c];
  dbias[c] = from_float<T>(sum);
}

template <typename T, typename Format>
void launch(const CastTranspose& c, const Params& p, cudaStream_t stream) {
  const bool in_aligned = is_aligned(p.x, 16) && p.cols % kVec == 0;
  if (!p.transposed && !c.dbias) {
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
    const bool aligned = in_aligned && is_aligned(p.rowwise, 8) && is_aligned(p.transposed, 16) &&
                         (p.rows % 16 == 0 || !p.transposed);
    const auto kernel = c.dbias ? (aligned ? cast_transpose_tile_kernel<T, Format, true, true>
                                           : cast_transpose_tile_kernel<T, Format, false, true>)
                                : (aligned ? cast_transpose_tile_kernel<T, Format, true, false>
                                           : cast_transpose_tile_kernel<T, Format, false, false>);
    // An empty x has no tile, but scale_inv is still due: one block writes it.
    kernel<<<static_cast<unsigned>(tiles ? tiles : 1), kTileThreads, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), "cast_transpose");
    if (c.dbias && p.cols)
      dbias_kernel<T>
          <<<static_cast<unsigned>((p.cols + kDbiasThreads - 1) / kDbiasThreads), kDbiasThreads, 0,
             stream>>>(p.workspace, row_tiles, p.cols, c.dbias.data<T>(), p.noop);
  }
  check_cuda(cudaGetLastError(), "cast_transpose");
}

template <typename T>
void launch_format(const CastTranspose& c, const Params& p, cudaStream_t stream) {
  c.fp8 == DType::kE5M2 ? launch<T, E5M2>(c, p, stream) : launch<T, E4M3>(c, p, stream);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(cast_transpose) {
  using namespace apex_te;
  const CastTranspose c = check_cast_transpose(args);
  const DeviceGuard guard(args.device_id());
  const Params p{c.x.data<void>(), c.rows, c.cols,      c.scale,     c.rowwise,
                 c.transposed,     c.amax, c.scale_inv, c.workspace, c.noop};
  const auto stream = static_cast<cudaStream_t>(args.stream());
  switch (c.x.dtype()) {
    case DType::kFloat32:
      return launch_format<float>(c, p, stream);
    case DType::kFloat16:
      return launch_format<Half>(c, p, stream);
    default:
      return launch_format<BFloat16>(c, p, stream);
  }
}
