// Kernels of quantizers with one scale for the tensor: rowwise, columnwise or both in one read.
//
// With a scale of this very tensor a first kernel leaves partial amaxes in a workspace, which needs
// no initial value; every block of the second reduces them again. The second goes through x in the
// opposite order, so that what the first read last comes from the L2 cache, and has its loads in
// flight before it waits for the first.
//
// Source: where the scale comes from (CurrentScale, GivenScale). Encoder: the format.
#pragma once

#include "common/gpu/dependent_launch.h"
#include "common/gpu/fp8_tile.h"
#include "common/numerics/quantize.h"
#include "common/numerics/scaling.h"

namespace apex_te {

using QuantizeTile = FP8Tile<256>;
constexpr int kQuantizeThreads = QuantizeTile::kThreads;
constexpr int kQuantizeVecs = QuantizeTile::kRows;  // 16-byte loads that a thread has in flight
constexpr int kAmaxThreads = 512;
constexpr int kAmaxVecs = 4;
constexpr int kAmaxBlocksPerSM = 4;

// The scale of x itself, from partial amaxes of the kernel before or from a given amax.
struct CurrentScale {
  const uint32_t* amaxes;
  int num_amaxes;
  ScaleRule rule;
  float *amax, *scale, *scale_inv;  // outputs; amax is null where it was given
  static constexpr bool kReverse = true;
  static constexpr bool kFoldAmax = false;

  // Returns true if an amax_kernel comes just before: it began after x was complete, so x may be
  // read while it runs. Any other kernel may be the one that writes x.
  bool follows_amax_kernel() const { return amax != nullptr; }
  __device__ __forceinline__ uint32_t begin() const { return 0; }
  // Called by all threads of a block. Has a barrier.
  __device__ __forceinline__ float get(uint32_t* warps) const {
    wait_for_previous_kernel();
    uint32_t found = 0;
    for (int i = threadIdx.x; i < num_amaxes; i += kQuantizeThreads)
      found = max(found, *const_cast<const volatile uint32_t*>(amaxes + i));
    stage_amax(found & 0x7FFFFFFFu, warps);
    __syncthreads();
    found = 0;
#pragma unroll
    for (int w = 0; w < kQuantizeThreads / 32; ++w) found = max(found, warps[w]);
    const float value = rule.scale_of(found);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      if (amax) *amax = __uint_as_float(found);
      *scale = value;
      *scale_inv = rule.inverse_of(found, value);
    }
    return value;
  }
  __device__ __forceinline__ void finish(uint32_t, uint32_t, const uint32_t*) const {}
};

// A scale known before; amax, if any, becomes max(amax, max |x|).
struct GivenScale {
  const float* scale;  // null: 1
  float *amax, *scale_inv;
  static constexpr bool kReverse = false;
  static constexpr bool kFoldAmax = true;

  bool follows_amax_kernel() const { return false; }
  __device__ __forceinline__ uint32_t begin() const { return amax_so_far(amax); }
  __device__ __forceinline__ float get(uint32_t*) const {
    __syncthreads();  // the encoder's table
    const float value = scale ? *scale : 1.0f;
    if (blockIdx.x == 0 && threadIdx.x == 0 && scale_inv) *scale_inv = 1.0f / value;
    return value;
  }
  __device__ __forceinline__ void finish(uint32_t seen, uint32_t, const uint32_t* warps) const {
    finish_amax<kQuantizeThreads>(amax, seen, warps);
  }
};

struct QuantizeParams {
  const void* x;
  int64_t rows, cols;
  uint8_t *rowwise, *columnwise;
  int64_t ld;  // row length of columnwise
};

template <typename Encoder, typename T>
__device__ __forceinline__ uint2 encode_vec(const Vec8<T>& v, float scale,
                                            const typename Encoder::Table& table) {
  float values[kVec];
  unpack(v, values);
  return Encoder::encode(values, scale, table);
}

// kTile: with a columnwise output, tiles of 256 x 128. Otherwise x is one long row.
// kAligned: pointers and extents allow accesses of 8 elements without a bounds check inside.
template <typename T, typename Encoder, typename Source, bool kTile, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads, sizeof(T) == 4 ? 1 : 2)
    quantize_kernel(const QuantizeParams p, const Source source, const Encoder encoder) {
  __shared__ uint32_t warps[kQuantizeThreads / 32];
  __shared__ __align__(16) typename Encoder::Table table;
  __shared__ __align__(16) uint2 tile[kTile ? QuantizeTile::kSharedWords : 1];
  constexpr int64_t kStride = kQuantizeThreads * kVec;
  const int64_t block = Source::kReverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const QuantizeTile::Place at(p.rows, p.cols, kTile ? block : 0);
  const int64_t numel = p.rows * p.cols;
  const int64_t begin = block * kStride * kQuantizeVecs + threadIdx.x * kVec;
  const T* x = static_cast<const T*>(p.x);
  Vec8<T> in[kQuantizeVecs];
  if (kTile) {
    kAligned ? QuantizeTile::load<T, true>(x, p.cols, at, in) : QuantizeTile::load_any(x, at, in);
  } else {
#pragma unroll
    for (int k = 0; k < kQuantizeVecs; ++k) {
      const int64_t i = begin + k * kStride;
      in[k] = kAligned && i + kVec <= numel ? load_vec(x + i) : load_partial(x + i, numel - i);
    }
  }
  encoder.stage(table);
  const uint32_t seen = source.begin();
  const float scale = source.get(warps);
  uint32_t amax = 0;
  uint2 codes[kQuantizeVecs];
#pragma unroll
  for (int k = 0; k < kQuantizeVecs; ++k) {
    if (Source::kFoldAmax) fold_amax(in[k], amax);
    codes[k] = encode_vec<Encoder>(in[k], scale, table);
  }
  if (kTile) {
    if (p.rowwise)
      kAligned ? QuantizeTile::store_rows<true>(p.rowwise, p.cols, at, codes)
               : QuantizeTile::store_rows_any(p.rowwise, at, codes);
    QuantizeTile::stage_columns(codes, tile);
  } else {
#pragma unroll
    for (int k = 0; k < kQuantizeVecs; ++k) {
      const int64_t i = begin + k * kStride;
      if (kAligned && i + kVec <= numel)
        *reinterpret_cast<uint2*>(p.rowwise + i) = codes[k];
      else
        store_codes_partial(p.rowwise + i, codes[k], numel - i);
    }
  }
  if (Source::kFoldAmax) stage_amax(amax_bits(T{}, amax), warps);
  if (kTile || Source::kFoldAmax) __syncthreads();
  if (kTile)
    kAligned ? QuantizeTile::store_columns<true>(p.columnwise, p.ld, at.again(), tile)
             : QuantizeTile::store_columns_any(p.columnwise, p.ld, at.again(), tile);
  source.finish(seen, amax, warps);
}

// One partial amax (a float's bits) for each block, which strides through x.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kAmaxThreads)
    amax_kernel(const T* x, int64_t numel, uint32_t* amaxes) {
  let_next_kernel_start();
  __shared__ uint32_t warps[kAmaxThreads / 32];
  constexpr int64_t kStride = kAmaxThreads * kVec, kBlock = kStride * kAmaxVecs;
  uint32_t amax = 0;
  int64_t i = blockIdx.x * kBlock + threadIdx.x * kVec;
  for (int64_t base = blockIdx.x * kBlock; base < numel; base += gridDim.x * kBlock) {
    Vec8<T> in[kAmaxVecs];
#pragma unroll
    for (int k = 0; k < kAmaxVecs; ++k, i += kStride)
      in[k] = kAligned && i + kVec <= numel ? load_vec(x + i) : load_partial(x + i, numel - i);
#pragma unroll
    for (int k = 0; k < kAmaxVecs; ++k) fold_amax(in[k], amax);
    i += (gridDim.x - 1) * kBlock;
  }
  stage_amax(amax_bits(T{}, amax), warps);
  __syncthreads();
  if (threadIdx.x != 0) return;
  amax = 0;
#pragma unroll
  for (int w = 0; w < kAmaxThreads / 32; ++w) amax = max(amax, warps[w]);
  amaxes[blockIdx.x] = amax;
}

// Returns how many amaxes it leaves.
template <typename T>
int launch_amax(const TensorView& x, uint32_t* amaxes, cudaStream_t stream) {
  constexpr int64_t kPerBlock = kAmaxThreads * kVec * kAmaxVecs;
  const int64_t numel = x.numel(), needed = (numel + kPerBlock - 1) / kPerBlock;
  const int64_t resident =
      kAmaxBlocksPerSM * static_cast<int64_t>(device_attribute(cudaDevAttrMultiProcessorCount));
  const int64_t limit = resident < kMaxAmaxes ? resident : kMaxAmaxes;
  const int blocks = static_cast<int>(needed < 1 ? 1 : needed < limit ? needed : limit);
  const T* data = x.data<const T>();
  const auto kernel = is_aligned(data, 16) ? amax_kernel<T, true> : amax_kernel<T, false>;
  kernel<<<static_cast<unsigned>(blocks), kAmaxThreads, 0, stream>>>(data, numel, amaxes);
  check_cuda(cudaGetLastError(), "amax");
  return blocks;
}

// The scale of a call with members q, amax, scale, scale_inv, rule and amaxes, where amaxes is null
// if amax was given. Launches the amax kernel where it was not.
template <typename T, typename Call>
CurrentScale launch_current_scale(const Call& p, cudaStream_t stream) {
  if (!p.amaxes)
    return {reinterpret_cast<const uint32_t*>(p.amax), 1, p.rule, nullptr, p.scale, p.scale_inv};
  const int found = launch_amax<T>(p.q.x, p.amaxes, stream);
  return {p.amaxes, found, p.rule, p.amax, p.scale, p.scale_inv};
}

template <typename T, typename Encoder, typename Source>
void launch_quantize(const Quantize& q, const Source& source, const Encoder& encoder,
                     cudaStream_t stream) {
  const QuantizeParams p{q.x.data<void>(), q.rows, q.cols, q.rowwise, q.columnwise, q.ld};
  int64_t blocks;
  void (*kernel)(QuantizeParams, Source, Encoder);
  if (p.columnwise && p.rows && p.cols) {
    const bool aligned =
        is_aligned(p.x, 16) && fp8_tile_aligned(p.ld, p.cols, p.rowwise, p.columnwise);
    blocks = QuantizeTile::num_tiles(p.rows, p.cols);
    kernel = aligned ? quantize_kernel<T, Encoder, Source, true, true>
                     : quantize_kernel<T, Encoder, Source, true, false>;
  } else {
    constexpr int64_t kPerBlock = kQuantizeThreads * kVec * kQuantizeVecs;
    const bool aligned = is_aligned(p.x, 16) && is_aligned(p.rowwise, 8);
    blocks = (p.rows * p.cols + kPerBlock - 1) / kPerBlock;
    kernel = aligned ? quantize_kernel<T, Encoder, Source, false, true>
                     : quantize_kernel<T, Encoder, Source, false, false>;
  }
  if (blocks > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "quantize: x must have fewer than 2^46 elements");
  if (blocks == 0) blocks = 1;  // an empty x has no codes, but the scale is still due
  if (source.follows_amax_kernel())
    return launch_dependent(kernel, blocks, kQuantizeThreads, stream, p, source, encoder);
  kernel<<<static_cast<unsigned>(blocks), kQuantizeThreads, 0, stream>>>(p, source, encoder);
  check_cuda(cudaGetLastError(), "quantize");
}

}  // namespace apex_te
