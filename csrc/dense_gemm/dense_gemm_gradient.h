// What the epilogues share that make FP8 data of the gradient of an activation's input, rowwise and
// columnwise, and of the activation itself. A warpgroup of its own makes them while the next tile
// is multiplied.
#pragma once

#include "dense_gemm/dense_gemm_codes.h"
#include "dense_gemm/dense_gemm_kernel.h"

namespace apex_te {

// Shared memory behind the ring's: a tile of rounded sums, in parts of 32 columns of which 16 rows,
// a kilobyte, give place to two kinds of codes once they have been read; two slots; and codes of a
// third kind, 512 bytes for a half of a warp's rows.
struct Handed {
  uint64_t full, empty;
};
constexpr int kPart = 32, kHalfRows = 16;
constexpr uint32_t kHalfBytes = kHalfRows * kPart * 2, kKindBytes = kHalfRows * kPart;
constexpr int kEpilogueWarps = 4;

template <typename V>
constexpr uint32_t kTileBytes = kTileM * V::kColumns * 2;
constexpr uint32_t kActBytes = kEpilogueWarps * kKindBytes;
constexpr uint32_t kSlotBytes = kEpilogueWarps * 2 * kHalfBytes;
template <typename V>
constexpr uint32_t kExchangeBytes = kTileBytes<V> + 2 * kSlotBytes + kActBytes + sizeof(Handed);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename V>
struct Exchange {
  static_assert(V::kColumns % kPart == 0, "parts of the tile");
  uint32_t tile;
  __device__ __forceinline__ uint32_t hidden() const { return tile + kTileBytes<V>; }
  __device__ __forceinline__ uint32_t act() const { return hidden() + 2 * kSlotBytes; }
  __device__ __forceinline__ Handed* handed() const {
    return static_cast<Handed*>(__cvta_shared_to_generic(act() + kActBytes));
  }
};

// The place of 8 columns of a tile's row. Eight rows one below the other lie in different banks,
// and so do all columns of rows 0 and 2, 1 and 3, and so on, of a part.
__device__ __forceinline__ uint32_t place_in_tile(uint32_t part, uint32_t row, uint32_t chunk) {
  const uint32_t place = (row & ~3u) | (row & 1) << 1 | (row >> 1 & 1);
  return (part * kTileM + place) * (kPart * 2) + (chunk ^ place / 2 % 4) * 16;
}

// Hands the rounded sums to the epilogue's warpgroup. kWidth: columns of hidden for each of theirs.
template <typename V, int kWidth>
struct HandOver {
  static constexpr int kSteps = 0;
  const Params& p;
  Exchange<V> exchange;
  uint32_t phase = 1;

  __device__ __forceinline__ HandOver(const Params& params, uint32_t staged)
      : p(params), exchange{staged} {}

  static __device__ __forceinline__ void prefetch(const Params& p, const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      prefetch_box(p.added, tile.column + i * static_cast<int>(p.g.n), tile.row);
  }

  __device__ __forceinline__ void store(const float (&d)[kSums<V>], const Tile&, float factor) {
    const MatrixRow own;
    const uint32_t row = threadIdx.x / 32 * kWarpRows + own.row;
    barrier_wait(&exchange.handed()->empty, phase);
    phase ^= 1;
#pragma unroll
    for (int j = 0; j < V::kColumns / 8; j += 2) {
      const float* x = d + 4 * j;
      store_matrices(
          exchange.tile + place_in_tile(j / 4, row, j % 4 + own.right),
          bf16x2_of(x[0] * factor, x[1] * factor), bf16x2_of(x[2] * factor, x[3] * factor),
          bf16x2_of(x[4] * factor, x[5] * factor), bf16x2_of(x[6] * factor, x[7] * factor));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&exchange.handed()->full);
  }

  __device__ __forceinline__ void finish() const {}
};

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// The first `count` bytes; zeros after them.
__device__ __forceinline__ uint4 first_bytes(uint4 v, int count) {
  const auto keep = [count](uint32_t word, int before) {
    const int bytes = min(max(count - before, 0), 4);
    return bytes == 4 ? word : word & ((1u << 8 * bytes) - 1);
  };
  return make_uint4(keep(v.x, 0), keep(v.y, 4), keep(v.z, 8), keep(v.w, 12));
}

// FP8 codes of values times the scale, in the bytes of two words.
template <typename Format>
__device__ __forceinline__ void encode_fp8x8(const float (&v)[8], float scale,
                                             uint32_t (&codes)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    codes[i] = encode_fp8x2<Format>(v[4 * i] * scale, v[4 * i + 1] * scale) |
               encode_fp8x2<Format>(v[4 * i + 2] * scale, v[4 * i + 3] * scale) << 16;
}

// By a warpgroup. A warp has 32 rows of a tile, of which it takes 32 columns after the other, in
// two halves of 16 rows: a lane has 8 columns of two rows, one below the other. Self: what it makes
// of them. Two halves of hidden, of kWidth columns for each of the tile's, are on their way.
template <typename Self, typename V, int kWidth>
struct GradientEpilogue {
  static constexpr int kParts = V::kColumns / kPart;
  const Params& p;
  Exchange<V> exchange;
  float scale, act_scale;
  float largest = 0.0f;

  __device__ __forceinline__ GradientEpilogue(const Params& params, uint32_t staged)
      : p(params),
        exchange{staged},
        scale(scale_of(params.gated)),
        act_scale(params.gated.act_columnwise ? *params.gated.act_scale : 1.0f) {}

  static __device__ __forceinline__ uint32_t warp() { return threadIdx.x / 32 % kEpilogueWarps; }
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }
  // Pair of rows of a half, and group of 8 columns.
  static __device__ __forceinline__ uint32_t pair() { return lane() / 4; }
  static __device__ __forceinline__ uint32_t right() { return lane() % 4; }

  // Where the lane is in hidden and in the rowwise copy: how many elements before its first one,
  // and how many rows and columns of the result follow from there on.
  struct Cursor {
    int64_t before;
    int rows, columns;
    __device__ __forceinline__ bool has(int row) const { return columns > 0 && rows > row; }
  };
  __device__ __forceinline__ Cursor cursor_of(const Tile& tile) const {
    const int row = tile.row + static_cast<int>(warp() * 32 + 2 * pair());
    const int column = tile.column + static_cast<int>(8 * right());
    return {row * (kWidth * p.g.n) + column, static_cast<int>(p.g.m) - row,
            static_cast<int>(p.g.n) - column};
  }

  __device__ __forceinline__ void copy(uint32_t to, const uint16_t* from, bool exists) const {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(exists ? 16 : 0), "l"(p.keep_hidden)
                 : "memory");
  }

  static __device__ __forceinline__ void unpack(const uint4& words, float (&v)[8]) {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = low_of(pairs[i]);
      v[2 * i + 1] = high_of(pairs[i]);
    }
  }

  // Where a column's 16 codes of a half lie, in units of 16 bytes: those that a warp writes at once
  // in different banks, and those that it reads at once, of both halves.
  static __device__ __forceinline__ uint32_t unit_of(uint32_t column, uint32_t half) {
    return ((column & ~7u) | ((column + column / 8 * 2) & 7)) ^ half * 4;
  }
  // Of the column to which the lane writes in store_both.
  static __device__ __forceinline__ uint32_t unit_of_lane(uint32_t half) {
    return unit_of(lane() % 8 / 2 * 8 + lane() / 8 * 2 + lane() % 2, half);
  }
  // The column that the first half has there.
  static __device__ __forceinline__ uint32_t column_at(uint32_t unit) {
    return (unit & ~7u) | ((unit - unit / 8 * 2) & 7);
  }
  // Codes of a half, of one kind after the other.
  __device__ __forceinline__ uint32_t half_of(int part, uint32_t half) const {
    return exchange.tile + (part * kTileM + warp() * 32 + half * kHalfRows) * (kPart * 2);
  }

  // Transposes the codes of a half: a pair of rows is an element of 16 bits.
  static __device__ __forceinline__ void store_both(uint32_t to, const uint32_t (&row)[2],
                                                    const uint32_t (&row_1)[2]) {
    store_transposed(to, __byte_perm(row[0], row_1[0], 0x5140),
                     __byte_perm(row[0], row_1[0], 0x7362), __byte_perm(row[1], row_1[1], 0x5140),
                     __byte_perm(row[1], row_1[1], 0x7362));
  }
  __device__ __forceinline__ void store_16(void* to, const uint4& v) const {
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(p.keep_out)
                 : "memory");
  }
  __device__ __forceinline__ void store_row(uint8_t* to, const uint32_t (&codes)[2]) const {
    asm volatile(
        "st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(__cvta_generic_to_global(to)),
        "r"(codes[0]), "r"(codes[1]), "l"(p.keep_out)
        : "memory");
  }

  // The warp's first column and row, which is a column of the columnwise copies.
  struct Corner {
    int column, token;
  };
  static __device__ __forceinline__ Corner corner_of(const Tile& tile) {
    return {tile.column, tile.row + static_cast<int>(warp() * 32)};
  }
  __device__ __forceinline__ void store_column(uint8_t* to, uint32_t from, int rows) const {
    uint4 v = load_shared(from);
    if (rows < kHalfRows) v = first_bytes(v, rows);
    store_16(to, v);
  }
  // Calls `store` with where 16 rows of a column lie in a columnwise copy, and how many of them
  // exist.
  template <typename Store>
  __device__ __forceinline__ void with_column(int column, int token, const Store& store) const {
    if (column < p.g.n && token < p.gated.ld)
      store(column * p.gated.ld + token, static_cast<int>(p.g.m) - token);
  }

  // Columns of a half, and sums of the columns of a part, for those that have such.
  template <int kHalf>
  __device__ __forceinline__ void store_half(const Corner&) const {}
  __device__ __forceinline__ void store_sums(const Corner&) const {}

  // All tiles of the block.
  __device__ __forceinline__ void run() {
    const int rank = static_cast<int>(cluster_rank());
    const int turns = p.order.turns;
    uint32_t phase = 0;
    int turn = static_cast<int>(blockIdx.x / 2);
    Tile tile = tile_of(p.order, turn, rank, V::kColumns);
    Cursor at = cursor_of(tile);
    self().template copy_hidden<0>(at);
    self().template copy_hidden<1>(at);
    while (turn < turns) {
      Corner corner = corner_of(tile);
      turn += static_cast<int>(gridDim.x / 2);
      if (turn < turns) tile = tile_of(p.order, turn, rank, V::kColumns);
      barrier_wait(&exchange.handed()->full, phase);
      phase ^= 1;
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        const Cursor current = at;
        at.before += kPart;
        at.columns -= kPart;
        if (part + 1 == kParts) {
          asm volatile("" : "+r"(tile.row), "+r"(tile.column));  // not before: registers are scarce
          at = cursor_of(tile);
        }
        self().template step<0>(part, current, [&] { self().template copy_hidden<0>(at); });
        self().template store_half<0>(corner);
        self().template step<1>(part, current, [&] { self().template copy_hidden<1>(at); });
        __syncwarp();
        self().template store_half<1>(corner);
        self().store_columns(part, corner);
        self().store_sums(corner);
        corner.column += kPart;
      }
      __syncwarp();
      if (lane() == 0) barrier_arrive(&exchange.handed()->empty);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    finish_codes(p.gated, __float_as_uint(largest));
  }

 private:
  __device__ __forceinline__ Self& self() { return static_cast<Self&>(*this); }
};

#endif

// Like dense_gemm_kernel, with a warpgroup for the epilogue, one of Epilogues.
template <typename V, typename A, typename B, typename Epilogues>
__global__ void __launch_bounds__(kConsumers + 256, 1)
    gradient_kernel([[maybe_unused]] const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Hand = HandOver<V, Epilogues::kWidth>;
  extern __shared__ __align__(1024) uint8_t shared[];  // an atom of the swizzle
  uint8_t* const staged = shared + V::kStages * V::kStageBytes;
  const Ring<V> ring{shared_address(shared),
                     reinterpret_cast<Control<V::kStages>*>(staged + kExchangeBytes<V>)};
  const Exchange<V> exchange{shared_address(staged)};
  if (threadIdx.x == 0) {
    ring.start();
    barrier_init(&exchange.handed()->full, kConsumers / 32);
    barrier_init(&exchange.handed()->empty, kEpilogueWarps);
  }
  cluster_sync();
  if (threadIdx.x < kConsumers) {
    take_registers<200>();
    multiply_tiles<V, A, B, Hand>(p, ring, exchange.tile);
  } else if (threadIdx.x < kConsumers + 128) {
    give_registers<88>();
    if (p.gated.act_columnwise)
      typename Epilogues::template Of<true>(p, exchange.tile).run();
    else
      typename Epilogues::template Of<false>(p, exchange.tile).run();
  } else {
    give_registers<24>();
    if (threadIdx.x == kConsumers + 128) copy_tiles<V, Hand>(p, ring);
    __syncwarp();
  }
  cluster_sync();  // the other block still arrives at this one's barriers
#endif
}

using GradientTiles = Variant<192, 4, 4, true>;

// Launches the kernel of an epilogue that reads `hidden`, a matrix of as many columns.
template <typename A, typename Epilogues>
void launch_gradient(const Launch& at, const GatedProduct& product, BoxElement element,
                     const void* hidden, int64_t columns) {
  using V = GradientTiles;
  constexpr size_t kBytesShared =
      V::kStages * V::kStageBytes + kExchangeBytes<V> + sizeof(Control<V::kStages>);
  static_assert(kBytesShared <= kSharedLimit, "what a block may have on sm_90");
  Params p;
  p.g = product.g;
  p.gated = product.gated;
  describe(&p.added, element, hidden, p.g.m, columns, kTileM, V::kColumns);
  prepare<V>(&p);
  launch_tiles<V>(at, gradient_kernel<V, A, E4M3, Epilogues>, kConsumers + 256, kBytesShared, p);
}

// Calls launch with the format of a's codes, unless there is nothing to make.
template <typename Call>
void run_gradient(Args& args, const DenseGemm& g, const Call& launch) {
  if (g.promotion != 512)
    fail(kApexTeUnsupported, "%s: promotion must be 512, got %lld", args.name(),
         static_cast<long long>(g.promotion));
  const DeviceGuard guard(args.device_id());
  const Launch at = launch_of(args, g);
  if (g.m == 0 || g.n == 0) return;
  if (g.a_type == DType::kE5M2)
    launch(E5M2{}, at);
  else
    launch(E4M3{}, at);
}

}  // namespace apex_te
