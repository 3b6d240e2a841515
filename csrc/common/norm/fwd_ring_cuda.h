// Forward of the norms for many rows: a persistent grid through which the rows stream.
//
// A warp has a row, or a part of a long one, of up to 8 KB: it takes it from shared memory into
// registers, lets the copy of its next row begin, and normalises. No load waits for a reduction
// and, but for the statistics of long rows, no warp for another. Rows whose parameters do not fit
// in a block's shared memory go to a cluster of blocks. Weight and bias stay in shared memory,
// widened. For a columnwise copy a block has tiles of 32 or 64 rows, whose codes also go to shared
// memory, from where they leave by columns.
//
// Rows that vectors do not fit (any_row_cuda.h) are copied with the words at their ends; they, and
// the columns that 8 bytes do not fit, have a kernel of their own.
#pragma once

#include "common/gpu/async_copy.h"
#include "common/gpu/fp8_tile.h"
#include "common/norm/any_row_cuda.h"
#include "common/norm/fwd_cuda.h"

namespace apex_te {

constexpr int kRingWarps = 16;
constexpr int kRingThreads = kRingWarps * 32;
constexpr int kMaxRingSlots = 8;
// Of a thread: 64 registers, or half where codes or rows of any length need memory.
template <typename T, bool kTiles, bool kAny>
constexpr int kRingVecs = kAny     ? 16 / sizeof(T)
                          : kTiles ? (sizeof(T) == 4 ? 4 : 9)
                                   : 32 / sizeof(T);
constexpr int64_t kLeastTileRows = 32;  // whose columnwise codes are whole sectors
constexpr int64_t kTallTileRows = 64;
constexpr int64_t kRingFlight = 40 << 10;  // bytes that a block needs on their way

struct RingShape {
  int warps;  // of a row in a block
  int vecs;   // of a row in a warp
  int slots;  // rows of a warp in shared memory
  int tile_rows;
  bool any;  // rows and columns may have any length and begin at any address; the kernel's kAny

  // Elements of a row, or its residual, in a slot.
  template <typename T>
  __host__ __device__ int pitch() const {
    return vecs * kVec + (any ? kRunMargin / static_cast<int>(sizeof(T)) : 0);
  }
};

// Distance of the rows of a tile of codes in shared memory: an odd number of 8 bytes, which keeps
// 8 x 8 codes of neighbouring lanes in different banks.
__host__ __device__ inline int tile_pitch(int block_vecs) { return (block_vecs | 1) * kVec; }

// 8 rows of 8 columns of a tile of codes, turned: rows 0-3 and 4-7 of column c. The rows from the
// `present`-th on are zeros.
__device__ __forceinline__ void turn_codes(const unsigned char* tile, int pitch, int64_t present,
                                           uint32_t* low, uint32_t* high) {
  uint2 codes[8];
#pragma unroll
  for (int r = 0; r < 8; ++r)
    codes[r] = r < present ? *reinterpret_cast<const uint2*>(tile + r * pitch) : make_uint2(0u, 0u);
  transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, low);
  transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, low + 4);
  transpose4(codes[4].x, codes[5].x, codes[6].x, codes[7].x, high);
  transpose4(codes[4].y, codes[5].y, codes[6].y, codes[7].y, high + 4);
}

// A tile of codes to the columnwise output: a thread turns 8 x 8 codes, and the lanes that lie
// below each other store all rows of a column together. The output's rows are `ld` bytes long, with
// zeros behind the last of `rows`.
template <bool kAny>
__device__ __forceinline__ void store_tile(const unsigned char* tile, int tile_rows, int pitch,
                                           int cols, uint8_t* out, int64_t rows, int64_t ld,
                                           int64_t row0) {
  const int height = tile_rows / 8, width = 32 / height;
  const int lane = threadIdx.x % 32, down = lane / width;
  if (down >= height || row0 + down * 8 >= ld) return;
  const int64_t present = rows - row0 - down * 8;
  for (int v = threadIdx.x / 32 * width + lane % width; v * kVec < cols; v += kRingWarps * width) {
    uint32_t low[kVec], high[kVec];
    turn_codes(tile + down * 8 * pitch + v * kVec, pitch, present, low, high);
    uint8_t* to = out + static_cast<int64_t>(v) * kVec * ld + row0 + down * 8;
#pragma unroll
    for (int c = 0; c < kVec; ++c, to += ld)
      if (!kAny || v * kVec + c < cols) *reinterpret_cast<uint2*>(to) = make_uint2(low[c], high[c]);
  }
}

// The same at any address, with an output of any row length: a lane stores the 8 bytes around its
// address, the first of them of the lane above it. A call, so that no kernel keeps registers for
// it.
static __device__ __noinline__ void store_tile_any(const unsigned char* tile, int tile_rows,
                                                   int pitch, int cols, uint8_t* out, int64_t rows,
                                                   int64_t ld, int64_t row0) {
  const int height = tile_rows / 8, width = 32 / height;
  const int lane = threadIdx.x % 32, down = lane / width;
  const int64_t present = rows - row0 - down * 8;
  const int length = static_cast<int>(min(ld - row0, static_cast<int64_t>(tile_rows)));
#pragma unroll 1
  for (int first = threadIdx.x / 32 * width; first * kVec < cols; first += kRingWarps * width) {
    const int v = first + lane % width;
    uint32_t low[kVec], high[kVec];
    turn_codes(tile + down * 8 * pitch + v * kVec, pitch, v * kVec < cols ? present : 0, low, high);
    uint8_t* to = out + static_cast<int64_t>(v) * kVec * ld + row0 + down * 8;
    // One column's code, for which the others move up.
#pragma unroll 1
    for (int c = 0; c < kVec; ++c, to += ld) {
      const uint64_t own = uint64_t{high[0]} << 32 | low[0];
      const uint64_t above = __shfl_up_sync(0xFFFFFFFFu, own, width);
#pragma unroll
      for (int i = 0; i < kVec - 1; ++i) low[i] = low[i + 1], high[i] = high[i + 1];
      if (v * kVec + c >= cols) continue;
      const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(to) % 8);
      const int end = length - down * 8 + shift;  // of the column, from the word on
      const uint64_t bytes = shift ? own << 8 * shift | above >> (64 - 8 * shift) : own;
      if (end > 0) store_bytes(to - shift, bytes, down ? 0 : shift, end);
      if (down == height - 1 && shift && end > 8)
        store_bytes(to - shift + 8, own >> (64 - 8 * shift), 0, end - 8);
    }
  }
}

// The part of the rows that a warp has: `part` of the `parts` that blocks and warps cut a row into.
struct RingPlace {
  RowRanks ranks;
  int lane, warp;
  int groups, group;  // of warps of a block that share a row, and this warp's
  int group_warp;     // this warp within its group
  int parts, part;
  int total_cols, part_vecs, block_vecs;  // of a row, of a part at most, of a row in a block
  int cols, vecs;                         // of this part
  int64_t col0;                           // its first column

  __device__ __forceinline__ RingPlace(const NormFwd& p, const RingShape& shape)
      : ranks{static_cast<int>(cluster_size()), static_cast<int>(cluster_rank())},
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        groups(kRingWarps / shape.warps),
        group(warp / shape.warps),
        group_warp(warp - group * shape.warps),
        parts(ranks.count * shape.warps),
        part(ranks.rank * shape.warps + group_warp),
        total_cols(static_cast<int>(p.cols)),
        part_vecs(shape.vecs),
        block_vecs(shape.warps * shape.vecs),
        cols(cols_of(part)),
        vecs((cols + kVec - 1) / kVec),
        col0(static_cast<int64_t>(part) * shape.vecs * kVec) {}

  __device__ __forceinline__ int cols_of(int i) const {
    return min(max(total_cols - i * part_vecs * kVec, 0), part_vecs * kVec);
  }
  // The columns from the lane's vector k on.
  __device__ __forceinline__ int left(int k) const { return cols - (k * 32 + lane) * kVec; }
};

// A block's shared memory, carved in the order of the members.
template <typename T, bool kTiles>
struct RingMemory {
  int arrays;                // in a slot: x, and a residual that a columnwise copy needs
  T* slots;                  // of this warp
  float4 *gammas, *biases;   // 4 of each 8 columns in one plane and 4 in another
  uint64_t *full, *arrived;  // barriers: one for each slot, two for the group's statistics
  bool has_gamma;            // which rows of any length need for zeros behind the last column
  float2* statistics;        // of the group: mean and sum of squares of each part, of two rows
  unsigned char* tile;       // FP8 data for the columnwise copy
  int pitch;

  __device__ __forceinline__ RingMemory(unsigned char* memory, const NormFwd& p,
                                        const RingShape& shape, const RingPlace& at) {
    arrays = (kTiles || shape.any) && p.residual ? 2 : 1;
    const int slot_bytes = arrays * shape.pitch<T>() * static_cast<int>(sizeof(T));
    slots = reinterpret_cast<T*>(memory + at.warp * shape.slots * slot_bytes);
    gammas = reinterpret_cast<float4*>(memory + kRingWarps * shape.slots * slot_bytes);
    has_gamma = p.params.weight || shape.any;
    biases = gammas + (has_gamma ? 2 * at.block_vecs : 0);
    uint64_t* barriers =
        reinterpret_cast<uint64_t*>(biases + (p.params.bias ? 2 * at.block_vecs : 0));
    full = barriers + at.warp * shape.slots;
    arrived = barriers + kRingWarps * shape.slots + 2 * at.group;
    uint64_t* rest = barriers + kRingWarps * (shape.slots + 2);
    statistics = reinterpret_cast<float2*>(rest) + at.group * 2 * at.parts;
    tile = reinterpret_cast<unsigned char*>(rest) + at.groups * 2 * at.parts * 8;
    pitch = tile_pitch(at.block_vecs);
  }
  __device__ __forceinline__ T* slot(int i, const RingShape& shape) const {
    return slots + i * arrays * shape.pitch<T>();
  }
};

// The rows of a warp in order. A block has tiles of rows, a group one row at a time: rows `group`,
// `groups` + `group`, ... of each tile.
template <typename T, bool kTiles>
struct RingRows {
  int tile_rows;
  int turns;              // rows of a group in a tile
  int64_t first, stride;  // the block's first tile, and the distance to its next
  int64_t coming;         // the tile and its row that are copied next
  int coming_turn = 0;

  __device__ __forceinline__ RingRows(const RingShape& shape, const RingPlace& at) {
    tile_rows = kTiles ? shape.tile_rows : at.groups;
    turns = kTiles ? (tile_rows + at.groups - 1) / at.groups : 1;
    const int64_t line = blockIdx.x / at.ranks.count, lines = gridDim.x / at.ranks.count;
    stride = lines * tile_rows;
    coming = first = line * tile_rows;
  }
  // The row of a turn, p.rows where the group has none.
  __device__ __forceinline__ int64_t row_of(int64_t base, int turn, const NormFwd& p,
                                            const RingPlace& at) const {
    const int r = turn * at.groups + at.group;
    return r < tile_rows && at.group < at.groups ? base + r : p.rows;
  }
  // Lets the copy of the next row into a slot begin.
  __device__ __forceinline__ void fetch(int slot, const NormFwd& p, const RingShape& shape,
                                        const RingPlace& at, const RingMemory<T, kTiles>& memory) {
    int64_t from = p.rows;
    while (from >= p.rows && coming < p.rows) {
      from = row_of(coming, coming_turn, p, at);
      if (++coming_turn == turns) coming_turn = 0, coming += stride;
    }
    if (from >= p.rows || at.vecs == 0) return;
    const int64_t begin = from * p.cols + at.col0;
    const uint32_t bytes = at.cols * static_cast<int>(sizeof(T));
    T* to = memory.slot(slot, shape);
    const auto copy = [&](T* chunk, const void* array) {
      const T* source = static_cast<const T*>(array);
      if (shape.any)
        copy_run(chunk, source + begin, bytes, source, source + p.rows * p.cols,
                 memory.full + slot);
      else
        copy_chunk(chunk, source + begin, bytes, memory.full + slot);
    };
    copy(to, p.x);
    if (memory.arrays > 1) copy(to + shape.pitch<T>(), p.residual);
  }
};

template <typename T, bool kTiles>
__device__ __forceinline__ void init_ring_barriers(const RingShape& shape, const RingPlace& at,
                                                   const RingMemory<T, kTiles>& memory) {
  if (at.lane == 0)
    for (int s = 0; s < shape.slots; ++s)
      barrier_init(memory.full + s, kCopyArrivals * memory.arrays);
  if (at.lane == 0 && at.group_warp == 0 && at.group < at.groups) {
    const unsigned arrivals = at.ranks.count > 1 ? 1 : shape.warps;
    barrier_init(memory.arrived, arrivals);
    barrier_init(memory.arrived + 1, arrivals);
  }
  __syncwarp();
}

// Widens the block's columns of weight and bias into shared memory.
template <typename T, bool kTiles>
__device__ __forceinline__ void load_ring_params(const NormFwd& p, const RingShape& shape,
                                                 const RingPlace& at,
                                                 const RingMemory<T, kTiles>& memory) {
  if (shape.any) {
    const int64_t col0 = static_cast<int64_t>(at.ranks.rank) * at.block_vecs * kVec;
    const auto load = [&](float4* to, const void* params, float offset) {
      load_any_params<T>(to, at.block_vecs, params, p.params.is_fp32, offset, col0,
                         at.block_vecs * kVec, p.cols);
    };
    load(memory.gammas, p.params.weight, p.params.gamma_offset);
    if (p.params.bias) load(memory.biases, p.params.bias, 0.0f);
    return;
  }
  const auto put = [&](float4* to, const float* values) {
    to[0] = make_float4(values[0], values[1], values[2], values[3]);
    to[at.block_vecs] = make_float4(values[4], values[5], values[6], values[7]);
  };
  for (int v = threadIdx.x; v < at.block_vecs; v += kRingThreads) {
    const int64_t col = (static_cast<int64_t>(at.ranks.rank) * at.block_vecs + v) * kVec;
    if (col >= p.cols) break;
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
}

// A row from its slot into registers; adds the residual and stores the sum. begin: the index of the
// lane's first element.
template <typename T, bool kTiles, int kVecs>
__device__ __forceinline__ void take_ring_row(const NormFwd& p, const RingShape& shape,
                                              const RingPlace& at,
                                              const RingMemory<T, kTiles>& memory, int slot,
                                              int64_t begin, Vec8<T> (&in)[kVecs]) {
  T* row = memory.slot(slot, shape);
  T* residual = row + shape.pitch<T>();
  const int64_t first = begin - at.lane * kVec;  // of the part
  if (shape.any) {
    const int size = at.cols * int{sizeof(T)}, padded = at.vecs * kVec * int{sizeof(T)};
    align_run(row, static_cast<const T*>(p.x) + first, size, padded);
    if (memory.arrays > 1)
      align_run(residual, static_cast<const T*>(p.residual) + first, size, padded);
  }
  T* x = row + at.lane * kVec;
#pragma unroll
  for (int k = 0; k < kVecs; ++k)
    in[k] = k * 32 + at.lane < at.vecs ? load_vec(x + k * 32 * kVec) : Vec8<T>{};
  if (memory.arrays > 1) {
    T* sum = shape.any ? x : static_cast<T*>(p.residual_sum) + begin;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (k * 32 + at.lane >= at.vecs) break;
      in[k] = add_residual(in[k], load_vec(residual + (k * 32 + at.lane) * kVec));
      store_vec(sum + k * 32 * kVec, in[k]);
    }
    if (shape.any)
      store_run(row, static_cast<T*>(p.residual_sum) + first, at.cols * int{sizeof(T)});
  }
}

// Statistics of the warp's columns.
template <bool kLayerNorm, bool kAny, typename T, int kVecs>
__device__ __forceinline__ Statistics warp_statistics(Vec8<T> (&in)[kVecs], const RingPlace& at) {
  const float count = static_cast<float>(at.cols);
  float mean = 0.0f, values[kVec];
  if (kLayerNorm) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (k * 32 >= at.vecs) break;
      unpack(in[k], values);
      sum += ((values[0] + values[1]) + (values[2] + values[3])) +
             ((values[4] + values[5]) + (values[6] + values[7]));
    }
    sum = warp_sum(sum);
    if (at.vecs > 0) mean = sum / count;
    keep_packed(in);
  }
  constexpr int kSums = kCentredSums<T, kLayerNorm>;
  float sums[2][kSums] = {};
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    if (k * 32 + at.lane >= at.vecs) break;
    unpack(in[k], values);
    if (kLayerNorm && kAny) fill_from(at.left(k), mean, values);
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      add_centred(kLayerNorm ? values[i] - mean : values[i], sums[i % 2]);
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[0][i] = warp_sum(sums[0][i] + sums[1][i]);
  if (at.vecs > 0) correct_mean(sums[0], count, &mean);
  keep_packed(in);
  return {mean, sums[0][0]};
}

// The statistics of a row from those of its parts, which meet at the barrier of this turn: two rows
// in turn have different barriers and memory.
struct RingExchange {
  int turn = 0;
  unsigned phase = 0;

  template <bool kLayerNorm, typename T, bool kTiles>
  __device__ __forceinline__ Statistics combine(Statistics own, float count, const RingPlace& at,
                                                const RingMemory<T, kTiles>& memory) {
    float2* shared = memory.statistics + turn * at.parts;
    uint64_t* arrived = memory.arrived + turn;
    if (at.ranks.count > 1) {
      if (at.group_warp == 0 && at.lane == 0) barrier_expect(arrived, at.parts * 8);
      if (at.lane < at.ranks.count)
        store_remote_async(shared + at.part, arrived, at.lane, own.mean, own.squares);
    } else if (at.lane == 0) {
      shared[at.part] = make_float2(own.mean, own.squares);
      barrier_arrive(arrived);
    }
    barrier_wait(arrived, phase);
    phase ^= turn;
    turn ^= 1;
    float total = 0.0f, mean = own.mean;
    if (kLayerNorm) {
      const float some = shared[0].x;
#pragma unroll 1
      for (int i = at.lane; i < at.parts; i += 32)
        total = fmaf(shared[i].x - some, static_cast<float>(at.cols_of(i)), total);
      mean = some + warp_sum(total) / count;
      total = 0.0f;
    }
#pragma unroll 1
    for (int i = at.lane; i < at.parts; i += 32) {
      const float2 other = shared[i];
      const float off = kLayerNorm ? other.x - mean : 0.0f;
      total += kLayerNorm ? fmaf(off * off, static_cast<float>(at.cols_of(i)), other.y) : other.y;
    }
    return {mean, warp_sum(total)};
  }
};

// Normalises a row: to y, or to FP8 rowwise and, at `tile_row`, into the tile of the columnwise
// copy. Raises the lane's amax. run: where a row of any length is put in shared memory first.
template <bool kLayerNorm, typename T, bool kTiles, int kVecs>
__device__ __forceinline__ void store_ring_row(const NormFwd& p, const RingPlace& at,
                                               const RingMemory<T, kTiles>& memory,
                                               const Vec8<T> (&in)[kVecs], float mean, float rstd,
                                               float scale, int64_t begin, int64_t tile_row, T* run,
                                               float* amax) {
  T* y = run ? run + at.lane * kVec : static_cast<T*>(p.y) + begin;
  uint8_t* rowwise = run ? reinterpret_cast<uint8_t*>(run) + at.lane * kVec : p.rowwise + begin;
  const bool codes_now = kTiles ? p.rowwise && !run : p.rowwise != nullptr;
  if (run) __syncwarp();  // what lies there has been read
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    if (k * 32 + at.lane >= at.vecs) break;
    float values[kVec];
    unpack(in[k], values);
    const int v = at.group_warp * at.part_vecs + k * 32 + at.lane;
    const float4 ones = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float4 g0 = memory.has_gamma ? memory.gammas[v] : ones;
    const float4 g1 = memory.has_gamma ? memory.gammas[v + at.block_vecs] : ones;
    const float4 b0 = kLayerNorm && p.params.bias ? memory.biases[v] : zeros;
    const float4 b1 = kLayerNorm && p.params.bias ? memory.biases[v + at.block_vecs] : zeros;
    const float gamma[kVec] = {g0.x, g0.y, g0.z, g0.w, g1.x, g1.y, g1.z, g1.w};
    const float bias[kVec] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
    normalize<kLayerNorm>(values, gamma, bias, mean, rstd);
    if (!kTiles && p.y) {
      Vec8<T> out;
      pack(values, &out);
      store_vec(y + k * 32 * kVec, out);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) *amax = larger_magnitude(*amax, values[i]);
      const uint2 codes = encode_as(p.fp8, values, scale);
      if (codes_now) *reinterpret_cast<uint2*>(rowwise + k * 32 * kVec) = codes;
      if (kTiles)
        *reinterpret_cast<uint2*>(memory.tile + tile_row * memory.pitch + v * kVec) = codes;
    }
  }
  if (!run) return;
  begin -= at.lane * kVec;
  if (!kTiles && p.y)
    store_run(run, static_cast<T*>(p.y) + begin, at.cols * int{sizeof(T)});
  else if (p.rowwise)
    store_run(kTiles ? memory.tile + tile_row * memory.pitch + at.group_warp * at.part_vecs * kVec
                     : reinterpret_cast<unsigned char*>(run),
              p.rowwise + begin, at.cols);
}

// kTiles: with a columnwise FP8 copy. A residual is for kTiles or kAny.
template <typename T, bool kLayerNorm, bool kTiles, bool kAny>
__global__ void __launch_bounds__(kRingThreads, 1)
    norm_ring_kernel(const NormFwd p, RingShape shape) {
  constexpr int kVecs = kRingVecs<T, kTiles, kAny>;
  shape.any = kAny;
  extern __shared__ __align__(16) unsigned char ring_memory[];
  const RingPlace at(p, shape);
  const RingMemory<T, kTiles> memory(ring_memory, p, shape, at);
  RingRows<T, kTiles> rows(shape, at);
  init_ring_barriers(shape, at, memory);
  for (int s = 0; s < shape.slots; ++s) rows.fetch(s, p, shape, at, memory);
  const uint32_t seen = amax_so_far(p.amax);
  load_ring_params(p, shape, at, memory);
  if (at.ranks.count > 1)
    cluster_sync();  // every block of the cluster has begun
  else
    __syncthreads();

  const float count = static_cast<float>(p.cols), scale = p.scale ? *p.scale : 1.0f;
  float amax = 0.0f;
  int slot = 0;
  unsigned phase = 0;
  RingExchange exchange;
  const auto release_slot = [&](int i) {
    finish_reads();
    __syncwarp();
    rows.fetch(i, p, shape, at, memory);
  };
  // The padding of a columnwise copy may need a tile of its own.
  const int64_t end = kTiles ? p.ld : p.rows;
  for (int64_t base = rows.first; base < end; base += rows.stride) {
    for (int turn = 0; turn < rows.turns; ++turn) {
      const int64_t row = rows.row_of(base, turn, p, at);
      if (row >= p.rows) continue;
      const int64_t begin = row * p.cols + at.col0 + at.lane * kVec;
      Vec8<T> in[kVecs];
      if (at.vecs > 0) barrier_wait(memory.full + slot, phase);
      take_ring_row(p, shape, at, memory, slot, begin, in);
      constexpr bool kKeeps = kAny && !kTiles;  // the slot until the row is stored
      if (!kKeeps) release_slot(slot);
      Statistics s = warp_statistics<kLayerNorm, kAny>(in, at);
      if (at.parts > 1) s = exchange.combine<kLayerNorm>(s, count, at, memory);
      const float rstd = rstd_of(s.squares, count, p.eps);
      if (at.part == 0 && at.lane == 0) {
        if (kLayerNorm) p.mean[row] = s.mean;
        p.rstd[row] = rstd;
      }
      if (kTiles || p.y || p.scale)
        store_ring_row<kLayerNorm>(p, at, memory, in, s.mean, rstd, scale, begin, row - base,
                                   kAny ? memory.slot(slot, shape) : nullptr, &amax);
      if (kKeeps) release_slot(slot);
      if (++slot == shape.slots) slot = 0, phase ^= 1;
    }
    if (kTiles) {
      const int64_t block_col = static_cast<int64_t>(at.ranks.rank) * at.block_vecs;
      uint8_t* out = p.columnwise + block_col * kVec * p.ld;
      const int cols =
          static_cast<int>(min(p.cols - block_col * kVec, int64_t{at.block_vecs} * kVec));
      __syncthreads();
      if (kAny && (p.ld | static_cast<int64_t>(reinterpret_cast<uintptr_t>(out))) % 8)
        store_tile_any(memory.tile, rows.tile_rows, memory.pitch, cols, out, p.rows, p.ld, base);
      else
        store_tile<kAny>(memory.tile, rows.tile_rows, memory.pitch, cols, out, p.rows, p.ld, base);
      __syncthreads();
    }
  }
  if (kTiles || p.scale) finish_fp8(p, magnitude_bits(amax), seen);
}

struct RingPlan {
  RingShape shape;
  int64_t ranks;
  int rounds;      // blocks for each that runs at once
  int64_t flight;  // bytes of rows on their way to a block
  size_t shared_bytes;
};

// Sets the plan for tiles of `tile_rows` (0: no columnwise copy) and `ranks` blocks of a row: the
// fewest warps of a row whose shared memory suffices, for tiles with kRingFlight where that is
// possible. Returns false where none does.
template <typename T>
bool fit_norm_ring(const NormFwd& p, bool any, int64_t limit, int64_t tile_rows, int64_t ranks,
                   RingPlan* plan) {
  const int64_t total = (p.cols + kVec - 1) / kVec;
  const int64_t params = (p.params.weight || any ? 1 : 0) + (p.params.bias ? 1 : 0);
  const int64_t arrays = p.residual ? 2 : 1;
  const int64_t slice = (total + ranks - 1) / ranks;
  if (tile_rows * slice * kVec > limit) return false;
  const int64_t most = 32 * (any         ? kRingVecs<T, false, true> / (tile_rows ? 1 : arrays)
                             : tile_rows ? kRingVecs<T, true, false>
                                         : kRingVecs<T, false, false>);
  bool found = false;
  for (int64_t warps = (slice + most - 1) / most; warps <= kRingWarps; ++warps) {
    const int64_t vecs = (slice + warps - 1) / warps, groups = kRingWarps / warps;
    if (warps > 1 && vecs < 32) break;
    const int64_t tile = tile_rows * tile_pitch(static_cast<int>(warps * vecs));
    const int64_t fixed = warps * vecs * kVec * 4 * params + kRingWarps * 16 +
                          groups * ranks * warps * 16 + tile + (any ? kRunMargin : 0);
    const int64_t row =
        arrays * (vecs * kVec * static_cast<int64_t>(sizeof(T)) + (any ? kRunMargin : 0));
    const int64_t slot = kRingWarps * (row + 8);
    const int64_t slots = std::min<int64_t>((limit - fixed) / slot, kMaxRingSlots);
    if (fixed > limit || slots < 1) continue;
    // A slot of any rows is not free before the row is stored.
    const int64_t flight = (any && !tile_rows ? slots - 1 : slots) * groups * warps * row;
    if (found && flight < kRingFlight) continue;
    plan->ranks = ranks;
    plan->shape = {static_cast<int>(warps), static_cast<int>(vecs), static_cast<int>(slots),
                   static_cast<int>(tile_rows), any};
    plan->flight = flight;
    plan->shared_bytes = static_cast<size_t>(fixed + slots * slot);
    if ((!tile_rows && !any) || flight >= kRingFlight) return true;
    found = true;
  }
  return found;
}

// Time of a plan with tiles, to compare it with others: rounds of tiles over the clusters that run
// at once, times what an H100 was slower by with each of the plan's properties.
inline double norm_ring_time(const NormFwd& p, const RingPlan& plan, int64_t processors) {
  // Clusters of 4 or more leave some multiprocessors idle.
  const int64_t usable = plan.ranks > 2 ? processors * 31 / 32 : processors;
  const int64_t tiles = (p.ld + plan.shape.tile_rows - 1) / plan.shape.tile_rows;
  const int64_t clusters = std::max<int64_t>(usable / plan.ranks, 1);
  double time = static_cast<double>((tiles + clusters - 1) / clusters * plan.shape.tile_rows) /
                static_cast<double>(plan.ranks);
  for (int64_t ranks = plan.ranks; ranks > 1; ranks /= 2) time *= 1.07;
  time *= 1.0 + 0.15 * (plan.shape.warps - 1);
  // 32 codes of a column fill a sector only if the columnwise rows begin with one.
  if (plan.shape.tile_rows == kLeastTileRows) time *= p.ld % kLeastTileRows ? 1.25 : 1.06;
  if (plan.flight < kRingFlight) time *= static_cast<double>(kRingFlight) / plan.flight;
  return time;
}

// With a columnwise copy the plan of the least time, else the fewest blocks to a row whose shared
// memory suffices. any: of rows that vectors do not fit.
template <typename T, bool kLayerNorm>
bool plan_norm_ring(const NormFwd& p, bool any, int device, RingPlan* plan) {
  const int64_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - 256;
  const int64_t most_ranks = most_norm_ranks(device);
  // Two rounds of tiles were faster, but for layer_norm without a residual.
  const int rounds = p.columnwise && (!kLayerNorm || p.residual) ? 2 : 1;
  double least = 0.0;
  RingPlan fit;
  for (int64_t ranks = 1; ranks <= most_ranks; ranks *= 2) {
    if (!p.columnwise) {
      if (!fit_norm_ring<T>(p, any, limit, 0, ranks, plan)) continue;
      plan->rounds = rounds;
      return true;
    }
    for (const int64_t tile_rows : {kTallTileRows, kLeastTileRows}) {
      if (!fit_norm_ring<T>(p, any, limit, tile_rows, ranks, &fit)) continue;
      const int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount, device);
      const double time = norm_ring_time(p, fit, processors);
      if (least > 0.0 && time >= least) continue;
      least = time;
      *plan = fit;
      plan->rounds = rounds;
    }
  }
  return least > 0.0;
}

template <typename T, bool kLayerNorm>
void launch_norm_ring(const NormFwd& p, const RingPlan& plan, int device, cudaStream_t stream) {
  const auto kernel = p.columnwise ? plan.shape.any ? norm_ring_kernel<T, kLayerNorm, true, true>
                                                    : norm_ring_kernel<T, kLayerNorm, true, false>
                      : plan.shape.any ? norm_ring_kernel<T, kLayerNorm, false, true>
                                       : norm_ring_kernel<T, kLayerNorm, false, false>;
  const void* address = reinterpret_cast<const void*>(kernel);
  allow_shared(address);
  const int64_t tile_rows = p.columnwise ? plan.shape.tile_rows : kRingWarps / plan.shape.warps;
  const int64_t rows = p.columnwise ? p.ld : p.rows;
  const int64_t lines = std::min(
      (rows + tile_rows - 1) / tile_rows,
      plan.rounds * max_active_clusters(address, kRingThreads, static_cast<int>(plan.ranks),
                                        plan.shared_bytes, device));
  launch_cluster(kernel, lines * plan.ranks, kRingThreads, static_cast<int>(plan.ranks),
                 plan.shared_bytes, stream, p, plan.shape);
}

}  // namespace apex_te
