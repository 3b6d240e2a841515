// CUDA kernels of cast_transpose.
//
// Rowwise only: one vector loop, 32 bytes in and 16 out a step. With the transposed copy: tiles of
// 128 x 128; a thread loads 8 rows of 8 columns (16 bytes each, all in flight), encodes them, stores
// the rows, transposes its 8 x 8 codes in registers and passes them through shared memory, so that
// every row of the transposed output leaves as one full 128-byte line. The shared tile is swizzled:
// both its sides are free of bank conflicts.
#include "cast_transpose/cast_transpose.h"
#include "common/gpu.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kTile = kCastTransposeTile;
constexpr int kThreads = 256;
constexpr int kVec = 8;                  // columns of one thread
constexpr int kLanes = kTile / kVec;     // threads across a tile
constexpr int kRows = kCastTransposeRowsPerThread;

struct Params {
  const void* x;
  int64_t rows, cols;
  const float* scale;
  uint8_t *rowwise, *transposed;
  float *amax, *scale_inv, *workspace;
  const int32_t* noop;
};

template <typename T>
struct Vec8 {
  T values[kVec];
};

template <typename T>
__device__ __forceinline__ Vec8<T> load_vec(const T* p) {
  Vec8<T> v;
  uint4* words = reinterpret_cast<uint4*>(v.values);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Vec8<T>) / 16); ++i)
    words[i] = load_streaming(reinterpret_cast<const uint4*>(p) + i);
  return v;
}

template <typename T>
__device__ __forceinline__ Vec8<T> load_partial(const T* p, int64_t n) {
  Vec8<T> v;
#pragma unroll
  for (int i = 0; i < kVec; ++i) v.values[i] = i < n ? p[i] : T{};
  return v;
}

__device__ __forceinline__ uint32_t block_max(uint32_t value) {
  __shared__ uint32_t warps[kThreads / 32];
  value = warp_max(value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) value = warp_max(threadIdx.x < kThreads / 32 ? warps[threadIdx.x] : 0u);
  return value;
}

// Encodes 8 values to 8 bytes; folds their magnitudes into amax.
template <typename T, typename Format>
__device__ __forceinline__ uint2 encode_vec(const Vec8<T>& v, float scale, uint32_t& amax) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = to_float(v.values[2 * i]), high = to_float(v.values[2 * i + 1]);
    amax = max(amax, max(magnitude_bits(low), magnitude_bits(high)));
    pairs[i] = encode_fp8x2<Format>(low * scale, high * scale);
  }
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
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
  return col * (kTile / 8) + (row_chunk ^ (col / kVec));
}

// kAligned: x, the outputs and both extents allow vector accesses without a bounds check inside
// a vector. Otherwise every access is checked and done by element.
template <typename T, typename Format, bool kAligned, bool kDbias>
__global__ void __launch_bounds__(kThreads) cast_transpose_tile_kernel(const Params p) {
  if (p.noop && *p.noop != 0) return;
  __shared__ uint2 tile[kTile * kTile / 8];
  __shared__ float sums[kDbias ? kThreads / kLanes : 1][kDbias ? kTile : 1];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int64_t col_tiles = (p.cols + kTile - 1) / kTile;
  const int64_t row_tile = blockIdx.x / col_tiles;
  const int64_t row0 = row_tile * kTile, col0 = (blockIdx.x - row_tile * col_tiles) * kTile;
  const int64_t row = row0 + group * kRows, col = col0 + lane * kVec;
  const T* x = static_cast<const T*>(p.x) + row * p.cols + col;

  Vec8<T> in[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (kAligned) {
      in[r] = row + r < p.rows && col < p.cols ? load_vec(x + r * p.cols) : Vec8<T>{};
    } else {
      in[r] = load_partial(x + r * p.cols, row + r < p.rows ? p.cols - col : 0);
    }
  }
  const float scale = *p.scale;
  uint32_t amax = 0;
  uint2 codes[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) codes[r] = encode_vec<T, Format>(in[r], scale, amax);

  if (kDbias) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum += to_float(in[r].values[c]);
      sums[group][lane * kVec + c] = sum;
    }
  }
  if (p.rowwise) {
    uint8_t* out = p.rowwise + row * p.cols + col;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= p.rows) break;
      if (kAligned) {
        if (col < p.cols) store_streaming(reinterpret_cast<uint2*>(out + r * p.cols), codes[r]);
      } else {
#pragma unroll
        for (int c = 0; c < kVec; ++c)
          if (col + c < p.cols)
            out[r * p.cols + c] = static_cast<uint8_t>((c < 4 ? codes[r].x : codes[r].y) >> 8 * (c % 4));
      }
    }
  }
  if (p.transposed) {
    uint32_t low[kVec], high[kVec];  // of column c: rows 0-3 and 4-7
    transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, low);
    transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, low + 4);
    transpose4(codes[4].x, codes[5].x, codes[6].x, codes[7].x, high);
    transpose4(codes[4].y, codes[5].y, codes[6].y, codes[7].y, high + 4);
#pragma unroll
    for (int c = 0; c < kVec; ++c)
      tile[chunk_of(lane * kVec + c, group)] = make_uint2(low[c], high[c]);
  }
  if (p.amax) {
    amax = block_max(amax);
    if (threadIdx.x == 0) atomic_max_magnitude(p.amax, amax);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv) *p.scale_inv = 1.0f / scale;
  __syncthreads();

  if (p.transposed) {
    // 8 threads write the 128 bytes of one column, 16 bytes each.
    const int part = threadIdx.x % 8;
#pragma unroll
    for (int c = threadIdx.x / 8; c < kTile; c += kThreads / 8) {
      if (col0 + c >= p.cols) break;
      const int swizzle = c / kVec;
      const uint4 pair =
          reinterpret_cast<const uint4*>(tile)[c * (kTile / 16) + (part ^ (swizzle >> 1))];
      const uint4 bytes = swizzle & 1 ? make_uint4(pair.z, pair.w, pair.x, pair.y) : pair;
      uint8_t* out = p.transposed + (col0 + c) * p.rows + row0 + part * 16;
      if (kAligned) {
        if (row0 + part * 16 < p.rows) store_streaming(reinterpret_cast<uint4*>(out), bytes);
      } else {
        const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
        for (int i = 0; i < 16; ++i)
          if (row0 + part * 16 + i < p.rows)
            out[i] = static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4));
      }
    }
  }
  if (kDbias && threadIdx.x < kTile && col0 + threadIdx.x < p.cols) {
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < kThreads / kLanes; ++g) sum += sums[g][threadIdx.x];
    p.workspace[row_tile * p.cols + col0 + threadIdx.x] = sum;
  }
}

// Rowwise, or amax alone: no tile. A thread takes 16 elements a step.
template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads) cast_rowwise_kernel(const Params p) {
  if (p.noop && *p.noop != 0) return;
  const int64_t numel = p.rows * p.cols;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * 2 * kVec;
  const float scale = *p.scale;
  const T* x = static_cast<const T*>(p.x);
  uint32_t amax = 0;
  int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 2 * kVec;
  for (; i < numel; i += step) {
    const bool full = kAligned && i + 2 * kVec <= numel;
    const Vec8<T> a = full ? load_vec(x + i) : load_partial(x + i, numel - i);
    const Vec8<T> b = full ? load_vec(x + i + kVec) : load_partial(x + i + kVec, numel - i - kVec);
    const uint2 first = encode_vec<T, Format>(a, scale, amax);
    const uint2 second = encode_vec<T, Format>(b, scale, amax);
    if (!p.rowwise) continue;
    const uint4 bytes = make_uint4(first.x, first.y, second.x, second.y);
    if (full) {
      store_streaming(reinterpret_cast<uint4*>(p.rowwise + i), bytes);
    } else {
      const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int k = 0; k < 16; ++k)
        if (i + k < numel) p.rowwise[i + k] = static_cast<uint8_t>(words[k / 4] >> 8 * (k % 4));
    }
  }
  if (p.amax) {
    amax = block_max(amax);
    if (threadIdx.x == 0) atomic_max_magnitude(p.amax, amax);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv) *p.scale_inv = 1.0f / scale;
}

// Adds the tiles' sums of a column in order of rows.
template <typename T>
__global__ void dbias_kernel(const float* sums, int64_t tiles, int64_t cols, T* dbias,
                             const int32_t* noop) {
  if (noop && *noop != 0) return;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= cols) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t t = 0; t < tiles; ++t) sum += sums[t * cols + c];
  dbias[c] = from_float<T>(sum);
}

template <typename T, typename Format>
void launch(const CastTranspose& c, const Params& p, int device, cudaStream_t stream) {
  const bool in_aligned = is_aligned(p.x, 16) && p.cols % kVec == 0;
  if (!p.transposed && !p.workspace) {
    const bool aligned = is_aligned(p.x, 16) && is_aligned(p.rowwise, 16);
    const int64_t needed = (p.rows * p.cols + kThreads * 2 * kVec - 1) / (kThreads * 2 * kVec);
    const int64_t most = static_cast<int64_t>(num_multiprocessors(device)) * 64;
    const auto kernel =
        aligned ? cast_rowwise_kernel<T, Format, true> : cast_rowwise_kernel<T, Format, false>;
    kernel<<<static_cast<unsigned>(needed < most ? (needed ? needed : 1) : most), kThreads, 0,
             stream>>>(p);
  } else {
    const int64_t tiles = ((p.rows + kTile - 1) / kTile) * ((p.cols + kTile - 1) / kTile);
    if (tiles > 0x7FFFFFFF)
      fail(kApexTeUnsupported, "cast_transpose: x must have fewer than 2^31 tiles of 128 x 128");
    const bool aligned = in_aligned && is_aligned(p.rowwise, 8) && is_aligned(p.transposed, 16) &&
                         (!p.transposed || p.rows % 16 == 0);
    const auto kernel = p.workspace ? (aligned ? cast_transpose_tile_kernel<T, Format, true, true>
                                               : cast_transpose_tile_kernel<T, Format, false, true>)
                                    : (aligned ? cast_transpose_tile_kernel<T, Format, true, false>
                                               : cast_transpose_tile_kernel<T, Format, false, false>);
    // An empty x has no tile, but scale_inv is still due: one block writes it.
    kernel<<<static_cast<unsigned>(tiles ? tiles : 1), kThreads, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), "cast_transpose");
    if (p.workspace && p.cols)
      dbias_kernel<T><<<static_cast<unsigned>((p.cols + 63) / 64), 64, 0, stream>>>(
          p.workspace, (p.rows + kTile - 1) / kTile, p.cols, c.dbias.data<T>(), p.noop);
  }
  check_cuda(cudaGetLastError(), "cast_transpose");
}

template <typename T>
void launch_format(const CastTranspose& c, const Params& p, int device, cudaStream_t stream) {
  c.fp8 == DType::kE5M2 ? launch<T, E5M2>(c, p, device, stream)
                        : launch<T, E4M3>(c, p, device, stream);
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
    case DType::kFloat32: return launch_format<float>(c, p, args.device_id(), stream);
    case DType::kFloat16: return launch_format<Half>(c, p, args.device_id(), stream);
    default: return launch_format<BFloat16>(c, p, args.device_id(), stream);
  }
}
