// Epilogue of the product that makes the input of a gated activation: it stores the rounded sums,
// and the activation's FP8 data.
#pragma once

#include "common/gpu/vec.h"
#include "dense_gemm/dense_gemm_store.h"
#include "swiglu/swiglu.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t low_half) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(low_half))
               : "memory");
}

// What is left of a gated product when all tiles are done.
__device__ __forceinline__ void finish_gated(const Gated& gated, uint32_t amax) {
  amax = warp_max(amax);
  if (threadIdx.x % 32 == 0 && gated.amax && amax)
    atomicMax(reinterpret_cast<unsigned int*>(gated.amax), amax);
  if (blockIdx.x == 0 && threadIdx.x % 128 == 0 && gated.scale_inv)
    *gated.scale_inv = 1.0f / *gated.scale;
}

template <typename V, Activation kAct>
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
  uint32_t codes[kGroups][2];  // of 16 outputs: four of a row, and four of the eighth row after

  __device__ __forceinline__ GatedStore(const Params& params, uint32_t all)
      : p(params), staged(all + threadIdx.x / 32 * V::kStagedBytes), scale(*params.gated.scale) {}

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

  // A step for each 16 outputs, of which 64 gates and ups leave at once; then one for the codes.
  template <int kStep>
  __device__ __forceinline__ void step() {
    if constexpr (kStep == kGroups)
      store_codes();
    else
      step_of<kStep>();
  }

  template <int kStep>
  __device__ __forceinline__ void step_of() {
    const bool is_first = threadIdx.x % 32 == 0;
    if constexpr (kStep % 4 == 0) {
      if (is_first) stores_wait();
      __syncwarp();
    }
    last.stage(staged, kStep, kStep % 4 * 2);
    last.stage(staged + kBytes, kGroups + kStep, kStep % 4 * 2);
    if constexpr (kStep % 4 == 3) {
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
    const uint32_t lane = threadIdx.x % 32, row = lane / 4;
    const bool is_first = lane == 0;
    if (is_first) stores_wait();
    __syncwarp();
    const uint32_t to = staged + row * 128 + lane % 4 * 2;
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      const uint32_t at = to + (q ^ row % 8) * 16;
      store_shared(at, codes[q][0]);
      store_shared(at + 8, codes[q][0] >> 16);
      store_shared(at + 8 * 128, codes[q][1]);
      store_shared(at + 8 * 128 + 8, codes[q][1] >> 16);
    }
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
    finish_gated(p.gated, amax);
  }
};

template <typename V>
using SwigluStore = GatedStore<V, Activation::kSilu>;

#else

template <typename V>
struct SwigluStore;

#endif

}  // namespace apex_te
