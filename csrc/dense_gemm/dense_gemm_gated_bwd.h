// Epilogue of the product that makes the gradient of a gated activation's output: it stores FP8
// data of the gradient of the activation's input, rowwise and columnwise, and of the activation
// itself.
#pragma once

#include "dense_gemm/dense_gemm_gated.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Of a columnwise copy a warpgroup's 64 rows leave kPart columns at a time through shared memory,
// where a row is 64 bytes of one column: 16 of each warp, in the order 0, 8, 1, 9, .. of its rows.
// The 16-byte chunks are swizzled by the row.
constexpr int kPart = 64, kPartRows = 64;

__device__ __forceinline__ uint32_t place_of(uint32_t column, uint32_t warp) {
  return column * kPartRows + (warp ^ column / 2 % 4) * 16;
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Bytes 0, 8, 1, 9, .. to 0, 1, 2, ..
__device__ __forceinline__ uint4 in_order(const uint4& v) {
  return make_uint4(__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420),
                    __byte_perm(v.x, v.y, 0x7531), __byte_perm(v.z, v.w, 0x7531));
}

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

template <typename V, typename Format, Activation kAct>
struct GatedGradientStore {
  static constexpr int kKinds = 3;  // gradients of gate and up, activation
  static constexpr uint32_t kPartBytes = kKinds * kPart * kPartRows;
  static_assert(V::kColumns % kPart == 0 && 2 * kPartBytes <= 4 * V::kStagedBytes, "room");
  const Params& p;
  uint32_t staged;  // of the warpgroup: two parts, used in turn
  float scale, act_scale;
  uint32_t amax = 0, turn = 0;

  __device__ __forceinline__ GatedGradientStore(const Params& params, uint32_t all)
      : p(params),
        staged(all + threadIdx.x / 128 * 4 * V::kStagedBytes),
        scale(*params.gated.scale),
        act_scale(params.gated.act_columnwise ? *params.gated.act_scale : 1.0f) {}

  static __device__ __forceinline__ void prefetch(const Params& p, const Tile& tile) {
    prefetch_box(p.added, 2 * tile.column, tile.row);
    if (tile.column + V::kColumns / 2 < p.g.n)
      prefetch_box(p.added, 2 * tile.column + V::kColumns, tile.row);
  }

  // Words of one row and group of 16 columns: FP8 data of the gradients in hidden's order, and
  // values of the activation in that of the sums.
  struct Words {
    uint32_t low, high;
    float act[4];
  };
  __device__ __forceinline__ Words differentiate(const uint4& hidden, uint32_t grads,
                                                 uint32_t grads_right, bool has_row,
                                                 bool with_act) {
    const uint32_t pairs[4] = {hidden.x, hidden.y, hidden.z, hidden.w};
    const float grad[4] = {low_of(grads), high_of(grads), low_of(grads_right),
                           high_of(grads_right)};
    Words words;
    uint32_t codes[4], largest = 0;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const float gate = low_of(pairs[s]), up = high_of(pairs[s]);
      float dgate, dup;
      gated_gradient<kAct, false>(gate, up, grad[s], &dgate, &dup);
      largest = max(largest, max(magnitude_bits(dgate), magnitude_bits(dup)));
      codes[s] = encode_fp8x2<Format>(dgate * scale, dup * scale);
      words.act[s] = with_act ? gated<kAct, false>(gate, up) * act_scale : 0.0f;
    }
    if (has_row) amax = max(amax, largest);
    words.low = has_row ? codes[0] | codes[1] << 16 : 0u;
    words.high = has_row ? codes[2] | codes[3] << 16 : 0u;
    return words;
  }

  // The lane's row of hidden in 4 groups of 16 outputs from `first` of the tile on.
  __device__ __forceinline__ void load_hidden(int64_t row, int64_t column, uint4 (&hidden)[4]) {
    const uint16_t* from = p.gated.hidden + row * 2 * p.g.n + 2 * column + threadIdx.x % 4 * 8;
#pragma unroll
    for (int q = 0; q < 4; ++q)
      hidden[q] = row < p.g.m && column + 16 * q < p.g.n
                      ? __ldg(reinterpret_cast<const uint4*>(from + 32 * q))
                      : make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void store_row(const Words& words, int64_t row, int64_t column) {
    if (row >= p.g.m || column >= p.g.n) return;
    uint8_t* to = p.gated.rowwise + row * 2 * p.g.n + 2 * column + threadIdx.x % 4 * 8;
    *reinterpret_cast<uint2*>(to) = make_uint2(words.low, words.high);
  }

  // Gradients of gate and up of 16 columns, transposed, to shared memory.
  __device__ __forceinline__ void stage_gradients(uint32_t part, int group, const Words& words,
                                                  const Words& words_8) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const uint32_t column = lane / 16 * kPart + group * 16 + lane % 16;
    store_transposed(part + place_of(column, warp), __byte_perm(words.low, words_8.low, 0x6240),
                     __byte_perm(words.high, words_8.high, 0x6240),
                     __byte_perm(words.low, words_8.low, 0x7351),
                     __byte_perm(words.high, words_8.high, 0x7351));
  }

  // A pair of rows of two columns of the activation.
  static __device__ __forceinline__ uint32_t act_pair(const Words& words, const Words& words_8,
                                                      int s, bool has_row, bool has_row_8) {
    const uint32_t pair = encode_fp8x2<E4M3>(words.act[s], words_8.act[s]) |
                          encode_fp8x2<E4M3>(words.act[s + 1], words_8.act[s + 1]) << 16;
    return pair & ((has_row ? 0x00FF00FFu : 0u) | (has_row_8 ? 0xFF00FF00u : 0u));
  }

  // A part of the columnwise copies from shared memory, a quarter of the columns to each warp.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void store_columns(uint32_t part, const Tile& tile, int first) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int64_t token = tile.row + threadIdx.x / 128 * kPartRows + lane % 4 * 16;
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      const uint32_t row = (i * 4 + warp) * 8 + lane / 4;
      const int64_t column = tile.column + first + row % kPart;
      const uint4 bytes = in_order(load_shared(part + place_of(row, lane % 4)));
      uint8_t* const to = kFirst == 0 ? p.gated.columnwise : p.gated.act_columnwise;
      if (column < p.g.n && token < p.gated.ld)
        store_16(reinterpret_cast<uint4*>(to + (column + i / 2 % 2 * p.g.n) * p.gated.ld + token),
                 bytes);
    }
  }

  __device__ __forceinline__ void store_part_of(const float* d, const Tile& tile, const Own& own,
                                                int first) {
    const bool has_row = own.row < p.g.m, has_row_8 = own.row + 8 < p.g.m;
    const bool with_act = p.gated.act_columnwise;
    const uint32_t part = staged + turn * kPartBytes;
    turn ^= 1;
    uint4 hidden[4], hidden_8[4];
    load_hidden(own.row, tile.column + first, hidden);
    load_hidden(own.row + 8, tile.column + first, hidden_8);
    uint32_t before[2];
#pragma unroll
    for (int q = 0; q < 4; ++q, d += 8) {
      const int64_t column = tile.column + first + 16 * q;
      const Words words =
          differentiate(hidden[q], bf16x2_of(d[0], d[1]), bf16x2_of(d[4], d[5]), has_row, with_act);
      const Words words_8 = differentiate(hidden_8[q], bf16x2_of(d[2], d[3]), bf16x2_of(d[6], d[7]),
                                          has_row_8, with_act);
      store_row(words, own.row, column);
      store_row(words_8, own.row + 8, column);
      if (p.gated.columnwise) stage_gradients(part, q, words, words_8);
      if (!with_act) continue;
      const uint32_t pair = act_pair(words, words_8, 0, has_row, has_row_8);
      const uint32_t right = act_pair(words, words_8, 2, has_row, has_row_8);
      if (q % 2) {
        const uint32_t act = 2 * kPart + (q - 1) * 16 + threadIdx.x % 32;
        store_transposed(part + place_of(act, threadIdx.x / 32 % 4), before[0], before[1], pair,
                         right);
      }
      before[0] = pair;
      before[1] = right;
    }
    if (!p.gated.columnwise && !with_act) return;
    // The part before was read when all came here, the one before that when they came to it.
    warpgroup_sync(threadIdx.x / 128);
    if (p.gated.columnwise) store_columns<0, 4>(part, tile, first);
    if (with_act) store_columns<4, 6>(part, tile, first);
  }

  __device__ __forceinline__ void store(float (&d)[kSums<V>], const Tile& tile, float factor) {
    const Own own = own_of(p.g, tile);
#pragma unroll
    for (int i = 0; i < kSums<V>; ++i) d[i] *= factor;
#pragma unroll
    for (int first = 0; first < V::kColumns; first += kPart)
      store_part_of(d + first / 2, tile, own, first);
  }

  __device__ __forceinline__ void finish() const { finish_gated(p.gated, amax); }
};

template <typename Format>
struct DSwiglu {
  template <typename V>
  using Store = GatedGradientStore<V, Format, Activation::kSilu>;
};

#else

template <typename Format>
struct DSwiglu {
  template <typename V>
  struct Store;
};

#endif

}  // namespace apex_te
