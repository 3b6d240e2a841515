// Forward of the norms to FP8 with a columnwise copy, in patches of 8 x 8 elements of a thread.
//
// For narrow rows: a warp has 32 rows of some columns, the block's other warps have the rest of
// these rows. A thread holds its patches in registers while those of its next rows are copied to
// shared memory (cp.async; a thread reads only what it copied itself, so no barrier). It sums 8
// rows at a time, and the sums of 32 rows meet at one barrier. A patch of FP8 data is transposed in
// registers, and four lanes store a whole sector of a column: shared memory holds only what is on
// its way.
#pragma once

#include "common/gpu/fp8_tile.h"
#include "common/norm/fwd_cuda.h"

namespace apex_te {

constexpr int kPatchRows = 8;       // of a thread
constexpr int kPatchLanes = 8;      // of a warp side by side
constexpr int kPatchTileRows = 32;  // of a warp
constexpr int kPatchCols = kPatchLanes * kVec;
template <typename T, bool kLayerNorm>  // of a thread, side by side
constexpr int kPatches = kLayerNorm && sizeof(T) == 2 ? 2 : 1;
template <typename T, bool kLayerNorm>
constexpr int kPatchVecs = kPatches<T, kLayerNorm> * kPatchRows;
template <typename T, bool kLayerNorm>  // of a multiprocessor, as registers allow
constexpr int kPatchThreads = kPatches<T, kLayerNorm> * sizeof(T) > 2 ? 512 : 640;
// Beyond which whole rows in warps are faster, without and with a residual.
constexpr int64_t kMaxPatchCols = 1024, kMaxPatchColsOfSums = 512;

// Vectors of a thread in shared memory, in 16-byte words that neighbouring threads interleave.
template <typename T>
struct PatchSlot {
  static constexpr int kWords = sizeof(T) / 2;  // of 16 bytes in a vector
  float4* base;

  __device__ __forceinline__ float4* word(int v, int w) const {
    return base + (v * kWords + w) * blockDim.x + threadIdx.x;
  }
  __device__ __forceinline__ void fetch(int v, const T* p) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      copy_async16(word(v, w), reinterpret_cast<const float4*>(p) + w);
  }
  __device__ __forceinline__ Vec8<T> read(int v) const {
    Vec8<T> out;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint4 q = *reinterpret_cast<const uint4*>(word(v, w));
      out.words[4 * w] = q.x, out.words[4 * w + 1] = q.y;
      out.words[4 * w + 2] = q.z, out.words[4 * w + 3] = q.w;
    }
    return out;
  }
};

// Where a thread's patches lie: patch k has the columns from col + k * kPatchCols on.
template <typename T, bool kLayerNorm>
struct PatchPlace {
  static constexpr int kWarpCols = kPatches<T, kLayerNorm> * kPatchCols;
  int lane, warp, warps;
  int cols;  // of a row
  int col;   // first of the thread

  __device__ __forceinline__ explicit PatchPlace(const NormFwd& p)
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        warps(blockDim.x / 32),
        cols(static_cast<int>(p.cols)),
        col(warp * kWarpCols + lane % kPatchLanes * kVec) {}

  __device__ __forceinline__ int row() const { return lane / kPatchLanes * kPatchRows; }
  __device__ __forceinline__ bool has(int patch) const { return col + patch * kPatchCols < cols; }
  __device__ __forceinline__ float columns_of(int of_warp) const {
    return static_cast<float>(min(max(cols - of_warp * kWarpCols, 0), kWarpCols));
  }
};

// A block's shared memory, carved in the order of the members. kArrays: x, and a residual.
template <typename T, bool kLayerNorm, int kArrays>
struct PatchMemory {
  static constexpr int kWords =
      kArrays * kPatchVecs<T, kLayerNorm> * PatchSlot<T>::kWords;  // of a thread
  PatchSlot<T> slot;
  float4 *gammas, *biases;  // 4 of each 8 columns in one plane and 4 in another
  int plane;
  float2* parts;         // mean and sum of squares of the warps' columns: [warps][32 rows]
  float2* totals;        // of the rows, of two tiles in turn: [2][32 rows]
  uint64_t *put, *sent;  // barriers: of the parts, and of each of the totals

  __device__ __forceinline__ PatchMemory(float4* memory, const NormFwd& p,
                                         const PatchPlace<T, kLayerNorm>& at)
      : slot{memory}, plane(at.warps * kPatches<T, kLayerNorm> * kPatchLanes) {
    gammas = memory + kWords * blockDim.x;
    biases = gammas + (p.params.weight ? 2 * plane : 0);
    parts = reinterpret_cast<float2*>(biases + (p.params.bias ? 2 * plane : 0));
    totals = parts + at.warps * kPatchTileRows;
    put = reinterpret_cast<uint64_t*>(totals + 2 * kPatchTileRows);
    sent = put + 1;
  }
  static int64_t bytes(const NormFwd& p, int64_t warps) {
    const int64_t params = (p.params.weight ? 1 : 0) + (p.params.bias ? 1 : 0);
    return warps * 32 * kWords * 16 + warps * PatchPlace<T, kLayerNorm>::kWarpCols * 4 * params +
           (warps + 2) * kPatchTileRows * 8 + 3 * 8;
  }
};

// Widens the warp's columns of weight and bias into shared memory.
template <typename T, bool kLayerNorm, int kArrays>
__device__ __forceinline__ void load_patch_params(
    const NormFwd& p, const PatchPlace<T, kLayerNorm>& at,
    const PatchMemory<T, kLayerNorm, kArrays>& memory) {
  const auto put = [&](float4* to, const float* values) {
    to[0] = make_float4(values[0], values[1], values[2], values[3]);
    to[memory.plane] = make_float4(values[4], values[5], values[6], values[7]);
  };
  if (at.lane >= kPatches<T, kLayerNorm> * kPatchLanes) return;
  const int v = at.warp * kPatches<T, kLayerNorm> * kPatchLanes + at.lane;
  const int col = v * kVec;
  if (col >= at.cols) return;
  float values[kVec];
  if (p.params.weight) {
    load_gamma<T>(p.params, col, values);
    put(memory.gammas + v, values);
  }
  if (p.params.bias) {
    load_bias<T>(p.params, col, values);
    put(memory.biases + v, values);
  }
}

// The sums of 8 rows over the lanes that lie side by side: lane i of these gets that of row i.
__device__ __forceinline__ float sum_of_patch_rows(float (&sums)[kPatchRows], int lane) {
#pragma unroll
  for (int half = kPatchRows / 2; half; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? sums[i + half] : sums[i];
      const float given = upper ? sums[i] : sums[i + half];
      sums[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, half);
    }
  }
  return sums[0];
}
// What the lane that has row i of this thread's holds.
__device__ __forceinline__ float of_patch_row(float value, int i, int lane) {
  return __shfl_sync(0xFFFFFFFFu, value, lane / kPatchLanes * kPatchRows + i);
}

// Statistics of the warp's columns of the row that has this lane's number.
template <bool kLayerNorm, typename T>
__device__ __forceinline__ Statistics patch_statistics(Vec8<T> (&in)[kPatchVecs<T, kLayerNorm>],
                                                       const PatchPlace<T, kLayerNorm>& at) {
  const float count = at.columns_of(at.warp);
  float mean = 0.0f, values[kVec];
  if (kLayerNorm) {
    float sums[kPatchRows] = {};
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r)
#pragma unroll
      for (int k = 0; k < kPatches<T, kLayerNorm>; ++k) {
        unpack(in[k * kPatchRows + r], values);
        sums[r] += ((values[0] + values[1]) + (values[2] + values[3])) +
                   ((values[4] + values[5]) + (values[6] + values[7]));
      }
    const float sum = sum_of_patch_rows(sums, at.lane);
    if (count > 0.0f) mean = sum / count;
    keep_packed(in);
  }
  constexpr int kSums = kCentredSums<T, kLayerNorm>;
  float sums[kSums][kPatchRows] = {};
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    const float centre = kLayerNorm ? of_patch_row(mean, r, at.lane) : 0.0f;
#pragma unroll
    for (int k = 0; k < kPatches<T, kLayerNorm>; ++k) {
      unpack(in[k * kPatchRows + r], values);
      float own[2][kSums] = {};
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        add_centred(kLayerNorm ? values[i] - centre : values[i], own[i % 2]);
      if (kLayerNorm && !at.has(k)) continue;
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i][r] += own[0][i] + own[1][i];
    }
  }
  float totals[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) totals[i] = sum_of_patch_rows(sums[i], at.lane);
  if (count > 0.0f) correct_mean(totals, count, &mean);
  keep_packed(in);
  return {mean, totals[0]};
}

// The statistics of the lane's row from those of the warps' parts.
template <typename T, bool kLayerNorm>
__device__ __forceinline__ Statistics merge_parts(const float2* parts,
                                                  const PatchPlace<T, kLayerNorm>& at) {
  float mean = 0.0f, squares = 0.0f;
  if (kLayerNorm) {
    const float some = parts[at.lane].x;
    float off = 0.0f;
#pragma unroll 4
    for (int i = 1; i < at.warps; ++i)
      off = fmaf(parts[i * kPatchTileRows + at.lane].x - some, at.columns_of(i), off);
    mean = some + off / static_cast<float>(at.cols);
  }
#pragma unroll 4
  for (int i = 0; i < at.warps; ++i) {
    const float2 part = parts[i * kPatchTileRows + at.lane];
    const float off = part.x - mean;
    squares += kLayerNorm ? fmaf(off * off, at.columns_of(i), part.y) : part.y;
  }
  return {mean, squares};
}

// The statistics of a tile's rows from those of their parts, which one warp merges. Two tiles in
// turn have different totals; parts are written again only when the totals of the tile before are
// there.
struct PatchExchange {
  int turn = 0;
  unsigned phase = 0, put_phase = 0;

  template <typename T, bool kLayerNorm, int kArrays>
  __device__ __forceinline__ Statistics combine(Statistics own, const PatchPlace<T, kLayerNorm>& at,
                                                const PatchMemory<T, kLayerNorm, kArrays>& memory) {
    float2* total = memory.totals + turn * kPatchTileRows + at.lane;
    memory.parts[at.warp * kPatchTileRows + at.lane] = make_float2(own.mean, own.squares);
    __syncwarp();
    if (at.lane == 0) barrier_arrive(memory.put);
    if (at.warp == 0) {
      barrier_wait(memory.put, put_phase);
      put_phase ^= 1;
      const Statistics row = merge_parts(memory.parts, at);
      *total = make_float2(row.mean, row.squares);
      __syncwarp();
      if (at.lane == 0) barrier_arrive(memory.sent + turn);
    }
    barrier_wait(memory.sent + turn, phase);
    phase ^= turn;
    turn ^= 1;
    return {total->x, total->y};
  }
};

// Normalises the patches, stores their FP8 data by rows and by columns, and raises the lane's amax.
// mean, rstd: of the row that has this lane's number.
template <bool kLayerNorm, typename Format, typename T, int kArrays>
__device__ __forceinline__ void store_patches(const NormFwd& p, const PatchPlace<T, kLayerNorm>& at,
                                              const PatchMemory<T, kLayerNorm, kArrays>& memory,
                                              const Vec8<T> (&in)[kPatchVecs<T, kLayerNorm>],
                                              float mean, float rstd, float scale, int64_t row0,
                                              float* amax) {
  const int64_t row = row0 + at.row();
  const int present = static_cast<int>(min(p.rows - row, int64_t{kPatchRows}));
#pragma unroll
  for (int k = 0; k < kPatches<T, kLayerNorm>; ++k) {
    const bool has = at.has(k);
    const int v = (at.warp * kPatches<T, kLayerNorm> + k) * kPatchLanes + at.lane % kPatchLanes;
    const float4 ones = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float4 g0 = p.params.weight ? memory.gammas[v] : ones;
    const float4 g1 = p.params.weight ? memory.gammas[v + memory.plane] : ones;
    const float4 b0 = kLayerNorm && p.params.bias ? memory.biases[v] : zeros;
    const float4 b1 = kLayerNorm && p.params.bias ? memory.biases[v + memory.plane] : zeros;
    const float gamma[kVec] = {g0.x, g0.y, g0.z, g0.w, g1.x, g1.y, g1.z, g1.w};
    const float bias[kVec] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
    const int64_t col = at.col + k * kPatchCols;
    uint8_t* to = p.rowwise + row * p.cols + col;
    uint2 codes[kPatchRows];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      const float row_mean = kLayerNorm ? of_patch_row(mean, r, at.lane) : 0.0f;
      const float row_rstd = of_patch_row(rstd, r, at.lane);
      float values[kVec];
      unpack(in[k * kPatchRows + r], values);
      normalize<kLayerNorm>(values, gamma, bias, row_mean, row_rstd);
      codes[r] = encode_values<Format>(values, scale);
      if (r >= present) codes[r] = make_uint2(0u, 0u);
      if (has && r < present) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) *amax = larger_magnitude(*amax, values[i]);
        if (p.rowwise) *reinterpret_cast<uint2*>(to + r * p.cols) = codes[r];
      }
    }
    if (!has || row >= p.ld) continue;
    uint32_t low[kVec], high[kVec];  // of column c: rows 0-3 and 4-7
    transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, low);
    transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, low + 4);
    transpose4(codes[4].x, codes[5].x, codes[6].x, codes[7].x, high);
    transpose4(codes[4].y, codes[5].y, codes[6].y, codes[7].y, high + 4);
    to = p.columnwise + col * p.ld + row;
#pragma unroll
    for (int c = 0; c < kVec; ++c, to += p.ld)
      *reinterpret_cast<uint2*>(to) = make_uint2(low[c], high[c]);
  }
}

// Lets the copy of a thread's patches of a tile begin.
template <typename T, bool kLayerNorm, int kArrays>
__device__ __forceinline__ void fetch_patches(const NormFwd& p, const PatchPlace<T, kLayerNorm>& at,
                                              const PatchMemory<T, kLayerNorm, kArrays>& memory,
                                              int64_t row0) {
  const int64_t row = row0 + at.row();
  const int present = static_cast<int>(min(p.rows - row, int64_t{kPatchRows}));
#pragma unroll
  for (int a = 0; a < kArrays; ++a) {
    const T* from = static_cast<const T*>(a ? p.residual : p.x) + row * p.cols + at.col;
#pragma unroll
    for (int k = 0; k < kPatches<T, kLayerNorm>; ++k)
#pragma unroll
      for (int r = 0; r < kPatchRows; ++r)
        if (r < present && at.has(k))
          memory.slot.fetch((a * kPatches<T, kLayerNorm> + k) * kPatchRows + r,
                            from + r * p.cols + k * kPatchCols);
  }
  commit_copies();
}

// The patches from shared memory, zeros where there are no rows or columns; adds the residual and
// stores the sum.
template <typename T, bool kLayerNorm, int kArrays>
__device__ __forceinline__ void take_patches(const NormFwd& p, const PatchPlace<T, kLayerNorm>& at,
                                             const PatchMemory<T, kLayerNorm, kArrays>& memory,
                                             int64_t row0,
                                             Vec8<T> (&in)[kPatchVecs<T, kLayerNorm>]) {
  const int64_t row = row0 + at.row();
  const int present = static_cast<int>(min(p.rows - row, int64_t{kPatchRows}));
  wait_copies<0>();
#pragma unroll
  for (int k = 0; k < kPatches<T, kLayerNorm>; ++k)
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      const int i = k * kPatchRows + r;
      in[i] = Vec8<T>{};
      if (r >= present || !at.has(k)) continue;
      in[i] = memory.slot.read(i);
      if (kArrays == 1) continue;
      in[i] = add_residual(in[i], memory.slot.read(kPatchVecs<T, kLayerNorm> + i));
      store_vec(static_cast<T*>(p.residual_sum) + (row + r) * p.cols + at.col + k * kPatchCols,
                in[i]);
    }
}

// Rows in tiles of 32, which a persistent grid takes in turn.
template <typename T, bool kLayerNorm, bool kResidual>
__global__ void __launch_bounds__(kPatchThreads<T, kLayerNorm>, 1)
    norm_patch_kernel(const NormFwd p) {
  extern __shared__ float4 dynamic[];
  const PatchPlace<T, kLayerNorm> at(p);
  const PatchMemory<T, kLayerNorm, kResidual ? 2 : 1> memory(dynamic, p, at);
  if (threadIdx.x == 0) {
    // A loop and its branch: racecheck takes a predicated init for a write by every thread.
#pragma unroll 1
    for (int i = 0; i < 3; ++i) barrier_init(memory.put + i, i == 0 ? at.warps : 1);
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kPatchTileRows;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPatchTileRows;
  fetch_patches(p, at, memory, first);
  const uint32_t seen = amax_so_far(p.amax);
  load_patch_params(p, at, memory);
  __syncthreads();

  const float count = static_cast<float>(at.cols), scale = *p.scale;
  float amax = 0.0f;
  PatchExchange exchange;
  // The last tile also has the padding of a columnwise copy.
  for (int64_t row0 = first; row0 < p.rows; row0 += stride) {
    Vec8<T> in[kPatchVecs<T, kLayerNorm>];
    take_patches(p, at, memory, row0, in);
    fetch_patches(p, at, memory, row0 + stride);
    Statistics s = patch_statistics<kLayerNorm, T>(in, at);
    if (at.warps > 1) s = exchange.combine(s, at, memory);
    const float rstd = rstd_of(s.squares, count, p.eps);
    if (at.warp == 0 && row0 + at.lane < p.rows) {
      if (kLayerNorm) p.mean[row0 + at.lane] = s.mean;
      p.rstd[row0 + at.lane] = rstd;
    }
    if (p.fp8 == DType::kE5M2)
      store_patches<kLayerNorm, E5M2>(p, at, memory, in, s.mean, rstd, scale, row0, &amax);
    else
      store_patches<kLayerNorm, E4M3>(p, at, memory, in, s.mean, rstd, scale, row0, &amax);
  }
  wait_copies<0>();
  finish_fp8(p, magnitude_bits(amax), seen);
}

template <typename T, bool kLayerNorm, bool kResidual>
void launch_norm_patches(const NormFwd& p, int device, cudaStream_t stream) {
  constexpr int64_t kCols = PatchPlace<T, kLayerNorm>::kWarpCols;
  const int64_t warps = (p.cols + kCols - 1) / kCols;
  const auto bytes =
      static_cast<size_t>(PatchMemory < T, kLayerNorm, kResidual ? 2 : 1 > ::bytes(p, warps));
  const auto kernel = norm_patch_kernel<T, kLayerNorm, kResidual>;
  const void* address = reinterpret_cast<const void*>(kernel);
  allow_shared(address);
  const int threads = static_cast<int>(warps * 32);
  const int64_t blocks = std::min((p.rows + kPatchTileRows - 1) / kPatchTileRows,
                                  max_active_clusters(address, threads, 1, bytes, device));
  launch_cluster(kernel, blocks, threads, 1, bytes, stream, p);
}

// Returns true if rows are narrow, and enough for all multiprocessors.
template <typename T, bool kLayerNorm>
bool wants_norm_patches(const NormFwd& p, int device) {
  const int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount, device);
  const int64_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - 256;
  constexpr int64_t kCols = PatchPlace<T, kLayerNorm>::kWarpCols;
  return p.cols <= (p.residual ? kMaxPatchColsOfSums : kMaxPatchCols) &&
         2 * p.rows > processors * kPatchTileRows &&
         PatchMemory<T, kLayerNorm, 2>::bytes(p, (p.cols + kCols - 1) / kCols) <= limit;
}

}  // namespace apex_te
