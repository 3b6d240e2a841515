// Epilogue of the product that makes the gradient of a gated activation's output: it stores FP8
// data of the gradient of the activation's input, rowwise and columnwise, or that product, and FP8
// data of the activation. A warpgroup of its own makes them while the next tile is multiplied.
#pragma once

#include "dense_gemm/dense_gemm_gated.h"
#include "dense_gemm/dense_gemm_kernel.h"

namespace apex_te {

// Shared memory behind the ring's: a tile of rounded sums, in parts of 32 columns of which 16 rows,
// a kilobyte, give place to the codes of the gradients of gate and up once they have been read; and
// the codes of the activation, 512 bytes for a half of a warp's rows.
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

// Hands the rounded sums to the epilogue's warpgroup.
template <typename V>
struct HandOver {
  static constexpr int kSteps = 0;
  const Params& p;
  Exchange<V> exchange;
  uint32_t phase = 1;

  __device__ __forceinline__ HandOver(const Params& params, uint32_t staged)
      : p(params), exchange{staged} {}

  static __device__ __forceinline__ void prefetch(const Params& p, const Tile& tile) {
    prefetch_box(p.added, tile.column, tile.row);
    prefetch_box(p.added, tile.column + static_cast<int>(p.g.n), tile.row);
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

// Gradients of silu(gate) * up as gated_gradient makes them, with e^-|gate| and 1 / (1 + that)
// given. For a bfloat16 gate the slope is 0 only where the logistic function is; taking the sum's
// negative there keeps the sign of the first term, which gated_gradient selects.
__device__ __forceinline__ void silu_gradient(float gate, float up, float grad, float power,
                                              float larger, float* dgate, float* dup) {
  const float smaller = power * larger;
  const float s = gate > 0.0f ? larger : smaller;
  const float negative = __fadd_rn(-__fmul_rn(gate, smaller * larger), -s);
  *dgate = grad * up * -negative;
  *dup = grad * (gate * s);
}

// By a warpgroup. A warp has 32 rows of a tile, of which it takes 32 columns after the other, in
// two halves of 16 rows: a lane has 8 columns of two rows, one below the other. kHeld: hidden is in
// E4M3. kCodes: it stores the gradient's FP8 data, not the sums.
template <typename V, typename Format, Activation kAct, bool kWithAct, bool kHeld, bool kCodes>
struct GatedGradient {
  static_assert(kAct == Activation::kSilu, "silu_gradient");
  static constexpr int kParts = V::kColumns / kPart;
  const Params& p;
  Exchange<V> exchange;
  float scale, act_scale;
  float largest = 0.0f;

  __device__ __forceinline__ GatedGradient(const Params& params, uint32_t staged)
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
    return {row * (2 * p.g.n) + column, static_cast<int>(p.g.m) - row,
            static_cast<int>(p.g.n) - column};
  }

  // Gates and ups of a lane's two rows come through shared memory: 16 bytes for each lane of a
  // warp, gates, ups and the same of the second row. So they need no registers while they come. Two
  // halves are on their way.
  __device__ __forceinline__ uint32_t slot_of(int half) const {
    return exchange.hidden() + half * kSlotBytes + warp() * (kSlotBytes / kEpilogueWarps) +
           lane() * 16;
  }
  __device__ __forceinline__ void copy(uint32_t to, const uint16_t* from, bool exists) const {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(exists ? 16 : 0), "l"(p.keep_hidden)
                 : "memory");
  }
  __device__ __forceinline__ void copy_8(uint32_t to, const void* from, bool exists) const {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 8, %2, %3;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(exists ? 8 : 0), "l"(p.keep_hidden)
                 : "memory");
  }
  // Of hidden in E4M3 come 16 bytes for each lane of a warp: gates and ups of a row, the same of
  // the second row, and both rows' scales of gates and ups.
  template <int kHalf>
  __device__ __forceinline__ void copy_held(const Cursor& at) const {
    constexpr int kRow = kHalf * kHalfRows;
    const bool has_row = at.has(kRow), has_row_1 = at.has(kRow + 1);
    const uint8_t* const first = p.gated.held;
    const uint8_t* from = first + at.before + kRow * 2 * p.g.n;
    const int64_t column = p.g.n - at.columns, row = p.g.m - at.rows + kRow;
    const float* const scales = p.gated.held_scales;
    const float* gate = scales + column / kTileK * p.gated.held_ld + row;
    const float* up = scales + (column + p.g.n) / kTileK * p.gated.held_ld + row;
    const uint32_t to = slot_of(kHalf);
    copy_8(to, has_row ? from : first, has_row);
    copy_8(to + 8, has_row ? from + p.g.n : first, has_row);
    copy_8(to + 512, has_row_1 ? from + 2 * p.g.n : first, has_row_1);
    copy_8(to + 520, has_row_1 ? from + 3 * p.g.n : first, has_row_1);
    copy_8(to + 1024, has_row ? gate : scales, has_row);
    copy_8(to + 1032, has_row ? up : scales, has_row);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  template <int kHalf>
  __device__ __forceinline__ void copy_hidden(const Cursor& at) const {
    if constexpr (kHeld) return copy_held<kHalf>(at);
    const uint16_t* from = p.gated.hidden + at.before + kHalf * kHalfRows * 2 * p.g.n;
    const bool has_row = at.has(kHalf * kHalfRows), has_row_1 = at.has(kHalf * kHalfRows + 1);
    const uint32_t to = slot_of(kHalf);
    copy(to, has_row ? from : p.gated.hidden, has_row);
    copy(to + 512, has_row ? from + p.g.n : p.gated.hidden, has_row);
    copy(to + 1024, has_row_1 ? from + 2 * p.g.n : p.gated.hidden, has_row_1);
    copy(to + 1536, has_row_1 ? from + 3 * p.g.n : p.gated.hidden, has_row_1);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Gates and ups of a lane's row of a half, in bfloat16.
  struct Hidden {
    uint4 gates, ups;
  };
  template <int kHalf>
  __device__ __forceinline__ Hidden hidden_of(int which) const {
    const uint32_t slot = slot_of(kHalf);
    if constexpr (!kHeld)
      return {load_shared(slot + which * 1024), load_shared(slot + which * 1024 + 512)};
    const uint4 codes = load_shared(slot + which * 512), scales = load_shared(slot + 1024);
    return {decoded(codes.x, codes.y, which ? scales.y : scales.x),
            decoded(codes.z, codes.w, which ? scales.w : scales.z)};
  }
  static __device__ __forceinline__ uint4 decoded(uint32_t low, uint32_t high, uint32_t scale_inv) {
    const float factor = __uint_as_float(scale_inv);
    float v[8];
    decode_values<E4M3>(make_uint2(low, high), v);
    return make_uint4(
        bf16x2_of(v[0] * factor, v[1] * factor), bf16x2_of(v[2] * factor, v[3] * factor),
        bf16x2_of(v[4] * factor, v[5] * factor), bf16x2_of(v[6] * factor, v[7] * factor));
  }

  // Codes of 8 columns of a row, four in a word.
  struct Codes {
    uint32_t gates[2], ups[2], acts[2];
  };
  static __device__ __forceinline__ void unpack(const uint4& words, float (&v)[8]) {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = low_of(pairs[i]);
      v[2 * i + 1] = high_of(pairs[i]);
    }
  }
  // What takes long, powers and reciprocals, is made for the whole row before it is used.
  __device__ __forceinline__ Codes differentiate(const uint4& gates, const uint4& ups,
                                                 const uint4& grads, bool exists) {
    float gate[8], up[8], grad[8], power[8], larger[8];
    unpack(gates, gate);
#pragma unroll
    for (int k = 0; k < 8; ++k) power[k] = power_of_e<false>(-fabsf(gate[k]));
#pragma unroll
    for (int k = 0; k < 8; ++k) larger[k] = reciprocal(1.0f + power[k]);
    unpack(ups, up);
    unpack(grads, grad);
    Codes codes;
    float most = 0.0f, dgate[8], dup[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      silu_gradient(gate[k], up[k], grad[k], power[k], larger[k], &dgate[k], &dup[k]);
      most = larger_magnitude(larger_magnitude(most, dgate[k]), dup[k]);
    }
    if (exists) largest = larger_magnitude(largest, most);
    if constexpr (kCodes) {
      encode_fp8x8<Format>(dgate, scale, codes.gates);
      encode_fp8x8<Format>(dup, scale, codes.ups);
    }
    if constexpr (kWithAct) {
#pragma unroll
      for (int k = 0; k < 8; ++k) up[k] *= activate<kAct, false>(gate[k]);
      encode_fp8x8<E4M3>(up, act_scale, codes.acts);
    }
    return codes;
  }

  // Where a column's 16 codes of a half lie, in units of 16 bytes: those that a warp writes at once
  // in different banks, and those that it reads at once, of both halves.
  static __device__ __forceinline__ uint32_t unit_of(uint32_t column, uint32_t half) {
    return ((column & ~7u) | ((column + column / 8 * 2) & 7)) ^ half * 4;
  }
  // The column that the first half has there.
  static __device__ __forceinline__ uint32_t column_at(uint32_t unit) {
    return (unit & ~7u) | ((unit - unit / 8 * 2) & 7);
  }
  // Codes of gates, then of ups, of a half.
  __device__ __forceinline__ uint32_t half_of(int part, uint32_t half) const {
    return exchange.tile + (part * kTileM + warp() * 32 + half * kHalfRows) * (kPart * 2);
  }
  __device__ __forceinline__ uint32_t acts() const { return exchange.act() + warp() * kKindBytes; }

  // A lane's row of a half, 0 or 1.
  template <int kHalf, typename Copy>
  __device__ __forceinline__ Codes row_step(int part, const Cursor& at, int which,
                                            const Copy& copy_next) {
    const uint32_t row = warp() * 32 + kHalf * kHalfRows + 2 * pair() + which;
    const bool exists = at.has(kHalf * kHalfRows + which);
    const Hidden hidden = hidden_of<kHalf>(which);
    const uint4 grads = load_shared(exchange.tile + place_in_tile(part, row, right()));
    copy_next();
    if (!kCodes && exists) store_grads<kHalf>(at, which, grads);
    const Codes codes = differentiate(hidden.gates, hidden.ups, grads, exists);
    if (kCodes && exists) {
      uint8_t* to = p.gated.rowwise + at.before + (kHalf * kHalfRows + which) * 2 * p.g.n;
      store_row(to, codes.gates);
      store_row(to + p.g.n, codes.ups);
    }
    return codes;
  }
  template <int kHalf, typename Copy>
  __device__ __forceinline__ void step(int part, const Cursor& at, const Copy& copy_next) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    const Codes codes = row_step<kHalf>(part, at, 0, [] {});
    const Codes codes_1 = row_step<kHalf>(part, at, 1, copy_next);
    __syncwarp();  // all have read what the codes take the place of
    const uint32_t unit = unit_of(lane() % 8 / 2 * 8 + lane() / 8 * 2 + lane() % 2, kHalf) * 16;
    const uint32_t to = half_of(part, kHalf) + unit;
    if constexpr (kCodes) {
      store_both(to, codes.gates, codes_1.gates);
      store_both(to + kKindBytes, codes.ups, codes_1.ups);
    }
    if constexpr (kWithAct) store_both(acts() + unit, codes.acts, codes_1.acts);
  }
  // Transposes the codes of a half: a pair of rows is an element of 16 bits.
  static __device__ __forceinline__ void store_both(uint32_t to, const uint32_t (&row)[2],
                                                    const uint32_t (&row_1)[2]) {
    store_transposed(to, __byte_perm(row[0], row_1[0], 0x5140),
                     __byte_perm(row[0], row_1[0], 0x7362), __byte_perm(row[1], row_1[1], 0x5140),
                     __byte_perm(row[1], row_1[1], 0x7362));
  }
  template <int kHalf>
  __device__ __forceinline__ void store_grads(const Cursor& at, int which, const uint4& v) const {
    const int64_t row = p.g.m - at.rows + kHalf * kHalfRows + which;
    store_16(p.gated.grad + row * p.g.n + (p.g.n - at.columns), v);
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
  // 32 rows and columns of the gradient's columnwise copy from shared memory.
  __device__ __forceinline__ void store_columns(int part, const Corner& at) const {
    if (!kCodes || !p.gated.columnwise) return;
    const uint32_t half = lane() % 2;
    const uint32_t from = half_of(part, half) + (lane() / 2 ^ half * 4) * 16;
    const int token = at.token + static_cast<int>(half * kHalfRows);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const int column = at.column + static_cast<int>(column_at(lane() / 2 + i * 16));
      with_column(column, token, [&](int64_t to, int rows) {
        store_column(p.gated.columnwise + to, from + i * 256, rows);
        store_column(p.gated.columnwise + to + p.g.n * p.gated.ld, from + i * 256 + kKindBytes,
                     rows);
      });
    }
  }
  // 16 rows and 32 columns of the activation's.
  template <int kHalf>
  __device__ __forceinline__ void store_acts(const Corner& at) const {
    if constexpr (kWithAct) {
      const int column = at.column + static_cast<int>(column_at(lane()));
      with_column(column, at.token + kHalf * kHalfRows, [&](int64_t to, int rows) {
        store_column(p.gated.act_columnwise + to, acts() + (lane() ^ kHalf * 4) * 16, rows);
      });
    }
  }

  // All tiles of the block.
  __device__ __forceinline__ void run() {
    const int rank = static_cast<int>(cluster_rank());
    const int turns = p.order.turns;
    uint32_t phase = 0;
    int turn = static_cast<int>(blockIdx.x / 2);
    Tile tile = tile_of(p.order, turn, rank, V::kColumns);
    Cursor at = cursor_of(tile);
    copy_hidden<0>(at);
    copy_hidden<1>(at);
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
        step<0>(part, current, [&] { copy_hidden<0>(at); });
        if constexpr (kWithAct) __syncwarp();
        store_acts<0>(corner);
        step<1>(part, current, [&] { copy_hidden<1>(at); });
        __syncwarp();
        store_acts<1>(corner);
        store_columns(part, corner);
        corner.column += kPart;
      }
      __syncwarp();
      if (lane() == 0) barrier_arrive(&exchange.handed()->empty);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    finish_gated(p.gated, __float_as_uint(largest));
  }
};

// Like dense_gemm_kernel, with a warpgroup for the epilogue.
template <typename V, typename A, typename B, Activation kAct, bool kHeld, bool kCodes>
__global__ void __launch_bounds__(kConsumers + 256, 1)
    gated_gradient_kernel([[maybe_unused]] const __grid_constant__ Params p) {
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
    multiply_tiles<V, A, B, HandOver<V>>(p, ring, exchange.tile);
  } else if (threadIdx.x < kConsumers + 128) {
    give_registers<88>();
    if (p.gated.act_columnwise)
      GatedGradient<V, A, kAct, true, kHeld, kCodes>(p, exchange.tile).run();
    else
      GatedGradient<V, A, kAct, false, kHeld, kCodes>(p, exchange.tile).run();
  } else {
    give_registers<24>();
    if (threadIdx.x == kConsumers + 128) copy_tiles<V, HandOver<V>>(p, ring);
    __syncwarp();
  }
  cluster_sync();  // the other block still arrives at this one's barriers
}

#else

template <typename V, typename A, typename B, Activation kAct, bool kHeld, bool kCodes>
__global__ void gated_gradient_kernel(const __grid_constant__ Params) {}

#endif

template <typename A, bool kHeld>
void launch_gated_bwd(const Launch& at, const GatedProduct& product) {
  using V = Variant<192, 4, 4, true>;
  constexpr size_t kBytesShared =
      V::kStages * V::kStageBytes + kExchangeBytes<V> + sizeof(Control<V::kStages>);
  static_assert(kBytesShared <= kSharedLimit, "what a block may have on sm_90");
  Params p;
  p.g = product.g;
  p.gated = product.gated;
  if (kHeld)
    describe(&p.added, kBytes, p.gated.held, p.g.m, 2 * p.g.n, kTileM, V::kColumns);
  else
    describe(&p.added, kBFloat16s, p.gated.hidden, p.g.m, 2 * p.g.n, kTileM, V::kColumns);
  prepare<V>(&p);
  const auto kernel = p.gated.rowwise
                          ? gated_gradient_kernel<V, A, E4M3, Activation::kSilu, kHeld, true>
                          : gated_gradient_kernel<V, A, E4M3, Activation::kSilu, kHeld, false>;
  launch_tiles<V>(at, kernel, kConsumers + 256, kBytesShared, p);
}

template <bool kHeld>
void run_gated_bwd(Args& args) {
  const GatedProduct product = check_gated_bwd(args, kHeld);
  if (product.g.promotion != 512)
    fail(kApexTeUnsupported, "%s: promotion must be 512, got %lld", args.name(),
         static_cast<long long>(product.g.promotion));
  const DeviceGuard guard(args.device_id());
  const Launch at = launch_of(args, product.g);
  if (product.g.m == 0 || product.g.n == 0) return;
  if (product.g.a_type == DType::kE5M2)
    launch_gated_bwd<E5M2, kHeld>(at, product);
  else
    launch_gated_bwd<E4M3, kHeld>(at, product);
}

}  // namespace apex_te
