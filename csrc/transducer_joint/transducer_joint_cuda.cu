// CUDA kernels of transducer_joint.
//
// Forward: some lanes of a warp have 4 frames and up to 16 places of a sample, 8 columns each; a
// frame's row is loaded once for all of them. Backward: a block has 64 frames and 128 columns of a
// sample and goes over its places, so that the gradient is read once: a thread sums over the places
// for 4 frames, and the block over its frames for each place.
#include "common/gpu/vec.h"
#include "common/numerics/with_dtype.h"
#include "transducer_joint/transducer_joint.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 256;
constexpr int kFrames = 4;   // of a thread
constexpr int kPlaces = 16;  // of a thread of forward

constexpr int kLanes = 16;  // of backward
constexpr int kCols = kLanes * kVec, kWarps = kThreads / 32;
static_assert(kThreads / kLanes * kFrames == kTransducerJointTile, "the frames of a block");

template <bool kAligned, typename T>
__device__ __forceinline__ Vec8<T> load(const T* p, int64_t left, bool exists = true) {
  if (!exists || left <= 0) return {};
  return kAligned ? load_vec(p) : load_partial(p, left);
}
template <bool kAligned, typename T>
__device__ __forceinline__ void store(T* p, const float* values, int64_t left) {
  if (left <= 0) return;
  Vec8<T> v;
  pack(values, &v);
  if (kAligned)
    store_vec_whole(p, v);
  else
    store_partial(p, v, left);
}
// 8 bytes of a mask.
template <bool kAligned>
__device__ __forceinline__ uint2 load_mask(const uint8_t* p, int64_t left, bool exists) {
  if (!exists || left <= 0) return {};
  return kAligned ? *reinterpret_cast<const uint2*>(p) : load_codes_partial(p, left);
}
__device__ __forceinline__ uint32_t byte_of(uint2 mask, int i) {
  return (i < 4 ? mask.x : mask.y) >> 8 * (i % 4) & 0xFFu;
}

// kPlain: neither ReLU nor dropout nor a mask.
template <typename T, int kFwdLanes, bool kAligned, bool kPlain>
__global__ void __launch_bounds__(kThreads)
    fwd_kernel(const TransducerJoint p, uint32_t frame_tiles, uint32_t place_tiles) {
  const TransducerCells& cells = p.cells;
  const int64_t item = int64_t{blockIdx.x} * (kThreads / kFwdLanes) + threadIdx.x / kFwdLanes;
  const int64_t tile = item / place_tiles, b = tile / frame_tiles;
  const int64_t col = (int64_t{blockIdx.y} * kFwdLanes + threadIdx.x % kFwdLanes) * kVec;
  const int64_t left = p.cols - col;
  // A warp of lanes goes on together; beside the arithmetic of a mask the exchange only costs.
  constexpr bool kWhole = kPlain && kFwdLanes == 32;
  if (b >= cells.batch || (!kWhole && left <= 0)) return;
  const int64_t t0 = (tile - b * frame_tiles) * kFrames, u0 = (item - tile * place_tiles) * kPlaces;
  const int64_t frames = cells.frames_of(b), places = cells.places_of(b);
  const bool packed = cells.offset != nullptr;
  if (packed && (t0 >= frames || u0 >= places)) return;
  float f[kFrames][kVec];
#pragma unroll
  for (int k = 0; k < kFrames; ++k)
    unpack(load<kAligned>(static_cast<const T*>(p.f) + (b * cells.frames + t0 + k) * p.cols + col,
                          left, t0 + k < frames),
           f[k]);
  const int64_t pitch = cells.pitch(b), first = cells.first(b) + t0 * pitch;
  const uint64_t seed = p.dropout.is_random ? p.seed() : 0;
  const int64_t end = min(u0 + kPlaces, packed ? places : cells.places);
  for (int64_t u = u0; u < end; ++u) {
    float g[kVec];
    unpack(load<kAligned>(static_cast<const T*>(p.g) + (b * cells.places + u) * p.cols + col, left,
                          u < places),
           g);
#pragma unroll
    for (int k = 0; k < kFrames; ++k) {
      const int64_t row = first + k * pitch + u;
      if (t0 + k >= (packed ? frames : cells.frames) || !cells.has_row(row)) break;
      const bool counts = t0 + k < frames && u < places;
      float values[kVec];
      uint2 mask = {};
      if constexpr (kPlain) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = counts ? f[k][i] + g[i] : kTransducerFiller;
      } else {
        const uint32_t keep =
            p.dropout.is_random ? keep_bits(seed, row, col / kVec, p.dropout.threshold) : 0xFFu;
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float sum = f[k][i] + g[i];
          const bool above = !p.relu || !(sum <= 0.0f), kept = keep >> i & 1;
          const float value = (above ? sum : 0.0f) * (kept ? p.dropout.scale : 0.0f);
          values[i] = counts ? value : kTransducerFiller;
          const bool passes = counts && above && kept && p.dropout.scale != 0.0f;
          (i < 4 ? mask.x : mask.y) |= (passes ? 1u : 0u) << 8 * (i % 4);
        }
      }
      T* out = static_cast<T*>(p.out) + row * p.cols + col;
      if constexpr (kAligned && kWhole)
        store_by_warp(out, values, left);
      else
        store<kAligned>(out, values, left);
      if (kPlain || !p.mask || left <= 0) continue;
      uint8_t* bytes = p.mask + row * p.cols + col;
      if (kAligned)
        *reinterpret_cast<uint2*>(bytes) = mask;
      else
        store_codes_partial(bytes, mask, left);
    }
  }
}

template <typename T, bool kAligned, bool kMasked>
__global__ void __launch_bounds__(kThreads, 2) bwd_kernel(const TransducerJoint p) {
  constexpr int kSteps = 4 / sizeof(T);  // places whose loads are in flight
  __shared__ float sums[2][kSteps][kWarps][kCols];
  const TransducerCells& cells = p.cells;
  const int64_t tiles = p.tiles(), b = blockIdx.x / tiles, tile = blockIdx.x - b * tiles;
  const int64_t first_col = int64_t{blockIdx.y} * kCols,
                col = first_col + threadIdx.x % kLanes * kVec;
  const int64_t left = p.cols - col;
  const int64_t t0 = tile * kTransducerJointTile + threadIdx.x / kLanes * kFrames;
  const int64_t frames = cells.frames_of(b), places = cells.places_of(b);
  const int64_t pitch = cells.pitch(b), first = cells.first(b) + t0 * pitch;
  const bool any = tile * kTransducerJointTile < frames;
  float df[kFrames][kVec] = {};
  // Float32 sums of more than 16 places would drift further than PyTorch's.
  constexpr bool kInParts = sizeof(T) == 4;
  constexpr int kPart = 16, kWords = kInParts ? kFrames * kVec : 1;
  __shared__ float totals[kWords][kThreads];
  const auto flush = [&] {
#pragma unroll
    for (int k = 0; k < kFrames; ++k)
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        totals[k * kVec + i][threadIdx.x] += df[k][i];
        df[k][i] = 0.0f;
      }
  };
  if constexpr (kInParts)
    for (int i = 0; i < kWords; ++i) totals[i][threadIdx.x] = 0.0f;
  for (int64_t u0 = 0, step = 0; any && u0 < places; u0 += kSteps, ++step) {
    Vec8<T> grad[kSteps][kFrames];
    uint2 kept[kSteps][kFrames];
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int k = 0; k < kFrames; ++k) {
        const int64_t row = first + k * pitch + u0 + s;
        const bool exists = t0 + k < frames && u0 + s < places && cells.has_row(row);
        const int64_t at = row * p.cols + col;
        grad[s][k] = load<kAligned>(static_cast<const T*>(p.grad) + at, left, exists);
        if (kMasked) kept[s][k] = load_mask<kAligned>(p.kept + at, left, exists);
      }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float dg[kVec] = {};
#pragma unroll
      for (int k = 0; k < kFrames; ++k) {
        float values[kVec];
        unpack(grad[s][k], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float value = !kMasked || byte_of(kept[s][k], i) ? values[i] * p.scale : 0.0f;
          df[k][i] += value;
          dg[i] += value;
        }
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) dg[i] += __shfl_xor_sync(0xFFFFFFFFu, dg[i], kLanes);
      if (threadIdx.x % 32 < kLanes) {
        float4* line = reinterpret_cast<float4*>(
            &sums[step % 2][s][threadIdx.x / 32][threadIdx.x % 32 * kVec]);
        line[0] = make_float4(dg[0], dg[1], dg[2], dg[3]);
        line[1] = make_float4(dg[4], dg[5], dg[6], dg[7]);
      }
    }
    // The next step writes to the other half, and the one behind it follows the next barrier.
    __syncthreads();
    for (int i = threadIdx.x; i < kSteps * kCols; i += kThreads) {
      const int s = i / kCols, c = i % kCols;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += sums[step % 2][s][w][c];
      if (u0 + s < places && first_col + c < p.cols)
        p.workspace[((b * tiles + tile) * cells.places + u0 + s) * p.cols + first_col + c] = sum;
    }
    if constexpr (kInParts)
      if (step % kPart == kPart - 1) flush();
  }
  if constexpr (kInParts) {
    flush();
#pragma unroll
    for (int k = 0; k < kFrames; ++k)
#pragma unroll
      for (int i = 0; i < kVec; ++i) df[k][i] = totals[k * kVec + i][threadIdx.x];
  }
#pragma unroll
  for (int k = 0; k < kFrames; ++k)
    if (t0 + k < cells.frames)
      store<kAligned>(static_cast<T*>(p.df) + (b * cells.frames + t0 + k) * p.cols + col, df[k],
                      left);
}

// dg, from the sums of the tiles that have frames.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) sum_kernel(const TransducerJoint p, int64_t per_row) {
  const TransducerCells& cells = p.cells;
  const int64_t v = int64_t{blockIdx.x} * kThreads + threadIdx.x, line = v / per_row;
  const int64_t b = line / cells.places, u = line - b * cells.places;
  if (b >= cells.batch) return;
  const int64_t col = (v - line * per_row) * kVec, left = p.cols - col, tiles = p.tiles();
  float sum[kVec] = {};
  if (u < cells.places_of(b))
    for (int64_t tile = 0; tile * kTransducerJointTile < cells.frames_of(b); ++tile) {
      float part[kVec];
      unpack(load<kAligned>(p.workspace + ((b * tiles + tile) * cells.places + u) * p.cols + col,
                            left),
             part);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += part[i];
    }
  store<kAligned>(static_cast<T*>(p.dg) + line * p.cols + col, sum, left);
}

unsigned blocks_of(int64_t count, int64_t per_block) {
  const int64_t blocks = (count + per_block - 1) / per_block;
  if (blocks > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "transducer_joint: the batch is too large for one launch");
  return static_cast<unsigned>(blocks);
}

dim3 grid_of(int64_t count, int64_t per_block, int64_t cols, int64_t block_cols) {
  const int64_t tiles = (cols + block_cols - 1) / block_cols;
  if (tiles > kMaxGridY) fail(kApexTeUnsupported, "transducer_joint: rows must be shorter");
  return dim3(blocks_of(count, per_block), static_cast<unsigned>(tiles));
}

template <typename T, int kFwdLanes, bool kAligned>
void launch_fwd(const TransducerJoint& p, cudaStream_t stream) {
  const int64_t frame_tiles = (p.cells.frames + kFrames - 1) / kFrames;
  const int64_t place_tiles = (p.cells.places + kPlaces - 1) / kPlaces;
  const dim3 grid = grid_of(p.cells.batch * frame_tiles * place_tiles, kThreads / kFwdLanes, p.cols,
                            kFwdLanes * kVec);
  const bool is_plain = !p.relu && !p.dropout.is_random && p.dropout.scale == 1.0f && !p.mask;
  const auto kernel = is_plain ? fwd_kernel<T, kFwdLanes, kAligned, true>
                               : fwd_kernel<T, kFwdLanes, kAligned, false>;
  kernel<<<grid, kThreads, 0, stream>>>(p, static_cast<uint32_t>(frame_tiles),
                                        static_cast<uint32_t>(place_tiles));
  check_cuda(cudaGetLastError(), "transducer_joint_fwd");
}

template <typename T, bool kAligned>
void launch_bwd(const TransducerJoint& p, cudaStream_t stream) {
  const auto kernel = p.kept ? bwd_kernel<T, kAligned, true> : bwd_kernel<T, kAligned, false>;
  if (p.cells.frames > 0)
    kernel<<<grid_of(p.cells.batch * p.tiles(), 1, p.cols, kCols), kThreads, 0, stream>>>(p);
  const int64_t per_row = (p.cols + kVec - 1) / kVec,
                count = p.cells.batch * p.cells.places * per_row;
  if (count > 0)
    sum_kernel<T, kAligned><<<blocks_of(count, kThreads), kThreads, 0, stream>>>(p, per_row);
  check_cuda(cudaGetLastError(), "transducer_joint_bwd");
}

template <typename T, bool kAligned>
void launch(const TransducerJoint& p, bool is_bwd, cudaStream_t stream) {
  if (is_bwd) return launch_bwd<T, kAligned>(p, stream);
  if (p.cols <= 8 * kVec) return launch_fwd<T, 8, kAligned>(p, stream);
  launch_fwd<T, 32, kAligned>(p, stream);
}

void run(const TransducerJoint& p, bool is_bwd, cudaStream_t stream) {
  bool aligned = p.cols % kVec == 0;
  for (const void* each :
       {p.f, p.g, p.grad, static_cast<const void*>(p.out), static_cast<const void*>(p.df),
        static_cast<const void*>(p.dg), static_cast<const void*>(p.workspace),
        static_cast<const void*>(p.mask), static_cast<const void*>(p.kept)})
    aligned = aligned && is_aligned(each, 16);
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    aligned ? launch<T, true>(p, is_bwd, stream) : launch<T, false>(p, is_bwd, stream);
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(transducer_joint_fwd) {
  using namespace apex_te;
  const TransducerJoint p = check_transducer_joint_fwd(args);
  if (p.cells.batch * p.cells.frames * p.cells.places * p.cols == 0) return;
  const DeviceGuard guard(args.device_id());
  run(p, false, static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(transducer_joint_bwd) {
  using namespace apex_te;
  const TransducerJoint p = check_transducer_joint_bwd(args);
  if (p.cells.batch * p.cols == 0) return;
  const DeviceGuard guard(args.device_id());
  run(p, true, static_cast<cudaStream_t>(args.stream()));
}
