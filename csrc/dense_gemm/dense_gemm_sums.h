// The sums of a warpgroup, 64 rows of a tile: how stages are multiplied into them.
#pragma once

#include <utility>

#include "common/gpu/wgmma.h"
#include "dense_gemm/dense_gemm_ring.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// d[4 j + ..] as multiply_add has them.
template <typename V>
constexpr int kSums = V::kColumns / 2;

template <typename V, typename A, typename B>
__device__ __forceinline__ void multiply_stage(float (&d)[kSums<V>], uint32_t tiles, int warpgroup,
                                               bool adds) {
  const uint64_t a = matrix_at(tiles + warpgroup * (V::kBytesA / 2));
  const uint64_t b = matrix_at(tiles + V::kBytesA);
  products_begin();
#pragma unroll
  for (int k = 0; k < kTileK / 32; ++k)
    multiply_add(A{}, B{}, d, a + 2 * k, b + 2 * k, k > 0 || adds);
  products_commit();
}

// Calls work.step<0>(), work.step<1>() and so on.
template <typename Work, int... kSteps>
__device__ __forceinline__ void all_steps(Work& work, std::integer_sequence<int, kSteps...>) {
  (work.template step<kSteps>(), ...);
}

// d = products of all stages. While those of the first stages are made, the steps of other work are
// done, one beside each stage.
template <typename V, typename A, typename B>
struct Products {
  float (&d)[kSums<V>];
  const Ring<V>& ring;
  Place<V::kStages>* place;
  int warpgroup, stage;

  template <typename Step>
  __device__ __forceinline__ void multiply(bool is_first, const Step& step) {
    const int before = stage;
    stage = place->at;
    const uint32_t tiles = same_in_warp(ring.a(stage));
    barrier_wait(&ring.control->full[stage], place->phase);
    multiply_stage<V, A, B>(d, tiles, warpgroup, !is_first);
    step();
    products_wait<1>();
    if (!is_first) ring.release(before);
    place->next();
  }
  template <typename Work, int... kSteps>
  __device__ __forceinline__ void multiply_beside(Work& work,
                                                  std::integer_sequence<int, kSteps...>) {
    (multiply(kSteps == 0, [&] { work.template step<kSteps>(); }), ...);
  }
  template <typename Work>
  __device__ __forceinline__ void all(int blocks, Work& work) {
    constexpr auto kSteps = std::make_integer_sequence<int, Work::kSteps>{};
    int i = 0;
    if (blocks >= Work::kSteps) {
      multiply_beside(work, kSteps);
      i = Work::kSteps;
    } else {
      all_steps(work, kSteps);
    }
#pragma unroll 1
    for (; i < blocks; ++i) multiply(i == 0, [] {});
    products_wait<0>();
    ring.release(stage);
  }
};

// d += products of `count` stages, summed in the matrix units; without `adds` d = products. A
// stage's products are issued before those of the stage before are waited for.
template <typename V, typename A, typename B>
__device__ __forceinline__ void multiply_stages(float (&d)[kSums<V>], const Ring<V>& ring,
                                                int count, int warpgroup, bool adds,
                                                Place<V::kStages>* place) {
  int stage = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i, place->next()) {
    stage = place->at;
    const uint32_t tiles = same_in_warp(ring.a(stage));
    barrier_wait(&ring.control->full[stage], place->phase);
    multiply_stage<V, A, B>(d, tiles, warpgroup, adds || i > 0);
    products_wait<1>();
    if (i > 0) ring.release(stage ? stage - 1 : V::kStages - 1);
  }
  products_wait<0>();
  ring.release(stage);
}

// d = products of all stages, of which those of kInterval stages are summed in the matrix units and
// these sums in float32: the other warpgroup multiplies while this one adds.
template <typename V, typename A, typename B>
__device__ __forceinline__ void multiply_parts(float (&d)[kSums<V>], const Ring<V>& ring,
                                               int blocks, int warpgroup,
                                               Place<V::kStages>* place) {
  constexpr int kInterval = V::kInterval;
  float part[kSums<V>] = {};
  int count = min(blocks, kInterval - (V::kStaggered ? warpgroup * (kInterval / 2) : 0));
#pragma unroll 1
  while (blocks > 0) {
    multiply_stages<V, A, B>(part, ring, count, warpgroup, false, place);
#pragma unroll
    for (int k = 0; k < kSums<V>; ++k) d[k] += part[k];
    blocks -= count;
    count = min(blocks, kInterval);
  }
}

template <typename V>
__device__ __forceinline__ void clear(float (&d)[kSums<V>]) {
#pragma unroll
  for (int i = 0; i < kSums<V>; ++i) d[i] = 0.0f;
}

template <typename V, typename A, typename B>
__device__ __forceinline__ void multiply_tile(float (&d)[kSums<V>], const Ring<V>& ring, int blocks,
                                              int warpgroup, Place<V::kStages>* place) {
  clear<V>(d);
  if (blocks == 0) return;
  if constexpr (V::kInterval == 0)
    multiply_stages<V, A, B>(d, ring, blocks, warpgroup, true, place);
  else
    multiply_parts<V, A, B>(d, ring, blocks, warpgroup, place);
}

#endif

}  // namespace apex_te
