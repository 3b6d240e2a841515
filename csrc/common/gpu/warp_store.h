// Stores of a warp's neighbouring columns, which leave as whole sectors.
#pragma once

#include "common/gpu/vec.h"

namespace apex_te {

// Of a warp or the lanes of it in `group`, each of which has 8 columns at p, of which `left` and
// those of later lanes exist, in vectors: neighbours exchange halves of float32, since two stores
// of half a sector each take the time of two.
template <typename T>
__device__ __forceinline__ void store_by_warp(T* p, const float* values, int64_t left,
                                              uint32_t group = 0xFFFFFFFFu) {
  if constexpr (sizeof(T) != 4) {
    Vec8<T> v;
    pack(values, &v);
    if (left > 0) store_vec_whole(p, v);
  } else {
    const bool odd = threadIdx.x % 2;
    // Both store the even lane's columns, of which the odd one has the second half, then the odd's.
    float first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(group, odd ? values[i] : values[i + 4], 1);
      first[i] = odd ? other : values[i];
      second[i] = odd ? values[i + 4] : other;
    }
    float4* at = reinterpret_cast<float4*>(p);
    if (left > (odd ? -kVec : 0))
      at[odd ? -1 : 0] = make_float4(first[0], first[1], first[2], first[3]);
    if (left > (odd ? 0 : kVec))
      at[odd ? 1 : 2] = make_float4(second[0], second[1], second[2], second[3]);
  }
}

}  // namespace apex_te
