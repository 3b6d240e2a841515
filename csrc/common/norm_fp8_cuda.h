// Forward of the norms to FP8 with the transposed copy.
//
// From sm_90 on, x is read once: a block holds kTile = 4096 / lanes rows of 8 * lanes columns in
// registers, 8 x 8 values a thread, and a cluster of blocks holds whole rows. The blocks exchange
// the rows' statistics through distributed shared memory, and the codes pass through shared memory
// so that columns leave as kTile contiguous bytes. Elsewhere (older archs, more columns than a
// cluster holds, no alignment) the statistics come from norm_fwd_cuda.h and tiles read x again.
#pragma once

#include <cstdlib>
#include "common/fp8_tile.h"
#include "common/norm_fwd_launch_cuda.h"

namespace apex_te {

constexpr int kThreadRows = 8;     // rows of 8 columns that a thread holds
constexpr int kMaxTileLanes = 128; // threads across a tile
#ifndef FP8_SLOTS
#define FP8_SLOTS 4
#endif
#ifndef FP8_MINB
#define FP8_MINB 1
#endif
#ifndef FP8_THREADS
#define FP8_THREADS 512
#endif
constexpr int kTileSlots = FP8_SLOTS;     // tiles of a block in shared memory, at most
template <typename T>  // registers allow
constexpr int kMaxTileThreads = sizeof(T) == 2 ? FP8_THREADS : 256;

struct TileShape {
  int log_lanes;  // threads across a tile: 32, 64 or 128
  int vecs;       // vectors of a row in a block, at most the lanes
  int slots;      // tiles in shared memory
};

// Sums 8 values over a warp; lane l gets the sum of value l / 4.
__device__ __forceinline__ float warp_sum8(const float* values) {
  const int lane = threadIdx.x % 32;
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool upper = lane & 16;
    const float give = upper ? values[i] : values[i + 4];
    four[i] = (upper ? values[i + 4] : values[i]) + __shfl_xor_sync(0xFFFFFFFFu, give, 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool upper = lane & 8;
    const float give = upper ? four[i] : four[i + 2];
    two[i] = (upper ? four[i + 2] : four[i]) + __shfl_xor_sync(0xFFFFFFFFu, give, 8);
  }
  const bool upper = lane & 4;
  const float give = upper ? two[0] : two[1];
  float sum = (upper ? two[1] : two[0]) + __shfl_xor_sync(0xFFFFFFFFu, give, 4);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  return sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
}

// Launched in clusters of the blocks that a row needs. A block has tiles of `rows` x 8 * vecs:
// the tiles it will need are on their way to shared memory while one is in registers, whose
// transposed codes are written while the statistics of the next are exchanged.
template <typename T, bool kLayerNorm>
__global__ void __launch_bounds__(kMaxTileThreads<T>, sizeof(T) == 2 ? FP8_MINB : 1)
    norm_fp8_cluster_kernel(const NormFwd p, const TileShape shape) {
  extern __shared__ __align__(16) unsigned char tile_memory[];
  const int lanes = 1 << shape.log_lanes, threads = blockDim.x;
  const int tile_rows = threads * kThreadRows >> shape.log_lanes;
  const int lane = threadIdx.x & (lanes - 1), group = threadIdx.x >> shape.log_lanes;
  const RowRanks ranks{static_cast<int>(cluster_size()), static_cast<int>(cluster_rank())};
  const int begin = ranks.rank * shape.vecs;  // of the block, in vectors
  const int total_vecs = static_cast<int>(p.cols / kVec);
  const int vecs = min(shape.vecs, total_vecs - begin);
  const bool has_col = lane < vecs;
  const int64_t col0 = static_cast<int64_t>(begin) * kVec, col = col0 + lane * kVec;
  const int log_across = shape.log_lanes - 5, across = 1 << log_across;  // warps across a tile
  const int parts = ranks.count * across;                                // and a row

  // Shared memory: tiles of x; codes, 8 columns padded by 16 bytes and every other 8 lanes with
  // neighbours swapped, so that there are no bank conflicts; mean and sum of squares around it of the
  // parts of rows, of two tiles; barriers of their exchange and of the slots.
  const int row_bytes = shape.vecs * kVec * static_cast<int>(sizeof(T));
  const int arrays = p.residual ? 2 : 1, slot_bytes = arrays * tile_rows * row_bytes;
  uint2* tile = reinterpret_cast<uint2*>(tile_memory + shape.slots * slot_bytes);
  float2* stats = reinterpret_cast<float2*>(tile + threads * kVec + 2 * lanes);
  uint64_t* exchange = reinterpret_cast<uint64_t*>(stats + 2 * parts * tile_rows);
  uint64_t* barriers = exchange + 2;

  const int64_t tiles = (p.rows + tile_rows - 1) / tile_rows, stride = gridDim.x / ranks.count;
  int64_t t = blockIdx.x / ranks.count;
  const int warp = threadIdx.x / 32, warps = threads / 32;
  const auto refill = [&](int64_t from, int slot) {  // each warp has its share of the rows
    if (from >= tiles) return;
    for (int r = warp; r < tile_rows; r += warps) {
      const int64_t row = from * tile_rows + r;
      for (int a = 0; a < arrays; ++a) {
        unsigned char* to = tile_memory + slot * slot_bytes + (a * tile_rows + r) * row_bytes;
        if (row < p.rows) {
          const T* x = static_cast<const T*>(a ? p.residual : p.x) + row * p.cols + col0;
          copy_chunk(to, x, vecs * kVec * static_cast<int>(sizeof(T)), barriers + slot);
        } else if (threadIdx.x % 32 < kCopyArrivals) {
          barrier_arrive(barriers + slot);
        }
      }
    }
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < shape.slots; ++s)
      barrier_init(barriers + s, kCopyArrivals * tile_rows * arrays);
    barrier_init(exchange, 1);
    barrier_init(exchange + 1, 1);
  }
  __syncthreads();
  for (int s = 0; s < shape.slots; ++s) refill(t + s * stride, s);
  const uint32_t seen = amax_so_far(p.amax);
  const float scale = *p.scale;
  float gamma[kVec], bias[kVec];
  if (has_col) {
    load_gamma<T>(p.params, col, gamma);
    if (kLayerNorm) load_bias<T>(p.params, col, bias);
  }
  if (ranks.count > 1) cluster_sync();  // every block of the cluster has begun

  const int of_row = ranks.rank * across + lane / 32, sub = threadIdx.x % 4;
  const int stats_row = group * kThreadRows + threadIdx.x % 32 / 4;  // lane l has row l / 4
  const int chunks = tile_rows / kThreadRows;                        // of 8 bytes in a column
  // A thread's pieces of 16 bytes lie in the same rows, as many columns apart as pieces lie across.
  const int log_pieces = 31 - __clz(chunks) - 1, piece = threadIdx.x & (chunks / 2 - 1);
  const int first_col = threadIdx.x >> log_pieces, col_step = threads >> log_pieces;
  const auto store_columns = [&](int64_t from) {
    const int64_t row0 = from * tile_rows + piece * 16;
    if (row0 >= p.rows) return;
    uint8_t* to = p.transposed + (col0 + first_col) * p.rows + row0;
#pragma unroll 4
    for (int c = first_col; c < vecs * kVec; c += col_step, to += col_step * p.rows) {
      const int at = (c >> 3) * (tile_rows + 2) + (c & 7) * chunks + 2 * piece;
      const uint4 pair = *reinterpret_cast<const uint4*>(&tile[at]);
      *reinterpret_cast<uint4*>(to) =
          c >> 6 & 1 ? make_uint4(pair.z, pair.w, pair.x, pair.y) : pair;
    }
  };

  float amax = 0.0f;
  int slot = 0, turn = 0;
  unsigned phase = 0, exchange_phase = 0;
  int64_t before = -1;  // the tile whose codes are in shared memory
  for (; t < tiles; t += stride) {
    const int64_t row = t * tile_rows + group * kThreadRows;
    barrier_wait(barriers + slot, phase);
    Vec8<T> in[kThreadRows];
    const T* x = reinterpret_cast<const T*>(tile_memory + slot * slot_bytes) +
                 (group * kThreadRows * shape.vecs + lane) * kVec;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r)
      in[r] = has_col && row + r < p.rows ? load_vec(x + r * shape.vecs * kVec) : Vec8<T>{};
    if (p.residual) {
      const T* residual = x + tile_rows * shape.vecs * kVec;
      T* total = static_cast<T*>(p.residual_sum) + row * p.cols + col;
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        if (!has_col || row + r >= p.rows) continue;
        in[r] = add_residual(in[r], load_vec(residual + r * shape.vecs * kVec));
        store_vec(total + r * p.cols, in[r]);
      }
    }
    __syncthreads();  // the slot is read and the codes of the tile before are staged
    refill(t + shape.slots * stride, slot);

    // Each warp's own sums over its 256 columns.
    const int first = begin + lane / 32 * 32;
    const float count = static_cast<float>(min(max(begin + vecs - first, 0), 32) * kVec);
    float sums[kThreadRows], mean = 0.0f;
    if (kLayerNorm) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        float values[kVec];
        unpack(in[r], values);
        sums[r] = ((values[0] + values[1]) + (values[2] + values[3])) +
                  ((values[4] + values[5]) + (values[6] + values[7]));
      }
      const float sum = warp_sum8(sums);
      mean = count > 0.0f ? sum / count : 0.0f;
      keep_packed(in);
    }
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      float values[kVec];
      unpack(in[r], values);
      const float centre = kLayerNorm ? __shfl_sync(0xFFFFFFFFu, mean, 4 * r) : 0.0f;
      sums[r] = 0.0f;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float centred = values[i] - centre;
        sums[r] = fmaf(centred, centred, sums[r]);
      }
      if (kLayerNorm && !has_col) sums[r] = 0.0f;
    }
    const float squares = warp_sum8(sums);
    keep_packed(in);
    float2* mine = stats + turn * parts * tile_rows + stats_row;
    if (ranks.count > 1) {
      if (threadIdx.x == 0) barrier_expect(exchange + turn, parts * tile_rows * 8);
      for (int k = sub; k < ranks.count; k += 4)
        store_remote_async(mine + of_row * tile_rows, exchange + turn, k, mean, squares);
    } else if (sub == 0) {
      mine[of_row * tile_rows] = make_float2(mean, squares);
    }
    if (before >= 0) store_columns(before);
    if (ranks.count > 1) barrier_wait(exchange + turn, exchange_phase);
    __syncthreads();  // the columns are read

    // Combined in order of columns; the 4 lanes of a row share the work and agree.
    const auto over_lanes = [](float value) {
      value += __shfl_xor_sync(0xFFFFFFFFu, value, 1);
      return value + __shfl_xor_sync(0xFFFFFFFFu, value, 2);
    };
    const auto columns_of = [&](int part) {
      const int at = (part >> log_across) * shape.vecs, end = min(at + shape.vecs, total_vecs);
      return static_cast<float>(min(max(end - at - (part & across - 1) * 32, 0), 32) * kVec);
    };
    float total = 0.0f;
    if (kLayerNorm) {
      const float some = mine[0].x;
      for (int k = sub; k < parts; k += 4)
        total = fmaf(mine[k * tile_rows].x - some, columns_of(k), total);
      mean = some + over_lanes(total) / static_cast<float>(p.cols);
      total = 0.0f;
    }
    for (int k = sub; k < parts; k += 4) {
      const float2 other = mine[k * tile_rows];
      const float off = kLayerNorm ? other.x - mean : 0.0f;
      total += kLayerNorm ? fmaf(off * off, columns_of(k), other.y) : other.y;
    }
    const float rstd = rstd_of(over_lanes(total), static_cast<float>(p.cols), p.eps);
    const int64_t of_stats = t * tile_rows + stats_row;
    if (ranks.rank == 0 && lane < 32 && sub == 0 && of_stats < p.rows) {
      if (kLayerNorm) p.mean[of_stats] = mean;
      p.rstd[of_stats] = rstd;
    }

    uint2 codes[kThreadRows];
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const float row_mean = __shfl_sync(0xFFFFFFFFu, mean, 4 * r);
      const float row_rstd = __shfl_sync(0xFFFFFFFFu, rstd, 4 * r);
      codes[r] = make_uint2(0, 0);
      if (!has_col || row + r >= p.rows) continue;
      float values[kVec];
      unpack(in[r], values);
      normalize<kLayerNorm>(values, gamma, bias, row_mean, row_rstd);
#pragma unroll
      for (int i = 0; i < kVec; ++i) amax = larger(amax, values[i]);
      codes[r] = encode_as(p.fp8, values, scale);
      if (p.rowwise) *reinterpret_cast<uint2*>(p.rowwise + (row + r) * p.cols + col) = codes[r];
    }
    uint32_t low[kVec], high[kVec];  // of column c: rows 0-3 and 4-7
    transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, low);
    transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, low + 4);
    transpose4(codes[4].x, codes[5].x, codes[6].x, codes[7].x, high);
    transpose4(codes[4].y, codes[5].y, codes[6].y, codes[7].y, high + 4);
#pragma unroll
    for (int c = 0; c < kVec; ++c)
      tile[lane * (tile_rows + 2) + c * chunks + (group ^ (lane >> 3 & 1))] =
          make_uint2(low[c], high[c]);
    before = t;
    exchange_phase ^= turn;
    turn ^= 1;
    if (++slot == shape.slots) slot = 0, phase ^= 1;
  }
  __syncthreads();
  if (before >= 0) store_columns(before);
  finish_fp8(p, magnitude_bits(amax), seen);
}

// The same from statistics that are there, for any size and alignment; x is the sum already.
template <typename T, bool kLayerNorm, bool kAligned>
__global__ void __launch_bounds__(FP8Tile<128>::kThreads) norm_fp8_tile_kernel(const NormFwd p) {
  using Tile = FP8Tile<128>;
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  const Tile::Place at(p.rows, p.cols, blockIdx.x);
  Vec8<T> in[Tile::kRows];
  Tile::load<T, kAligned>(static_cast<const T*>(p.x), p.cols, at, in);
  const uint32_t seen = amax_so_far(p.amax);
  const float scale = *p.scale;
  float gamma[kVec], bias[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const bool has = at.col + i < p.cols;
    gamma[i] =
        has && p.params.weight
            ? load_param<T>(p.params.weight, p.params.is_fp32, at.col + i) + p.params.gamma_offset
            : 1.0f;
    bias[i] =
        has && p.params.bias ? load_param<T>(p.params.bias, p.params.is_fp32, at.col + i) : 0.0f;
  }
  uint32_t amax = 0;
  uint2 codes[Tile::kRows];
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r) {
    codes[r] = make_uint2(0, 0);
    if (at.row + r >= p.rows) continue;
    float values[kVec];
    unpack(in[r], values);
    normalize<kLayerNorm>(values, gamma, bias, kLayerNorm ? p.mean[at.row + r] : 0.0f,
                          p.rstd[at.row + r]);
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (at.col + i < p.cols) amax = max(amax, magnitude_bits(values[i]));
    codes[r] = encode_as(p.fp8, values, scale);
  }
  if (p.rowwise) Tile::store_rows<kAligned>(p.rowwise, p.cols, at, codes);
  Tile::stage_columns(codes, tile);
  __syncthreads();
  Tile::store_columns<kAligned>(p.transposed, p.rows, at, tile);
  finish_fp8(p, amax, seen);
}

struct TilePlan {
  TileShape shape;
  int threads;
  int64_t ranks, tiles;
  size_t shared_bytes;
};

// Tiles of 32 rows or more, whose columns are whole sectors, from clusters as small as they can be.
template <typename T>
bool plan_norm_tiles(const NormFwd& p, int device, TilePlan* plan) {
  const int64_t total = p.cols / kVec, max_ranks = has_clusters(device) ? kMaxNormRanks : 1;
  const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  int threads = kMaxTileThreads<T>, log_lanes = 7;
  if (const char* e = getenv("NT")) threads = atoi(e);
  if (const char* e = getenv("LL")) log_lanes = atoi(e);
  int64_t budget = limit;
  if (const char* e = getenv("NB")) budget = limit / atoi(e) - 1024;
  const int64_t ranks = (total + (1 << log_lanes) - 1) >> log_lanes;
  if (ranks > max_ranks) return false;
  const int64_t vecs = (total + ranks - 1) / ranks, rows = threads * kThreadRows >> log_lanes;
  const int64_t fixed = int64_t{threads} * kVec * 8 + (16 << log_lanes) +
                        16 * ranks * ((1 << log_lanes) / 32) * rows + 1024;
  const int64_t slot = rows * vecs * kVec * static_cast<int64_t>(sizeof(T)) * (p.residual ? 2 : 1) + 8;
  const int64_t slots = std::min<int64_t>((budget - fixed) / slot, kTileSlots);
  if (fixed > budget || slots < 1) return false;
  plan->shape = {log_lanes, static_cast<int>(vecs), static_cast<int>(slots)};
  plan->threads = threads;
  plan->ranks = ranks;
  plan->tiles = (p.rows + rows - 1) / rows;
  plan->shared_bytes = static_cast<size_t>(fixed + slots * slot);
  check_grid(plan->tiles * ranks, "norm");
  return true;
}

template <typename T, bool kLayerNorm>
void launch_norm_fp8(const NormFwd& p, const char* op, int device, cudaStream_t stream) {
  const bool aligned =
      norm_fwd_aligned(p) && fp8_tile_aligned(p.rows, p.cols, p.rowwise, p.transposed);
  if (!p.rows || !p.cols) return launch_norm_fwd_rows<T, kLayerNorm>(p, op, device, stream);
  TilePlan plan;
  if (aligned && plan_norm_tiles<T>(p, device, &plan)) {
    const auto kernel = norm_fp8_cluster_kernel<T, kLayerNorm>;
    const void* address = reinterpret_cast<const void*>(kernel);
    check_cuda(cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(plan.shared_bytes)),
               op);
    const int64_t at_once = max_active_clusters(address, plan.threads, static_cast<int>(plan.ranks),
                                                plan.shared_bytes, device);
    launch_cluster(kernel, std::min(at_once, plan.tiles) * plan.ranks, plan.threads,
                   static_cast<int>(plan.ranks), plan.shared_bytes, stream, p, plan.shape);
    return;
  }
  NormFwd statistics = p;
  statistics.scale = nullptr;
  statistics.rowwise = nullptr;
  statistics.amax = statistics.scale_inv = nullptr;
  launch_norm_fwd_rows<T, kLayerNorm>(statistics, op, device, stream);
  NormFwd tiles = p;
  if (p.residual) tiles.x = p.residual_sum;
  const int64_t blocks = FP8Tile<128>::num_tiles(p.rows, p.cols);
  check_grid(blocks, op);
  const bool tiles_aligned =
      is_aligned(tiles.x, 16) && fp8_tile_aligned(p.rows, p.cols, p.rowwise, p.transposed);
  const auto kernel = tiles_aligned ? norm_fp8_tile_kernel<T, kLayerNorm, true>
                                    : norm_fp8_tile_kernel<T, kLayerNorm, false>;
  kernel<<<static_cast<unsigned>(blocks), FP8Tile<128>::kThreads, 0, stream>>>(tiles);
  check_cuda(cudaGetLastError(), op);
}

template <bool kLayerNorm>
void launch_norm_fwd(const NormFwd& p, const char* op, int device, void* stream) {
  const auto run = [&](auto element) {
    using T = decltype(element);
    const auto s = static_cast<cudaStream_t>(stream);
    if (p.transposed)
      launch_norm_fp8<T, kLayerNorm>(p, op, device, s);
    else
      launch_norm_fwd_rows<T, kLayerNorm>(p, op, device, s);
  };
  switch (p.dtype) {
    case DType::kFloat32:
      return run(float{});
    case DType::kFloat16:
      return run(Half{});
    default:
      return run(BFloat16{});
  }
}

}  // namespace apex_te
