// Epilogue of the product that makes the gradient of a gated activation's output
// (dense_gemm_gradient.h): it may store that product in place of the gradient's FP8 data.
#pragma once

#include "dense_gemm/dense_gemm_gradient.h"
#include "swiglu/swiglu.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

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

// By a warpgroup. kHeld: hidden is in E4M3. kCodes: it stores the gradient's FP8 data, not the
// sums.
template <typename V, typename Format, Activation kAct, bool kWithAct, bool kHeld, bool kCodes>
struct GatedGradient
    : GradientEpilogue<GatedGradient<V, Format, kAct, kWithAct, kHeld, kCodes>, V, 2> {
  static_assert(kAct == Activation::kSilu, "silu_gradient");
  using Base = GradientEpilogue<GatedGradient, V, 2>;
  using Base::act_scale, Base::column_at, Base::copy, Base::exchange, Base::half_of, Base::lane,
      Base::largest, Base::p, Base::pair, Base::right, Base::scale, Base::store_16,
      Base::store_both, Base::store_column, Base::store_row, Base::unit_of_lane, Base::unpack,
      Base::warp, Base::with_column;
  using Base::Base;
  using typename Base::Corner;
  using typename Base::Cursor;

  // Gates and ups of a lane's two rows come through shared memory: 16 bytes for each lane of a
  // warp, gates, ups and the same of the second row. So they need no registers while they come.
  __device__ __forceinline__ uint32_t slot_of(int half) const {
    return exchange.hidden() + half * kSlotBytes + warp() * (kSlotBytes / kEpilogueWarps) +
           lane() * 16;
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
    const uint32_t unit = unit_of_lane(kHalf) * 16;
    const uint32_t to = half_of(part, kHalf) + unit;
    if constexpr (kCodes) {
      store_both(to, codes.gates, codes_1.gates);
      store_both(to + kKindBytes, codes.ups, codes_1.ups);
    }
    if constexpr (kWithAct) store_both(acts() + unit, codes.acts, codes_1.acts);
  }
  template <int kHalf>
  __device__ __forceinline__ void store_grads(const Cursor& at, int which, const uint4& v) const {
    const int64_t row = p.g.m - at.rows + kHalf * kHalfRows + which;
    store_16(p.gated.grad + row * p.g.n + (p.g.n - at.columns), v);
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
  __device__ __forceinline__ void store_half(const Corner& at) const {
    if constexpr (!kWithAct) return;
    if (kHalf == 0) __syncwarp();
    const int column = at.column + static_cast<int>(column_at(lane()));
    with_column(column, at.token + kHalf * kHalfRows, [&](int64_t to, int rows) {
      store_column(p.gated.act_columnwise + to, acts() + (lane() ^ kHalf * 4) * 16, rows);
    });
  }
};

// The two of a kernel, which a call chooses from.
template <typename V, typename A, bool kHeld, bool kCodes>
struct SwigluGradients {
  static constexpr int kWidth = 2;
  template <bool kWithAct>
  using Of = GatedGradient<V, A, Activation::kSilu, kWithAct, kHeld, kCodes>;
};

#else

template <typename V, typename A, bool kHeld, bool kCodes>
struct SwigluGradients;

#endif

template <bool kHeld>
void run_gated_bwd(Args& args) {
  const GatedProduct product = check_gated_bwd(args, kHeld);
  const BoxElement element = kHeld ? kBytes : kBFloat16s;
  const void* hidden = product.gated.hidden;
  if (kHeld) hidden = product.gated.held;
  run_gradient(args, product.g, [&](auto format, const Launch& at) {
    using A = decltype(format);
    const auto launch = product.gated.rowwise
                            ? launch_gradient<A, SwigluGradients<GradientTiles, A, kHeld, true>>
                            : launch_gradient<A, SwigluGradients<GradientTiles, A, kHeld, false>>;
    launch(at, product, element, hidden, 2 * product.g.n);
  });
}

}  // namespace apex_te
