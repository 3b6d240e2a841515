// Epilogue of the product that makes the gradient of a gated activation's output: it stores FP8
// data of the gradient of the activation's input, rowwise and columnwise, and of the activation
// itself. A warpgroup of its own makes them while the next tile is multiplied.
#pragma once

#include "dense_gemm/dense_gemm_gated.h"
#include "dense_gemm/dense_gemm_kernel.h"

namespace apex_te {

// Shared memory behind the ring's: a tile of rounded sums, in parts of 64 columns whose 16-byte
// chunks are swizzled by the row; and what each warp of the epilogue transposes: of 32 columns and
// the three kinds (gradients of gate and up, activation) 32 rows, a byte each.
struct Handed {
  uint64_t full, empty;
};
constexpr int kPart = 32, kKinds = 3;
constexpr uint32_t kKindBytes = kPart * kPart;
constexpr int kEpilogueWarps = 4;

template <typename V>
constexpr uint32_t kTileBytes = kTileM * V::kColumns * 2;
constexpr uint32_t kTransposedBytes = kEpilogueWarps * kKinds * kKindBytes;
template <typename V>
constexpr uint32_t kExchangeBytes = kTileBytes<V> + kTransposedBytes + sizeof(Handed);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename V>
struct Exchange {
  static_assert(V::kColumns % 64 == 0, "parts of the tile");
  uint32_t tile;
  __device__ __forceinline__ uint32_t transposed() const { return tile + kTileBytes<V>; }
  __device__ __forceinline__ Handed* handed() const {
    return static_cast<Handed*>(__cvta_shared_to_generic(transposed() + kTransposedBytes));
  }
};

// The place of a tile's row in one of its parts of 64 columns, 128 bytes; 8 columns from `chunk`
// on.
__device__ __forceinline__ uint32_t place_in_tile(uint32_t part, uint32_t row, uint32_t chunk) {
  return part * (kTileM * 128) + row * 128 + (chunk ^ row % 8) * 16;
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
          exchange.tile + place_in_tile(j / 8, row, j % 8 + own.right),
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

// By a warpgroup. A warp has 32 rows of a tile, of which it takes 32 columns after the other, 16
// rows at a time: a lane 8 columns of two rows, one below the other.
template <typename V, typename Format, Activation kAct>
struct GatedGradient {
  static constexpr int kParts = V::kColumns / kPart;
  const Params& p;
  Exchange<V> exchange;
  float scale, act_scale;
  uint32_t amax = 0;

  __device__ __forceinline__ GatedGradient(const Params& params, uint32_t staged)
      : p(params),
        exchange{staged},
        scale(*params.gated.scale),
        act_scale(params.gated.act_columnwise ? *params.gated.act_scale : 1.0f) {}

  static __device__ __forceinline__ uint32_t warp() { return threadIdx.x / 32 % kEpilogueWarps; }
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }
  // Pair of rows, and group of 8 columns. The 8 lanes that read shared memory at once have rows 0
  // and 4 of 8, which lie in different banks, as those of the next four lanes do.
  static __device__ __forceinline__ uint32_t pair() {
    return (threadIdx.x / 4 & 4) | (threadIdx.x / 4 & 1) << 1 | (threadIdx.x / 8 & 1);
  }
  static __device__ __forceinline__ uint32_t right() { return threadIdx.x % 4; }
  __device__ __forceinline__ uint32_t transposed() const {
    return exchange.transposed() + warp() * (kKinds * kKindBytes);
  }

  // Gates and ups of a lane's two rows.
  struct Hidden {
    uint4 gate, up, gate_1, up_1;
  };
  __device__ __forceinline__ uint4 load(const uint16_t* from, bool exists) const {
    uint4 v;
    asm volatile(
        "{ .reg .pred q; setp.ne.u32 q, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; "
        "mov.b32 %3, 0;\n"
        "@q ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(__cvta_generic_to_global(from)), "r"(static_cast<uint32_t>(exists)));
    return v;
  }
  __device__ __forceinline__ int row_of(const Tile& tile, int step) const {
    return tile.row + static_cast<int>(warp() * 32 + 2 * pair()) + step % 2 * 16;
  }
  __device__ __forceinline__ int column_of(const Tile& tile, int step) const {
    return tile.column + step / 2 * kPart + static_cast<int>(8 * right());
  }
  // Of step: two for each 32 columns.
  __device__ __forceinline__ Hidden load_hidden(const Tile& tile, int step, bool exists) const {
    const int row = row_of(tile, step), column = column_of(tile, step);
    const uint16_t* from = p.gated.hidden + row * (2 * p.g.n) + column;
    const bool has_column = exists && column < p.g.n;
    const bool has_row = has_column && row < p.g.m, has_row_1 = has_column && row + 1 < p.g.m;
    return {load(from, has_row), load(from + p.g.n, has_row), load(from + 2 * p.g.n, has_row_1),
            load(from + 3 * p.g.n, has_row_1)};
  }

  // Of a column in two rows: FP8 codes of the kinds, those of the second row in the high byte.
  struct Codes {
    uint32_t gate, up, act;
  };
  __device__ __forceinline__ Codes differentiate(float gate, float up, float grad, float gate_1,
                                                 float up_1, float grad_1, bool with_act,
                                                 uint32_t* largest, uint32_t* largest_1) const {
    float dgate, dup, dgate_1, dup_1;
    gated_gradient<kAct, false>(gate, up, grad, &dgate, &dup);
    gated_gradient<kAct, false>(gate_1, up_1, grad_1, &dgate_1, &dup_1);
    *largest = max(*largest, max(magnitude_bits(dgate), magnitude_bits(dup)));
    *largest_1 = max(*largest_1, max(magnitude_bits(dgate_1), magnitude_bits(dup_1)));
    Codes codes{encode_fp8x2<Format>(dgate * scale, dgate_1 * scale),
                encode_fp8x2<Format>(dup * scale, dup_1 * scale), 0};
    if (with_act)
      codes.act = encode_fp8x2<E4M3>(gated<kAct, false>(gate, up) * act_scale,
                                     gated<kAct, false>(gate_1, up_1) * act_scale);
    return codes;
  }

  // Where the 32 rows of a column lie among a kind's: columns at a distance of 8, which lanes write
  // at once, in different banks.
  static __device__ __forceinline__ uint32_t place_of(uint32_t column) {
    return ((column & ~3u) | ((column + column / 8) & 3)) * kPart;
  }
  static __device__ __forceinline__ uint32_t column_at(uint32_t place) {
    return (place & ~3u) | ((place - place / 8) & 3);
  }

  template <bool kWithAct>
  __device__ __forceinline__ void step(const Tile& tile, int step, const Hidden& hidden) {
    const int row = row_of(tile, step), column = column_of(tile, step);
    const bool has_column = column < p.g.n;
    const bool has_row = has_column && row < p.g.m, has_row_1 = has_column && row + 1 < p.g.m;
    const uint32_t mask = (has_row ? 0x00FF00FFu : 0u) | (has_row_1 ? 0xFF00FF00u : 0u);
    const uint32_t in_tile = warp() * 32 + step % 2 * 16 + 2 * pair();
    const uint32_t chunk = step / 2 % 2 * 4 + right();
    const uint4 grad = load_shared(exchange.tile + place_in_tile(step / 4, in_tile, chunk));
    const uint4 grad_1 = load_shared(exchange.tile + place_in_tile(step / 4, in_tile + 1, chunk));
    const uint32_t gates[4] = {hidden.gate.x, hidden.gate.y, hidden.gate.z, hidden.gate.w};
    const uint32_t ups[4] = {hidden.up.x, hidden.up.y, hidden.up.z, hidden.up.w};
    const uint32_t gates_1[4] = {hidden.gate_1.x, hidden.gate_1.y, hidden.gate_1.z,
                                 hidden.gate_1.w};
    const uint32_t ups_1[4] = {hidden.up_1.x, hidden.up_1.y, hidden.up_1.z, hidden.up_1.w};
    const uint32_t grads[4] = {grad.x, grad.y, grad.z, grad.w};
    const uint32_t grads_1[4] = {grad_1.x, grad_1.y, grad_1.z, grad_1.w};
    const uint32_t to = transposed() + step % 2 * 16 + 2 * pair();
    uint32_t largest = 0, largest_1 = 0;
    uint32_t dgates[4],
        dups[4];  // of two columns: codes of both rows, then those of the next column
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Codes left =
          differentiate(low_of(gates[i]), low_of(ups[i]), low_of(grads[i]), low_of(gates_1[i]),
                        low_of(ups_1[i]), low_of(grads_1[i]), kWithAct, &largest, &largest_1);
      const Codes next =
          differentiate(high_of(gates[i]), high_of(ups[i]), high_of(grads[i]), high_of(gates_1[i]),
                        high_of(ups_1[i]), high_of(grads_1[i]), kWithAct, &largest, &largest_1);
      dgates[i] = (left.gate | next.gate << 16) & mask;
      dups[i] = (left.up | next.up << 16) & mask;
      const uint32_t place = to + place_of(8 * right() + 2 * i);
      const uint32_t place_next = to + place_of(8 * right() + 2 * i + 1);
      store_shared(place, dgates[i]);
      store_shared(place_next, dgates[i] >> 16);
      store_shared(place + kKindBytes, dups[i]);
      store_shared(place_next + kKindBytes, dups[i] >> 16);
      if constexpr (kWithAct) {
        store_shared(place + 2 * kKindBytes, left.act & mask);
        store_shared(place_next + 2 * kKindBytes, next.act & mask);
      }
    }
    if (has_row) amax = max(amax, largest);
    if (has_row_1) amax = max(amax, largest_1);
    uint8_t* out = p.gated.rowwise + row * (2 * p.g.n) + column;
    if (has_row) {
      store_row(out, dgates, 0x6420);
      store_row(out + p.g.n, dups, 0x6420);
    }
    if (has_row_1) {
      store_row(out + 2 * p.g.n, dgates, 0x7531);
      store_row(out + 3 * p.g.n, dups, 0x7531);
    }
  }
  static __device__ __forceinline__ void store_row(uint8_t* to, const uint32_t (&codes)[4],
                                                   uint32_t bytes) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(__byte_perm(codes[0], codes[1], bytes), __byte_perm(codes[2], codes[3], bytes));
  }

  // 32 rows and columns of the columnwise copies from shared memory.
  template <bool kWithAct>
  __device__ __forceinline__ void store_columns(const Tile& tile, int part) const {
    const int token = tile.row + static_cast<int>(warp() * 32 + lane() % 2 * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = half * 16 + lane() / 2;
      const int column = tile.column + part * kPart + static_cast<int>(column_at(place));
      const uint32_t from = transposed() + place * kPart + lane() % 2 * 16;
      if (column >= p.g.n || token >= p.gated.ld) continue;
      if (p.gated.columnwise) {
        uint8_t* to = p.gated.columnwise + column * p.gated.ld + token;
        store_16(reinterpret_cast<uint4*>(to), load_shared(from));
        store_16(reinterpret_cast<uint4*>(to + p.g.n * p.gated.ld), load_shared(from + kKindBytes));
      }
      if constexpr (kWithAct)
        store_16(reinterpret_cast<uint4*>(p.gated.act_columnwise + column * p.gated.ld + token),
                 load_shared(from + 2 * kKindBytes));
    }
  }

  // All tiles of the block. What the first step of a tile reads of hidden is loaded before its sums
  // are there, and that of the next step before a step.
  template <bool kWithAct>
  __device__ __forceinline__ void run() {
    const int rank = static_cast<int>(cluster_rank());
    const int turns = p.order.turns;
    uint32_t phase = 0;
    for (int turn = static_cast<int>(blockIdx.x / 2); turn < turns;
         turn += static_cast<int>(gridDim.x / 2)) {
      const Tile tile = tile_of(p.order, turn, rank, V::kColumns);
      Hidden hidden = load_hidden(tile, 0, true);
      barrier_wait(&exchange.handed()->full, phase);
      phase ^= 1;
#pragma unroll 1
      for (int i = 0; i < 2 * kParts; ++i) {
        const Hidden next = load_hidden(tile, i + 1, i + 1 < 2 * kParts);
        step<kWithAct>(tile, i, hidden);
        hidden = next;
        if (i % 2 == 0) continue;
        __syncwarp();
        if (i + 1 == 2 * kParts && lane() == 0) barrier_arrive(&exchange.handed()->empty);
        store_columns<kWithAct>(tile, i / 2);
        __syncwarp();
      }
    }
    finish_gated(p.gated, amax);
  }
};

// Like dense_gemm_kernel, with a warpgroup for the epilogue.
template <typename V, typename A, typename B, Activation kAct>
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
    give_registers<80>();
    GatedGradient<V, A, kAct> epilogue(p, exchange.tile);
    if (p.gated.act_columnwise)
      epilogue.template run<true>();
    else
      epilogue.template run<false>();
  } else {
    give_registers<32>();
    if (threadIdx.x == kConsumers + 128) copy_tiles<V, HandOver<V>>(p, ring);
    __syncwarp();
  }
  cluster_sync();  // the other block still arrives at this one's barriers
}

#else

template <typename V, typename A, typename B, Activation kAct>
__global__ void gated_gradient_kernel(const __grid_constant__ Params) {}

#endif

}  // namespace apex_te
