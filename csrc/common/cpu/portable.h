// Row loops of vec.h in plain C++: for processors without AVX2, and for the ends and the rare
// cases of the loops that are written for others. Compiled once for all callers.
#pragma once

#include <algorithm>

#include "common/cpu/isa.h"
#include "common/numerics/codec.h"

namespace apex_te {

template <typename T>
APEX_TE_ONCE void widen_portable(const T* x, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = to_float(x[i]);
}

template <typename T>
APEX_TE_ONCE void narrow_portable(const float* values, int64_t n, T* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = from_float<T>(values[i]);
}

template <typename Format, typename T>
APEX_TE_ONCE uint32_t encode_row_portable(const T* x, int64_t n, float scale, uint8_t* codes) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = to_float(x[i]);
    amax = std::max(amax, magnitude_bits(value));
    codes[i] = encode_fp8<Format>(value * scale);
  }
  return amax;
}

template <typename Format>
APEX_TE_ONCE void decode_row_portable(const uint8_t* codes, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = decode_fp8<Format>(codes[i]);
}

}  // namespace apex_te
