// Division by a number that a launch knows, in a multiplication and a shift.
#pragma once

#include "common/gpu/device.h"

namespace apex_te {

// Division of n < 2^31 by a constant d: (mulhi(n, factor) + n) >> shift.
struct FastDivision {
  uint32_t factor, shift;
  explicit FastDivision(uint32_t divisor) : shift(0) {
    while ((1ull << shift) < divisor) ++shift;
    factor = static_cast<uint32_t>((((1ull << shift) - divisor) << 32) / divisor + 1);
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t n) const {
    return (__umulhi(n, factor) + n) >> shift;
  }
};

}  // namespace apex_te
