// Epilogue of the product that makes the input of GELU: it stores the rounded sums and the
// activation's FP8 data.
#pragma once

#include "dense_gemm/dense_gemm_codes.h"
#include "dense_gemm/dense_gemm_kernel.h"
#include "dense_gemm/dense_gemm_store.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename V>
struct GeluStore : LateStore<V> {
  using Base = LateStore<V>;
  using Base::kBytes, Base::last, Base::p, Base::staged;
  static constexpr int kAtOnce = 2, kBox = 4;  // groups of 16 columns: of a step, of a box of sums
  static constexpr int kSteps = V::kColumns / 16 / kAtOnce;
  float scale;
  uint32_t amax = 0;

  __device__ __forceinline__ GeluStore(const Params& params, uint32_t all)
      : Base(params, all), scale(scale_of(params.gated)) {}

  // FP8 codes of two outputs of a row.
  __device__ __forceinline__ uint32_t encode(uint32_t pair, uint32_t* largest) const {
    const float y = activate<Activation::kGelu, false>(low_of(pair));
    const float right = activate<Activation::kGelu, false>(high_of(pair));
    *largest = max(*largest, max(magnitude_bits(y), magnitude_bits(right)));
    return encode_fp8x2<E4M3>(y * scale, right * scale);
  }

  // Group q of 16 columns: four outputs of a row, and four of the eighth row after.
  __device__ __forceinline__ void encode_group(int q) {
    const uint32_t* words = last.words + 4 * q;
    uint32_t largest = 0, largest_8 = 0;
    const uint32_t left = encode(words[0], &largest), left_8 = encode(words[1], &largest_8);
    stage_codes(staged + kBytes, q % (2 * kBox), left | encode(words[2], &largest) << 16,
                left_8 | encode(words[3], &largest_8) << 16);
    const int64_t row = last.row + threadIdx.x % 32 / 4;
    const bool exists = last.column + q * 16 < p.g.n;
    if (exists && row < p.g.m) amax = max(amax, largest);
    if (exists && row + 8 < p.g.m) amax = max(amax, largest_8);
  }

  // Sums leave 64 columns at a time, codes 128.
  template <int kStep>
  __device__ __forceinline__ void step() {
    constexpr int kFirst = kStep * kAtOnce, kNext = kFirst + kAtOnce;
    const bool is_first = threadIdx.x % 32 == 0;
    if constexpr (kFirst % kBox == 0) {
      if (is_first) stores_wait();
      __syncwarp();
    }
#pragma unroll
    for (int q = kFirst; q < kNext; ++q) {
      last.stage(staged, q, q % kBox * 2);
      encode_group(q);
    }
    if constexpr (kNext % kBox == 0) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (is_first && last.row < p.g.m) {
        store<kBox>(p.out, kNext, staged);
        if constexpr (kNext % (2 * kBox) == 0) store<2 * kBox>(p.act, kNext, staged + kBytes);
        stores_commit();
      }
    }
  }
  // The box of kGroups groups before group `next`.
  template <int kGroups>
  __device__ __forceinline__ void store(const CUtensorMap& map, int next, uint32_t from) const {
    const int column = last.column + (next - kGroups) * 16;
    if (column < p.g.n) store_box(map, column, last.row, from, p.keep_out);
  }

  __device__ __forceinline__ void finish() {
    all_steps(*this, std::make_integer_sequence<int, kSteps>{});
    if (threadIdx.x % 32 == 0) stores_wait();
    finish_codes(p.gated, amax);
  }
};

#else

template <typename V>
struct GeluStore;

#endif

inline void run_gelu(Args& args) {
  using V = Variant<256, 4, 0>;
  const GatedProduct product = check_gated(args, false, false);
  const DeviceGuard guard(args.device_id());
  const Launch at = launch_of(args, product.g);
  if (product.g.m == 0 || product.g.n == 0) return;
  Params p;
  p.g = product.g;
  p.gated = product.gated;
  describe(&p.out, kBFloat16s, p.g.out, p.g.m, p.g.n, kWarpRows, 64);
  describe(&p.act, kBytes, p.gated.act, p.g.m, p.g.n, kWarpRows, 128);
  launch_product<V, E4M3, E4M3, GeluStore>(at, p);
}

}  // namespace apex_te
