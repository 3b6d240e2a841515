// CUDA kernels of transducer_joint.
//
// Forward: some lanes of a warp have 2 frames and some places of a sample, 8 columns each; the
// warps of a block have neighbouring frames, so that a place's row comes from their cache. Two
// blocks of random bits are under way together. Backward: a block has 16 to 64 frames and 128
// columns of a sample and goes over its places, so that the gradient is read once: a thread sums
// over the places for 1 to 4 frames, and the block over its frames for each place.
#include "common/gpu/dependent_launch.h"
#include "common/gpu/fast_division.h"
#include "common/gpu/vec.h"
#include "common/gpu/warp_store.h"
#include "common/numerics/with_dtype.h"
#include "transducer_joint/transducer_joint.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 256;
constexpr int kFwdFrames = 2, kFwdPlaces = 32;  // of a thread of forward, at most

constexpr int kLanes = 16;  // of backward
constexpr int kCols = kLanes * kVec, kWarps = kThreads / 32;

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

// What is done with a sum: nothing; ReLU, what p = 1 leaves, and a mask; or dropout, too.
enum class Joint { kPlain, kMasked, kRandom };

// The larger of value and floor; NaN stays.
__device__ __forceinline__ float at_least(float value, float floor) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(value), "f"(floor));
  return result;
#else
  return value <= floor ? floor : value;
#endif
}

// How many of `most` from `begin` on are among the first `all`.
__device__ __forceinline__ int num_within(int64_t all, int64_t begin, int64_t most) {
  return static_cast<int>(max(min(all - begin, most), int64_t{0}));
}

// The threads of forward: 2^lane_bits have the vectors of a row, and `places` a number of places.
struct FwdTiles {
  uint32_t count, frame_tiles, place_tiles, lane_bits, places;
  FastDivision by_frame_tiles, by_place_tiles;
  // Bits below which an element is dropped; what ReLU makes of a smaller sum; and a sum that is not
  // above `none` has no gradient.
  uint32_t threshold;
  float floor, none;
};

template <typename T, bool kAligned, Joint kJoint>
__global__ void __launch_bounds__(kThreads, kAligned&& std::is_same<T, BFloat16>::value ? 4 : 3)
    fwd_kernel(const TransducerJoint p, const FwdTiles tiles) {
  const TransducerCells& cells = p.cells;
  const uint32_t lanes = 1u << tiles.lane_bits, lane = threadIdx.x & lanes - 1;
  const uint32_t item = (blockIdx.x * kThreads + threadIdx.x) >> tiles.lane_bits;
  if (item >= tiles.count) return;
  const uint32_t place_tile = tiles.by_frame_tiles(item), sample = tiles.by_place_tiles(place_tile);
  const uint32_t vec = blockIdx.y * lanes + lane, col = vec * kVec;  // below 2^24: a grid's y
  const int64_t b = sample;
  const int64_t t0 = int64_t{item - place_tile * tiles.frame_tiles} * kFwdFrames;
  const int64_t u0 = int64_t{place_tile - sample * tiles.place_tiles} * tiles.places;
  const int64_t left = p.cols - col;
  const int64_t frames = cells.frames_of(b), places = cells.places_of(b), pitch = cells.pitch(b);
  const bool packed = cells.offset != nullptr;
  // Of this thread's places and frames, those that are written and those that count.
  const int num_places = num_within(packed ? places : cells.places, u0, tiles.places);
  const int whole_places = num_within(places, u0, tiles.places),
            whole_frames = num_within(frames, t0, kFwdFrames);
  int num_frames = num_within(packed ? frames : cells.frames, t0, kFwdFrames);
  int64_t row = cells.first(b) + t0 * pitch + u0;
  // Rows outside are those of lengths that do not fit.
  while (num_frames > 0 && !cells.has_row(row + (num_frames - 1) * pitch + num_places - 1))
    --num_frames;
  if (row < 0) return;
  Vec8<T> f[kFwdFrames];
#pragma unroll
  for (int k = 0; k < kFwdFrames; ++k)
    f[k] = load<kAligned>(static_cast<const T*>(p.f) + (b * cells.frames + t0 + k) * p.cols + col,
                          left, k < whole_frames);
  const T* g_row = static_cast<const T*>(p.g) + (b * cells.places + u0) * p.cols + col;
  const uint64_t seed = kJoint == Joint::kRandom ? p.seed() : 0;
  const float scale = p.dropout.scale;
  // The lanes of this item, which go the same way.
  const uint32_t group = (lanes == 32 ? 0xFFFFFFFFu : (1u << lanes) - 1)
                         << (threadIdx.x % 32 & -lanes);
  for (int j = 0; j < num_places; ++j, ++row, g_row += p.cols) {
    float g[kVec];
    unpack(load<kAligned>(g_row, left, j < whole_places), g);
    Philox4 random[kFwdFrames] = {};
    if constexpr (kJoint == Joint::kRandom) {
#pragma unroll
      for (int k = 0; k < kFwdFrames; ++k) random[k] = dropout_bits(seed, row + k * pitch, vec);
    }
#pragma unroll
    for (int k = 0; k < kFwdFrames; ++k) {
      if (k >= num_frames) break;
      const int64_t own_row = row + k * pitch, at = own_row * p.cols + col;
      float values[kVec];
      uint2 mask = {};
      if (k < whole_frames && j < whole_places) {
        unpack(f[k], values);
        const uint32_t words[4] = {random[k].x, random[k].y, random[k].z, random[k].w};
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float sum = values[i] + g[i];
          const bool kept = kJoint == Joint::kRandom
                                ? (i % 2 ? words[i / 2] : words[i / 2] << 16) >= tiles.threshold
                                : scale != 0.0f;
          values[i] =
              kJoint == Joint::kPlain ? sum : at_least(sum, tiles.floor) * (kept ? scale : 0.0f);
          (i < 4 ? mask.x : mask.y) += kept && !(sum <= tiles.none) ? 1u << 8 * (i % 4) : 0u;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = kTransducerFiller;
      }
      if constexpr (kAligned)
        store_by_warp(static_cast<T*>(p.out) + at, values, left, group);
      else
        store<kAligned>(static_cast<T*>(p.out) + at, values, left);
      if (kJoint == Joint::kPlain || !p.mask || left <= 0) continue;
      if constexpr (kAligned)
        *reinterpret_cast<uint2*>(p.mask + at) = mask;
      else
        store_codes_partial(p.mask + at, mask, left);
    }
  }
}

// kFrames: of a thread; a tile is 16 times as many.
template <typename T, bool kAligned, bool kMasked, int kFrames>
__global__ void __launch_bounds__(kThreads, kFrames != 2 ? 2
                                            : kAligned   ? 4
                                                         : 3) bwd_kernel(const TransducerJoint p) {
  constexpr int kTile = kThreads / kLanes * kFrames;
  constexpr bool kAhead = kFrames == 1;  // few blocks: loads are in flight over the barrier, too
  constexpr int kSteps = kAhead ? 4 : 4 / sizeof(T);  // places whose loads are in flight
  __shared__ float sums[2][kSteps][kWarps][kCols];
  let_next_kernel_start();
  const TransducerCells& cells = p.cells;
  const int64_t tiles = p.tiles(), b = blockIdx.x / tiles, tile = blockIdx.x - b * tiles;
  const int64_t first_col = int64_t{blockIdx.y} * kCols,
                col = first_col + threadIdx.x % kLanes * kVec;
  const int64_t left = p.cols - col;
  const int64_t t0 = tile * kTile + threadIdx.x / kLanes * kFrames;
  const int64_t frames = cells.frames_of(b), pitch = cells.pitch(b);
  const int64_t first = cells.first(b) + t0 * pitch;
  const int places = static_cast<int>(cells.places_of(b));  // a length of 32 bits
  // Of this thread, without those of rows outside, of lengths that do not fit.
  int num_frames = first < 0 ? 0 : num_within(frames, t0, kFrames);
  while (num_frames > 0 && !cells.has_row(first + (num_frames - 1) * pitch + places - 1))
    --num_frames;
  const bool any = tile * kTile < frames;
  float df[kFrames][kVec] = {};
  // Float32 sums of more than 16 places would drift further than PyTorch's.
  constexpr bool kInParts = sizeof(T) == 4;
  constexpr int kPart = 16 / kSteps, kWords = kInParts ? kFrames * kVec : 1;
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
  Vec8<T> grad[kSteps][kFrames];
  uint2 kept[kSteps][kFrames];
  const auto load_step = [&](int u0) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int k = 0; k < kFrames; ++k) {
        const bool exists = k < num_frames && u0 + s < places;
        const int64_t at = (first + k * pitch + u0 + s) * p.cols + col;
        grad[s][k] = load<kAligned>(static_cast<const T*>(p.grad) + at, left, exists);
        if (kMasked) kept[s][k] = load_mask<kAligned>(p.kept + at, left, exists);
      }
  };
  if (kAhead && any) load_step(0);
  for (int u0 = 0, step = 0; any && u0 < places; u0 += kSteps, ++step) {
    if (!kAhead) load_step(u0);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float dg[kVec] = {};
#pragma unroll
      for (int k = 0; k < kFrames; ++k) {
        float values[kVec];
        unpack(grad[s][k], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float value = !kMasked || byte_of(kept[s][k], i) ? values[i] : 0.0f;
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
    if (kAhead) load_step(u0 + kSteps);
    // The next step writes to the other half, and the one behind it follows the next barrier.
    __syncthreads();
    for (int i = threadIdx.x; i < kSteps * kCols; i += kThreads) {
      const int s = i / kCols, c = i % kCols;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += sums[step % 2][s][w][c];
      if (u0 + s < places && first_col + c < p.cols)
        p.workspace[((b * tiles + tile) * cells.places + u0 + s) * p.cols + first_col + c] =
            sum * p.scale;
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
  for (int k = 0; k < kFrames; ++k) {
    if (t0 + k >= cells.frames) break;
#pragma unroll
    for (int i = 0; i < kVec; ++i) df[k][i] *= p.scale;
    store<kAligned>(static_cast<T*>(p.df) + (b * cells.frames + t0 + k) * p.cols + col, df[k],
                    left);
  }
}

// dg, from the sums of the tiles that have frames.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) sum_kernel(const TransducerJoint p, int64_t per_row) {
  const TransducerCells& cells = p.cells;
  const int64_t v = int64_t{blockIdx.x} * kThreads + threadIdx.x, line = v / per_row;
  const int64_t b = line / cells.places, u = line - b * cells.places;
  if (b >= cells.batch) return;
  const int64_t col = (v - line * per_row) * kVec, left = p.cols - col, tiles = p.tiles();
  double sum[kVec] = {};
  wait_for_previous_kernel();
  if (u < cells.places_of(b))
    for (int64_t tile = 0; tile * p.tile < cells.frames_of(b); ++tile) {
      float part[kVec];
      unpack(load<kAligned>(p.workspace + ((b * tiles + tile) * cells.places + u) * p.cols + col,
                            left),
             part);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += part[i];
    }
  float values[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = static_cast<float>(sum[i]);
  store<kAligned>(static_cast<T*>(p.dg) + line * p.cols + col, values, left);
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

// As many lanes as leave the fewest idle, and so few places that the GPU is filled some times.
FwdTiles fwd_tiles_of(const TransducerJoint& p) {
  constexpr int64_t kEnough = int64_t{1} << 19;  // threads
  const int64_t vecs = (p.cols + kVec - 1) / kVec;
  const auto padded = [&](uint32_t bits) { return (vecs + (1 << bits) - 1) >> bits << bits; };
  uint32_t lane_bits = 5;
  for (uint32_t bits : {4u, 3u})
    if (padded(bits) < padded(lane_bits)) lane_bits = bits;
  const int64_t frame_tiles = (p.cells.frames + kFwdFrames - 1) / kFwdFrames;
  int64_t places = kFwdPlaces, place_tiles, count;
  for (;; places /= 2) {
    place_tiles = (p.cells.places + places - 1) / places;
    count = p.cells.batch * frame_tiles * place_tiles;
    if (places == 1 || count * padded(lane_bits) >= kEnough) break;
  }
  if (count > 0x7FFFFFFF >> lane_bits)
    fail(kApexTeUnsupported, "transducer_joint: the batch is too large for one launch");
  const auto narrow = [](int64_t n) { return static_cast<uint32_t>(n); };
  return {narrow(count),
          narrow(frame_tiles),
          narrow(place_tiles),
          lane_bits,
          narrow(places),
          FastDivision(narrow(frame_tiles)),
          FastDivision(narrow(place_tiles)),
          p.dropout.threshold << 16,
          p.relu ? 0.0f : -INFINITY,
          p.relu ? 0.0f : NAN};
}

template <typename T, bool kAligned>
void launch_fwd(const TransducerJoint& p, cudaStream_t stream) {
  const FwdTiles tiles = fwd_tiles_of(p);
  const dim3 grid =
      grid_of(tiles.count, kThreads >> tiles.lane_bits, p.cols, int64_t{kVec} << tiles.lane_bits);
  const bool is_plain = !p.relu && p.dropout.scale == 1.0f && !p.mask;
  const auto kernel = p.dropout.is_random ? fwd_kernel<T, kAligned, Joint::kRandom>
                      : is_plain          ? fwd_kernel<T, kAligned, Joint::kPlain>
                                          : fwd_kernel<T, kAligned, Joint::kMasked>;
  kernel<<<grid, kThreads, 0, stream>>>(p, tiles);
  check_cuda(cudaGetLastError(), "transducer_joint_fwd");
}

template <typename T, bool kAligned, int kFrames>
void launch_sums(const TransducerJoint& p, cudaStream_t stream) {
  const auto kernel =
      p.kept ? bwd_kernel<T, kAligned, true, kFrames> : bwd_kernel<T, kAligned, false, kFrames>;
  kernel<<<grid_of(p.cells.batch * p.tiles(), 1, p.cols, kCols), kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "transducer_joint_bwd");
}

template <typename T, bool kAligned>
void launch_bwd(const TransducerJoint& p, cudaStream_t stream) {
  if (p.cells.frames > 0) {
    if (p.tile == 64) launch_sums<T, kAligned, 4>(p, stream);
    if (p.tile == 32) launch_sums<T, kAligned, 2>(p, stream);
    if (p.tile == 16) launch_sums<T, kAligned, 1>(p, stream);
  }
  const int64_t per_row = (p.cols + kVec - 1) / kVec,
                count = p.cells.batch * p.cells.places * per_row;
  if (count > 0)
    launch_dependent(sum_kernel<T, kAligned>, blocks_of(count, kThreads), kThreads, stream, p,
                     per_row);
}

template <typename T, bool kAligned>
void launch(const TransducerJoint& p, bool is_bwd, cudaStream_t stream) {
  if (is_bwd) return launch_bwd<T, kAligned>(p, stream);
  launch_fwd<T, kAligned>(p, stream);
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
