// Epilogue of the product that makes the input of a gated activation: it stores the rounded sums,
// or FP8 data of them, and the activation's FP8 data.
#pragma once

#include "common/numerics/block_rule.h"
#include "dense_gemm/dense_gemm_codes.h"
#include "dense_gemm/dense_gemm_kernel.h"
#include "dense_gemm/dense_gemm_store.h"
#include "swiglu/swiglu.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// kHeld: the sums leave in E4M3, with a scale for each row of a tile's gates and of its ups.
template <typename V, Activation kAct, bool kHeld>
struct GatedStore {
  static_assert(V::kGated && V::kColumns == 256, "a row of 64 gates or 128 FP8 codes is 128 bytes");
  static constexpr int kOutputs = V::kColumns / 2, kGroups = kOutputs / 16;
  static constexpr int kSteps = kGroups + 1;
  static constexpr uint32_t kBytes = kWarpRows * 128;
  static_assert(V::kStagedBytes >= 2 * kBytes, "room for gates and ups");
  const Params& p;
  uint32_t staged;  // of the warp
  float scale;
  uint32_t amax = 0;
  Rounded<V> last;
  float held_scales[4];        // of gates and ups, of a row and of the eighth row after
  uint32_t codes[kGroups][2];  // of 16 outputs: four of a row, and four of the eighth row after

  __device__ __forceinline__ GatedStore(const Params& params, uint32_t all)
      : p(params),
        staged(all + threadIdx.x / 32 * V::kStagedBytes),
        scale(scale_of(params.gated)) {}

  static __device__ __forceinline__ void prefetch(const Params&, const Tile&) {}

  __device__ __forceinline__ void take(float (&d)[kSums<V>], const Tile& tile, float factor) {
    const int64_t outputs = p.g.n / 2, first = tile.column / 2 + threadIdx.x % 4 * 2;
    last.take(d, tile, factor, p.g.bias, [&](int j) {
      const int64_t column = first + j % (kOutputs / 8) * 8;
      const uint16_t* bias = p.g.bias + (j < kOutputs / 8 ? 0 : outputs);
      return column < outputs ? pair_at(bias + column) : make_float2(0.0f, 0.0f);
    });
  }

  // FP8 codes of two outputs of a row.
  __device__ __forceinline__ uint32_t encode(uint32_t gates, uint32_t ups, uint32_t* largest) {
    const float y = gated<kAct, false>(low_of(gates), low_of(ups), Clamp{});
    const float right = gated<kAct, false>(high_of(gates), high_of(ups), Clamp{});
    *largest = max(*largest, max(magnitude_bits(y), magnitude_bits(right)));
    return encode_fp8x2<E4M3>(y * scale, right * scale);
  }

  // Scales of the last tile's blocks of 1 x 128, which four lanes have together.
  __device__ __forceinline__ void find_scales() {
    const int64_t row = last.row + threadIdx.x % 32 / 4, outputs = p.g.n / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t most = 0, most_8 = 0;  // of the lower and of the upper halves of words
#pragma unroll
      for (int i = 0; i < 2 * kGroups; ++i) {
        const uint32_t* words = last.words + half * 4 * kGroups + 2 * i;
        most = __vmaxu2(most, words[0] & 0x7FFF7FFFu);
        most_8 = __vmaxu2(most_8, words[1] & 0x7FFF7FFFu);
      }
      most = __vmaxu2(__byte_perm(most, most_8, 0x5410), __byte_perm(most, most_8, 0x7632));
      most = __vmaxu2(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
      most = __vmaxu2(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
      const int64_t block = (half * outputs + last.column) / kBlock;
#pragma unroll
      for (int eighth = 0; eighth < 2; ++eighth) {
        const uint32_t amax = eighth ? most & 0xFFFF0000u : most << 16;
        const uint32_t exponent = held_exponent(amax);
        held_scales[2 * half + eighth] = held_scale(exponent);
        const int64_t at = row + 8 * eighth;
        if (threadIdx.x % 4 == 0 && at < p.gated.held_ld && last.column < outputs)
          p.gated.held_scales[block * p.gated.held_ld + at] =
              at < p.g.m ? held_inverse(amax, exponent) : 1.0f;
      }
    }
  }
  static __device__ __forceinline__ uint32_t encode_held(uint32_t pair, float by) {
    return encode_fp8x2<E4M3>(low_of(pair) * by, high_of(pair) * by);
  }

  // A step for each 16 outputs, of which 64 gates and ups leave at once, or of their codes all;
  // then one for the codes of the activation.
  template <int kStep>
  __device__ __forceinline__ void step() {
    if constexpr (kStep < kGroups)
      step_of<kStep>();
    else if (p.gated.act)
      store_codes();
  }

  template <int kStep>
  __device__ __forceinline__ void step_of() {
    const bool is_first = threadIdx.x % 32 == 0;
    if constexpr (kHeld ? kStep == 0 : kStep % 4 == 0) {
      if (is_first) stores_wait();
      __syncwarp();
    }
    if constexpr (kHeld) {
      if constexpr (kStep == 0) find_scales();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t* w = last.words + 4 * (half * kGroups + kStep);
        const float by = held_scales[2 * half], by_8 = held_scales[2 * half + 1];
        stage_codes(staged + half * kBytes, kStep,
                    encode_held(w[0], by) | encode_held(w[2], by) << 16,
                    encode_held(w[1], by_8) | encode_held(w[3], by_8) << 16);
      }
      if constexpr (kStep + 1 == kGroups) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (is_first && last.row < p.g.m && last.column < p.g.n / 2) {
          store_box_of(p.out, last.column, 0, last.row, staged, p.keep_out);
          store_box_of(p.out, last.column, 1, last.row, staged + kBytes, p.keep_out);
          stores_commit();
        }
      }
    } else {
      last.stage(staged, kStep, kStep % 4 * 2);
      last.stage(staged + kBytes, kGroups + kStep, kStep % 4 * 2);
    }
    if constexpr (!kHeld && kStep % 4 == 3) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      const int column = last.column + (kStep - 3) * 16;
      if (is_first && last.row < p.g.m && column < p.g.n / 2) {
        store_box_of(p.out, column, 0, last.row, staged, p.keep_out);
        store_box_of(p.out, column, 1, last.row, staged + kBytes, p.keep_out);
        stores_commit();
      }
    }
    uint32_t largest = 0, largest_8 = 0;
    const uint32_t* gates = last.words + 4 * kStep;
    const uint32_t* ups = gates + 4 * kGroups;
    const uint32_t left = encode(gates[0], ups[0], &largest);
    const uint32_t left_8 = encode(gates[1], ups[1], &largest_8);
    codes[kStep][0] = left | encode(gates[2], ups[2], &largest) << 16;
    codes[kStep][1] = left_8 | encode(gates[3], ups[3], &largest_8) << 16;
    const int64_t row = last.row + threadIdx.x % 32 / 4;
    const bool exists = last.column + kStep * 16 < p.g.n / 2;
    if (exists && row < p.g.m) amax = max(amax, largest);
    if (exists && row + 8 < p.g.m) amax = max(amax, largest_8);
  }

  __device__ __forceinline__ void store_codes() {
    const bool is_first = threadIdx.x % 32 == 0;
    if (is_first) stores_wait();
    __syncwarp();
#pragma unroll
    for (int q = 0; q < kGroups; ++q) stage_codes(staged, q, codes[q][0], codes[q][1]);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (is_first && last.row < p.g.m && last.column < p.g.n / 2) {
      store_box(p.act, last.column, last.row, staged, p.keep_out);
      stores_commit();
    }
  }

  __device__ __forceinline__ void finish() {
    all_steps(*this, std::make_integer_sequence<int, kSteps>{});
    if (threadIdx.x % 32 == 0) stores_wait();
    finish_codes(p.gated, amax);
  }
};

template <typename V>
using SwigluStore = GatedStore<V, Activation::kSilu, false>;
template <typename V>
using HeldSwigluStore = GatedStore<V, Activation::kSilu, true>;

#else

template <typename V>
struct SwigluStore;
template <typename V>
struct HeldSwigluStore;

#endif

template <bool kHeld>
void run_gated(Args& args) {
  using V = Variant<256, 4, 0, false, true>;
  const GatedProduct product = check_gated(args, kHeld);
  const DeviceGuard guard(args.device_id());
  const Launch at = launch_of(args, product.g);
  if (product.g.m == 0 || product.g.n == 0) return;
  Params p;
  p.g = product.g;
  p.gated = product.gated;
  const int64_t outputs = p.g.n / 2;
  if (p.gated.act)
    describe(&p.act, kBytes, p.gated.act, p.g.m, outputs, kWarpRows, V::kColumns / 2);
  if constexpr (kHeld) {
    describe_boxes<3>(&p.out, kBytes, p.gated.held, {outputs, 2, p.g.m}, {outputs, p.g.n},
                      {128, 1, kWarpRows});
    launch_product<V, E4M3, E4M3, HeldSwigluStore>(at, p);
  } else {
    describe_boxes<3>(&p.out, kBFloat16s, p.g.out, {outputs, 2, p.g.m}, {outputs, p.g.n},
                      {64, 1, kWarpRows});
    launch_product<V, E4M3, E4M3, SwigluStore>(at, p);
  }
}

}  // namespace apex_te
