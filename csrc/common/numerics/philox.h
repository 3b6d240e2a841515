// Philox4x32-10, a counter-based random number generator, for host and device, and the dropout mask
// made with it.
//
// Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
#pragma once

#include <cmath>

#include "common/numerics/codec.h"

namespace apex_te {

struct Philox4 {
  uint32_t x, y, z, w;
};

constexpr uint32_t kPhiloxFactorX = 0xD2511F53u, kPhiloxFactorZ = 0xCD9E8D57u;
// From a round's key to the next.
constexpr uint32_t kPhiloxStepLow = 0x9E3779B9u, kPhiloxStepHigh = 0xBB67AE85u;

// All 64 bits of a product. On the device in one instruction: nvcc makes two of the expression.
#if defined(__CUDA_ARCH__) && !defined(APEX_TE_PORTABLE)
__device__ __forceinline__ uint64_t wide_product(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}
#else
APEX_TE_HD constexpr uint64_t wide_product(uint32_t a, uint32_t b) { return uint64_t{a} * b; }
#endif

// 128 random bits of a counter under a 64-bit key.
template <int kRounds = 10>
APEX_TE_HD constexpr Philox4 philox4x32(Philox4 c, uint32_t key_low, uint32_t key_high) {
  if constexpr (kRounds == 0) {
    return c;
  } else {
    const uint64_t a = wide_product(kPhiloxFactorX, c.x);
    const uint64_t b = wide_product(kPhiloxFactorZ, c.z);
    const Philox4 next = {static_cast<uint32_t>(b >> 32) ^ c.y ^ key_low, static_cast<uint32_t>(b),
                          static_cast<uint32_t>(a >> 32) ^ c.w ^ key_high,
                          static_cast<uint32_t>(a)};
    return philox4x32<kRounds - 1>(next, key_low + kPhiloxStepLow, key_high + kPhiloxStepHigh);
  }
}

// The bits of elements 8 v to 8 v + 7 of a row: 16 for each, in order, low halves first.
APEX_TE_HD constexpr Philox4 dropout_bits(uint64_t seed, int64_t row, int64_t v) {
  const uint64_t r = static_cast<uint64_t>(row), c = static_cast<uint64_t>(v);
  return philox4x32({static_cast<uint32_t>(c), static_cast<uint32_t>(r),
                     static_cast<uint32_t>(r >> 32), static_cast<uint32_t>(c >> 32)},
                    static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// One bit for each of the 8 elements: set if it is kept.
APEX_TE_HD uint32_t keep_bits(uint64_t seed, int64_t row, int64_t v, uint32_t threshold) {
  const Philox4 r = dropout_bits(seed, row, v);
  const uint32_t words[4] = {r.x, r.y, r.z, r.w};
  const uint32_t high = threshold << 16;  // a high half is compared together with the low one
  uint32_t bits = 0;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    bits |= words[i] << 16 >= high ? 1u << 2 * i : 0u;
    bits |= words[i] >= high ? 2u << 2 * i : 0u;
  }
  return bits;
}

// An element is dropped if its 16 bits are below threshold, else multiplied by scale. For p in
// (0, 1) it is dropped with probability threshold / 65536, p to the nearest of 1 / 65536 to
// 65535 / 65536, and scale is the inverse of the exact probability of being kept, so that the
// expectation is exact. No bits are needed for p = 0 (scale 1) and p = 1 (scale 0).
struct Dropout {
  uint32_t threshold;
  float scale;
  bool is_random;

  static Dropout of(double p) {
    if (p == 0.0) return {0, 1.0f, false};
    if (p == 1.0) return {0, 0.0f, false};
    const double nearest = std::floor(p * 65536.0 + 0.5);
    const double threshold = nearest < 1.0 ? 1.0 : nearest > 65535.0 ? 65535.0 : nearest;
    return {static_cast<uint32_t>(threshold), static_cast<float>(65536.0 / (65536.0 - threshold)),
            true};
  }
};

}  // namespace apex_te
