// Forward of the norms for many rows: a persistent grid through which the rows stream.
//
// A warp has a row, or a part of a long one, of up to 8 KB: it takes it from shared memory into
// registers, lets the copy of its next row begin, and normalises. No load waits for a reduction
// and, but for the statistics of long rows, no warp for another. Rows whose parameters do not fit
// in a block's shared memory go to a cluster of blocks. Weight and bias stay in shared memory,
// widened. For a columnwise copy a block has tiles of 64 or 32 rows, whose codes also go to shared
// memory, from where they leave by columns.
#pragma once

#include "common/gpu/async_copy.h"
#include "common/gpu/fp8_tile.h"
#include "common/norm/fwd_cuda.h"

namespace apex_te {

constexpr int kRingWarps = 16;
constexpr int kRingThreads = kRingWarps * 32;
constexpr int kMaxRingSlots = 8;
template <typename T, bool kTiles>  // of a thread: 64 registers, or half where codes need memory
constexpr int kRingVecs = (kTiles ? 16 : 32) / sizeof(T);
constexpr int kLeastTileRows = 32;        // whose columnwise codes are whole sectors
constexpr int64_t kPlainTileCols = 4096;  // that two blocks hold with 64 rows

struct RingShape {
  int warps;  // of a row in a block
  int vecs;   // of a row in a warp
  int slots;  // rows of a warp in shared memory
  int tile_rows;
};

// Distance of the rows of a tile of codes in shared memory: an odd number of 8 bytes, which keeps
// 8 x 8 codes of neighbouring lanes in different banks.
__host__ __device__ inline int tile_pitch(int block_vecs) { return (block_vecs | 1) * kVec; }

// A tile of codes to the columnwise output: a thread turns 8 x 8 codes, and the lanes that lie
// below each other store all rows of a column together.
__device__ __forceinline__ void store_tile(const unsigned char* tile, int tile_rows, int pitch,
                                           int vecs, uint8_t* out, int64_t rows, int64_t row0) {
  const int height = tile_rows / 8, width = 32 / height;
  const int lane = threadIdx.x % 32, down = lane / width;
  if (row0 + down * 8 >= rows) return;
  for (int v = threadIdx.x / 32 * width + lane % width; v < vecs; v += blockDim.x / height) {
    uint2 codes[8];
#pragma unroll
    for (int r = 0; r < 8; ++r)
      codes[r] = *reinterpret_cast<const uint2*>(tile + (down * 8 + r) * pitch + v * kVec);
    uint32_t low[kVec], high[kVec];  // of column c: rows 0-3 and 4-7
    transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, low);
    transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, low + 4);
    transpose4(codes[4].x, codes[5].x, codes[6].x, codes[7].x, high);
    transpose4(codes[4].y, codes[5].y, codes[6].y, codes[7].y, high + 4);
    uint8_t* to = out + static_cast<int64_t>(v) * kVec * rows + row0 + down * 8;
#pragma unroll
    for (int c = 0; c < kVec; ++c, to += rows)
      *reinterpret_cast<uint2*>(to) = make_uint2(low[c], high[c]);
  }
}

// kTiles: with columnwise codes, and a residual where there is one.
template <typename T, bool kLayerNorm, bool kTiles>
__global__ void __launch_bounds__(kRingThreads, 1)
    norm_ring_kernel(const NormFwd p, const RingShape shape) {
  constexpr int kVecs = kRingVecs<T, kTiles>;
  extern __shared__ __align__(16) unsigned char ring_memory[];
  const RowRanks ranks{static_cast<int>(cluster_size()), static_cast<int>(cluster_rank())};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / shape.warps, w = warp - group * shape.warps;
  const int groups = kRingWarps / shape.warps;
  const int parts = ranks.count * shape.warps, part = ranks.rank * shape.warps + w;
  const int total_vecs = static_cast<int>(p.cols / kVec);
  const auto vecs_of = [&](int i) { return min(max(total_vecs - i * shape.vecs, 0), shape.vecs); };
  const int vecs = vecs_of(part), block_vecs = shape.warps * shape.vecs;

  // Shared memory: the warps' slots; gamma and bias, 4 of each 8 columns in one plane and 4 in
  // another; a barrier for each slot and two for each group's exchange of statistics; these; a tile
  // of codes.
  const int arrays = kTiles && p.residual ? 2 : 1, tile_rows = kTiles ? shape.tile_rows : groups;
  const int slot_bytes = arrays * shape.vecs * kVec * static_cast<int>(sizeof(T));
  T* slots = reinterpret_cast<T*>(ring_memory + warp * shape.slots * slot_bytes);
  float4* gammas = reinterpret_cast<float4*>(ring_memory + kRingWarps * shape.slots * slot_bytes);
  float4* biases = gammas + (p.params.weight ? 2 * block_vecs : 0);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(biases + (p.params.bias ? 2 * block_vecs : 0));
  uint64_t* full = barriers + warp * shape.slots;
  uint64_t* exchange = barriers + kRingWarps * shape.slots + 2 * group;
  float2* statistics = reinterpret_cast<float2*>(barriers + kRingWarps * (shape.slots + 2)) +
                       group * 2 * parts;  // mean and sum of squares of each part, of two rows
  const int pitch = tile_pitch(block_vecs);
  unsigned char* tile =
      reinterpret_cast<unsigned char*>(barriers + kRingWarps * (shape.slots + 2)) +
      groups * 2 * parts * 8;

  // A block has tiles of rows, a group one row at a time: rows `group`, `groups` + `group`, ... of
  // each tile.
  const int turns = kTiles ? (tile_rows + groups - 1) / groups : 1;
  const int64_t line = blockIdx.x / ranks.count, lines = gridDim.x / ranks.count;
  const int64_t stride = lines * tile_rows, col0 = static_cast<int64_t>(part) * shape.vecs * kVec;
  const auto row_of = [&](int64_t base, int of_tile) {
    const int r = of_tile * groups + group;
    return r < tile_rows && group < groups ? base + r : p.rows;
  };
  int64_t coming = line * tile_rows;  // the tile and its row that are copied next
  int coming_turn = 0;
  const auto refill = [&](int slot) {
    int64_t from = p.rows;
    while (from >= p.rows && coming < p.rows) {
      from = row_of(coming, coming_turn);
      if (++coming_turn == turns) coming_turn = 0, coming += stride;
    }
    if (from >= p.rows || vecs == 0) return;
    const int64_t at = from * p.cols + col0;
    const uint32_t bytes = vecs * kVec * static_cast<int>(sizeof(T));
    T* to = slots + slot * arrays * shape.vecs * kVec;
    copy_chunk(to, static_cast<const T*>(p.x) + at, bytes, full + slot);
    if (kTiles && p.residual)
      copy_chunk(to + shape.vecs * kVec, static_cast<const T*>(p.residual) + at, bytes,
                 full + slot);
  };
  if (lane == 0)
    for (int s = 0; s < shape.slots; ++s) barrier_init(full + s, kCopyArrivals * arrays);
  if (lane == 0 && w == 0 && group < groups) {
    const unsigned arrivals = ranks.count > 1 ? 1 : shape.warps;
    barrier_init(exchange, arrivals);
    barrier_init(exchange + 1, arrivals);
  }
  __syncwarp();
  for (int s = 0; s < shape.slots; ++s) refill(s);
  const uint32_t seen = amax_so_far(p.amax);
  for (int v = threadIdx.x; v < block_vecs; v += kRingThreads) {
    const int64_t col = (static_cast<int64_t>(ranks.rank) * block_vecs + v) * kVec;
    if (col >= p.cols) break;
    float values[kVec];
    if (p.params.weight) {
      load_gamma<T>(p.params, col, values);
      gammas[v] = make_float4(values[0], values[1], values[2], values[3]);
      gammas[v + block_vecs] = make_float4(values[4], values[5], values[6], values[7]);
    }
    if (p.params.bias) {
      load_bias<T>(p.params, col, values);
      biases[v] = make_float4(values[0], values[1], values[2], values[3]);
      biases[v + block_vecs] = make_float4(values[4], values[5], values[6], values[7]);
    }
  }
  if (ranks.count > 1)
    cluster_sync();  // every block of the cluster has begun
  else
    __syncthreads();

  const float count = static_cast<float>(p.cols), scale = p.scale ? *p.scale : 1.0f;
  const float warp_count = static_cast<float>(vecs * kVec);
  float amax = 0.0f;
  int slot = 0, turn = 0;
  unsigned phase = 0, exchange_phase = 0;
  for (int64_t base = line * tile_rows; base < p.rows; base += stride) {
    for (int of_tile = 0; of_tile < turns; ++of_tile) {
      const int64_t row = row_of(base, of_tile);
      if (row >= p.rows) continue;
      const int64_t begin = row * p.cols + col0 + lane * kVec;
      Vec8<T> in[kVecs];
      if (vecs > 0) barrier_wait(full + slot, phase);
      const T* x = slots + (slot * arrays * shape.vecs + lane) * kVec;
#pragma unroll
      for (int k = 0; k < kVecs; ++k)
        in[k] = k * 32 + lane < vecs ? load_vec(x + k * 32 * kVec) : Vec8<T>{};
      if (kTiles && p.residual) {
#pragma unroll
        for (int k = 0; k < kVecs; ++k) {
          if (k * 32 + lane >= vecs) break;
          in[k] = add_residual(in[k], load_vec(x + (shape.vecs + k * 32) * kVec));
          store_vec(static_cast<T*>(p.residual_sum) + begin + k * 32 * kVec, in[k]);
        }
      }
      __syncwarp();
      refill(slot);
      if (++slot == shape.slots) slot = 0, phase ^= 1;

      // Mean of the warp's columns and the sum of squares around it; of rms_norm around zero.
      float mean = 0.0f, values[kVec];
      if (kLayerNorm) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kVecs; ++k) {
          if (k * 32 >= vecs) break;
          unpack(in[k], values);
          sum += ((values[0] + values[1]) + (values[2] + values[3])) +
                 ((values[4] + values[5]) + (values[6] + values[7]));
        }
        sum = warp_sum(sum);
        if (vecs > 0) mean = sum / warp_count;
        keep_packed(in);
      }
      constexpr int kSums = kCentredSums<T, kLayerNorm>;
      float sums[2][kSums] = {};
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        if (k * 32 + lane >= vecs) break;
        unpack(in[k], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          add_centred(kLayerNorm ? values[i] - mean : values[i], sums[i % 2]);
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[0][i] = warp_sum(sums[0][i] + sums[1][i]);
      if (vecs > 0) correct_mean(sums[0], warp_count, &mean);
      float squares = sums[0][0];
      keep_packed(in);

      if (parts > 1) {
        float2* shared = statistics + turn * parts;
        if (ranks.count > 1) {
          if (w == 0 && lane == 0) barrier_expect(exchange + turn, parts * 8);
          if (lane < ranks.count)
            store_remote_async(shared + part, exchange + turn, lane, mean, squares);
        } else if (lane == 0) {
          shared[part] = make_float2(mean, squares);
          barrier_arrive(exchange + turn);
        }
        barrier_wait(exchange + turn, exchange_phase);
        exchange_phase ^= turn;
        turn ^= 1;
        float total = 0.0f;
        if (kLayerNorm) {
          const float some = shared[0].x;
          for (int i = lane; i < parts; i += 32)
            total = fmaf(shared[i].x - some, static_cast<float>(vecs_of(i) * kVec), total);
          mean = some + warp_sum(total) / count;
          total = 0.0f;
        }
        for (int i = lane; i < parts; i += 32) {
          const float2 other = shared[i];
          const float off = kLayerNorm ? other.x - mean : 0.0f;
          total += kLayerNorm ? fmaf(off * off, static_cast<float>(vecs_of(i) * kVec), other.y)
                              : other.y;
        }
        squares = warp_sum(total);
      }
      const float rstd = rstd_of(squares, count, p.eps);
      if (part == 0 && lane == 0) {
        if (kLayerNorm) p.mean[row] = mean;
        p.rstd[row] = rstd;
      }
      if (!kTiles && !p.y && !p.scale) continue;
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        if (k * 32 + lane >= vecs) break;
        unpack(in[k], values);
        const int at = w * shape.vecs + k * 32 + lane;
        const float4 ones = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float4 g0 = p.params.weight ? gammas[at] : ones;
        const float4 g1 = p.params.weight ? gammas[at + block_vecs] : ones;
        const float4 b0 = kLayerNorm && p.params.bias ? biases[at] : zeros;
        const float4 b1 = kLayerNorm && p.params.bias ? biases[at + block_vecs] : zeros;
        const float gamma[kVec] = {g0.x, g0.y, g0.z, g0.w, g1.x, g1.y, g1.z, g1.w};
        const float bias[kVec] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
        normalize<kLayerNorm>(values, gamma, bias, mean, rstd);
        if (!kTiles && p.y) {
          Vec8<T> out;
          pack(values, &out);
          store_vec(static_cast<T*>(p.y) + begin + k * 32 * kVec, out);
        } else {
#pragma unroll
          for (int i = 0; i < kVec; ++i) amax = larger_magnitude(amax, values[i]);
          const uint2 codes = encode_as(p.fp8, values, scale);
          if (p.rowwise) *reinterpret_cast<uint2*>(p.rowwise + begin + k * 32 * kVec) = codes;
          if (kTiles) *reinterpret_cast<uint2*>(tile + (row - base) * pitch + at * kVec) = codes;
        }
      }
    }
    if (kTiles) {
      const int64_t block_col = static_cast<int64_t>(ranks.rank) * block_vecs;
      __syncthreads();
      store_tile(tile, tile_rows, pitch,
                 static_cast<int>(min(total_vecs - block_col, int64_t{block_vecs})),
                 p.columnwise + block_col * kVec * p.rows, p.rows, base);
      __syncthreads();
    }
  }
  if (kTiles || p.scale) finish_fp8(p, magnitude_bits(amax), seen);
}

struct RingPlan {
  RingShape shape;
  int64_t ranks;
  size_t shared_bytes;
};

// The fewest blocks to a row, then the fewest warps, whose shared memory suffices.
template <typename T>
bool plan_norm_ring(const NormFwd& p, int device, RingPlan* plan) {
  const int64_t total = p.cols / kVec, params = (p.params.weight ? 1 : 0) + (p.params.bias ? 1 : 0);
  const int64_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - 256;
  const bool clusters = has_clusters(device);
  const int64_t max_ranks = clusters ? kMaxNormRanks : 1, arrays = p.residual ? 2 : 1;
  // 64 bytes of a transposed column at once pay for two blocks of a row, not for four.
  const bool high = clusters && (p.cols <= kPlainTileCols || p.cols > 2 * kPlainTileCols);
  const int64_t tile_rows = p.columnwise ? (high ? 2 : 1) * kLeastTileRows : 0;
  for (int64_t ranks = p.columnwise && high && p.cols > kPlainTileCols / 2 ? 2 : 1;
       ranks <= max_ranks; ranks *= 2) {
    const int64_t slice = (total + ranks - 1) / ranks,
                  most = 32 * (p.columnwise ? kRingVecs<T, true> : kRingVecs<T, false>);
    for (int64_t warps = (slice + most - 1) / most; warps <= kRingWarps; ++warps) {
      const int64_t vecs = (slice + warps - 1) / warps, groups = kRingWarps / warps;
      if (warps > 1 && vecs < 32) break;
      const int64_t tile = tile_rows * tile_pitch(static_cast<int>(warps * vecs));
      const int64_t fixed =
          warps * vecs * kVec * 4 * params + kRingWarps * 16 + groups * ranks * warps * 16 + tile;
      const int64_t slot =
          kRingWarps * (arrays * vecs * kVec * static_cast<int64_t>(sizeof(T)) + 8);
      const int64_t slots = std::min<int64_t>((limit - fixed) / slot, kMaxRingSlots);
      if (fixed > limit || slots < 1) continue;
      plan->shape = {static_cast<int>(warps), static_cast<int>(vecs), static_cast<int>(slots),
                     static_cast<int>(tile_rows)};
      plan->ranks = ranks;
      plan->shared_bytes = static_cast<size_t>(fixed + slots * slot);
      return true;
    }
  }
  return false;
}

template <typename T, bool kLayerNorm>
void launch_norm_ring(const NormFwd& p, const RingPlan& plan, int device, cudaStream_t stream) {
  const auto kernel =
      p.columnwise ? norm_ring_kernel<T, kLayerNorm, true> : norm_ring_kernel<T, kLayerNorm, false>;
  const void* address = reinterpret_cast<const void*>(kernel);
  check_cuda(cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(plan.shared_bytes)),
             "cudaFuncSetAttribute");
  const int64_t tile_rows = p.columnwise ? plan.shape.tile_rows : kRingWarps / plan.shape.warps;
  // Two rounds of tiles were faster, but for layer_norm without a residual.
  const int64_t rounds = p.columnwise && (!kLayerNorm || p.residual) ? 2 : 1;
  const int64_t lines =
      std::min((p.rows + tile_rows - 1) / tile_rows,
               rounds * max_active_clusters(address, kRingThreads, static_cast<int>(plan.ranks),
                                            plan.shared_bytes, device));
  launch_cluster(kernel, lines * plan.ranks, kRingThreads, static_cast<int>(plan.ranks),
                 plan.shared_bytes, stream, p, plan.shape);
}

}  // namespace apex_te
