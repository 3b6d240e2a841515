// From the dtype of a tensor of FP8 codes to the format that encodes them
// (common/numerics/codec.h).
#pragma once

#include "common/abi/op.h"
#include "common/numerics/codec.h"

namespace apex_te {

// e4m3fnuz and e5m2fnuz are what AMD's gfx94x multiply. NVIDIA's GPUs do not know them; the CPU
// does, as the reference for those that do.
#if defined(__CUDACC__) && !defined(__HIP_PLATFORM_AMD__)
constexpr bool kHasFNUZ = false;
constexpr std::initializer_list<DType> kFP8DTypes = {DType::kE4M3, DType::kE5M2};
#else
constexpr bool kHasFNUZ = true;
constexpr std::initializer_list<DType> kFP8DTypes = {DType::kE4M3, DType::kE5M2, DType::kE4M3FNUZ,
                                                     DType::kE5M2FNUZ};
#endif

inline bool is_e5m2(DType dtype) { return dtype == DType::kE5M2 || dtype == DType::kE5M2FNUZ; }

// call(Format{}) for one of kFP8DTypes, E4M3 for any other.
template <typename Call>
void with_fp8_format(DType dtype, const Call& call) {
  if constexpr (kHasFNUZ) {
    if (dtype == DType::kE4M3FNUZ) return call(E4M3FNUZ{});
    if (dtype == DType::kE5M2FNUZ) return call(E5M2FNUZ{});
  }
  if (dtype == DType::kE5M2) return call(E5M2{});
  call(E4M3{});
}

// The largest finite value.
inline float fp8_max(DType dtype) {
  float largest = 0.0f;
  with_fp8_format(dtype, [&](auto format) { largest = decltype(format)::kMax; });
  return largest;
}

}  // namespace apex_te
