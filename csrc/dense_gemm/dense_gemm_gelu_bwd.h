// Epilogue of the product that makes the gradient of GELU's output (dense_gemm_gradient.h), with
// sums of the columns of its input's gradient.
#pragma once

#include "common/gpu/column_sums.h"
#include "dense_gemm/dense_gemm_gradient.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// By a warpgroup. The rows of a warp are those of a line of sums.
template <typename V, typename Format, bool kWithAct>
struct GeluGradient : GradientEpilogue<GeluGradient<V, Format, kWithAct>, V, 1> {
  static_assert(kEpilogueWarps * kSumRows == kTileM, "a line for each warp");
  using Base = GradientEpilogue<GeluGradient, V, 1>;
  using Base::act_scale, Base::column_at, Base::copy, Base::exchange, Base::half_of, Base::lane,
      Base::largest, Base::p, Base::pair, Base::right, Base::scale, Base::store_both,
      Base::store_column, Base::store_row, Base::unit_of_lane, Base::unpack, Base::warp,
      Base::with_column;
  using typename Base::Corner;
  using typename Base::Cursor;
  float sums[8];  // of the lane's columns of a part
  using Base::Base;

  // Hidden of a lane's two rows comes through shared memory: 16 bytes for each lane of a warp, then
  // the same of the second row. So it needs no registers while it comes. The lane's place is not
  // added: of a copy to a uniform address and a register, with a cache policy, ptxas 13.0 makes an
  // illegal instruction.
  __device__ __forceinline__ uint32_t slot_of(int half) const {
    return (exchange.hidden() + (half * kEpilogueWarps + warp()) * kHalfBytes) ^ lane() * 16;
  }
  template <int kHalf>
  __device__ __forceinline__ void copy_hidden(const Cursor& at) const {
    const uint16_t* from = p.gated.hidden + at.before + kHalf * kHalfRows * p.g.n;
    const bool has_row = at.has(kHalf * kHalfRows), has_row_1 = at.has(kHalf * kHalfRows + 1);
    copy(slot_of(kHalf), has_row ? from : p.gated.hidden, has_row);
    copy(slot_of(kHalf) + 512, has_row_1 ? from + p.g.n : p.gated.hidden, has_row_1);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Codes of 8 columns of a row, four in a word.
  struct Codes {
    uint32_t grads[2], acts[2];
  };
  __device__ __forceinline__ Codes differentiate(const uint4& hidden, const uint4& grads,
                                                 bool exists, bool is_first) {
    constexpr Activation kGelu = Activation::kGelu;
    float x[8], dx[8];
    unpack(hidden, x);
    unpack(grads, dx);
    Codes codes;
#pragma unroll
    for (int k = 0; k < 8; ++k) dx[k] = activation_gradient<kGelu, false>(x[k], dx[k]);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (is_first) sums[k] = 0.0f;
    if (exists) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        largest = larger_magnitude(largest, dx[k]);
        sums[k] += dx[k];
      }
    }
    encode_fp8x8<Format>(dx, scale, codes.grads);
    if constexpr (kWithAct) {
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = activate<kGelu, false>(x[k]);
      encode_fp8x8<E4M3>(x, act_scale, codes.acts);
    }
    return codes;
  }

  // A lane's row of a half, 0 or 1.
  template <int kHalf, typename Copy>
  __device__ __forceinline__ Codes row_step(int part, const Cursor& at, int which,
                                            const Copy& copy_next) {
    const uint32_t row = warp() * 32 + kHalf * kHalfRows + 2 * pair() + which;
    const bool exists = at.has(kHalf * kHalfRows + which);
    const uint4 hidden = load_shared(slot_of(kHalf) + which * 512);
    const uint4 grads = load_shared(exchange.tile + place_in_tile(part, row, right()));
    copy_next();
    const Codes codes = differentiate(hidden, grads, exists, kHalf == 0 && which == 0);
    if (exists)
      store_row(p.gated.rowwise + at.before + (kHalf * kHalfRows + which) * p.g.n, codes.grads);
    return codes;
  }
  template <int kHalf, typename Copy>
  __device__ __forceinline__ void step(int part, const Cursor& at, const Copy& copy_next) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    const Codes codes = row_step<kHalf>(part, at, 0, [] {});
    const Codes codes_1 = row_step<kHalf>(part, at, 1, copy_next);
    __syncwarp();  // all have read what the codes take the place of
    const uint32_t to = half_of(part, kHalf) + unit_of_lane(kHalf) * 16;
    store_both(to, codes.grads, codes_1.grads);
    if constexpr (kWithAct) store_both(to + kKindBytes, codes.acts, codes_1.acts);
  }

  // 32 rows and columns of the columnwise copies from shared memory.
  __device__ __forceinline__ void store_columns(int part, const Corner& at) const {
    const uint32_t half = lane() % 2;
    const uint32_t from = half_of(part, half) + (lane() / 2 ^ half * 4) * 16;
    const int token = at.token + static_cast<int>(half * kHalfRows);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const int column = at.column + static_cast<int>(column_at(lane() / 2 + i * 16));
      with_column(column, token, [&](int64_t to, int rows) {
        if (p.gated.columnwise) store_column(p.gated.columnwise + to, from + i * 256, rows);
        if constexpr (kWithAct)
          store_column(p.gated.act_columnwise + to, from + i * 256 + kKindBytes, rows);
      });
    }
  }

  // Sums of the part's columns, to the line of the warp's rows.
  __device__ __forceinline__ void store_sums(const Corner& at) {
    if (!p.gated.sums) return;
    const float sum = sum_of_pairs();
    const int column = at.column + static_cast<int>(8 * right() + pair());
    if (column < p.g.n && at.token < p.g.m)
      p.gated.sums[at.token / kSumRows * p.g.n + column] = sum;
  }
  // Sum of the column pair() of the lane's group of columns, over all pairs of rows: a lane gives
  // away half of its columns, then half of those that it keeps, and so on.
  __device__ __forceinline__ float sum_of_pairs() {
#pragma unroll
    for (int kept = 4; kept > 0; kept /= 2) {
      const bool is_upper = pair() & kept;
#pragma unroll
      for (int k = 0; k < kept; ++k) {
        const float given = is_upper ? sums[k] : sums[k + kept];
        const float own = is_upper ? sums[k + kept] : sums[k];
        sums[k] = own + __shfl_xor_sync(0xFFFFFFFFu, given, 4 * kept);
      }
    }
    return sums[0];
  }
};

// The two of a kernel, which a call chooses from.
template <typename V, typename A>
struct GeluGradients {
  static constexpr int kWidth = 1;
  template <bool kWithAct>
  using Of = GeluGradient<V, A, kWithAct>;
};

#else

template <typename V, typename A>
struct GeluGradients;

#endif

inline void run_gelu_bwd(Args& args) {
  const GatedProduct product = check_gated_bwd(args, false, false);
  const DenseGemm& g = product.g;
  const Gated& gated = product.gated;
  run_gradient(args, g, [&](auto format, const Launch& at) {
    using A = decltype(format);
    launch_gradient<A, GeluGradients<GradientTiles, A>>(at, product, kBFloat16s, gated.hidden, g.n);
  });
  if (!gated.dbias) return;
  const DeviceGuard guard(args.device_id());
  launch_column_sums<BFloat16>(gated.sums, (g.m + kSumRows - 1) / kSumRows, g.n, gated.dbias,
                               static_cast<cudaStream_t>(args.stream()));
}

}  // namespace apex_te
