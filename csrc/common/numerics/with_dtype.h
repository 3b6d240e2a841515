// One instance of a function for the dtype that a tensor has.
#pragma once

#include "common/abi/op.h"
#include "common/numerics/codec.h"

namespace apex_te {

// Returns run(zero) with a zero of the dtype: float, Half or, for any other dtype, BFloat16.
template <typename Run>
auto with_dtype(DType dtype, const Run& run) {
  if (dtype == DType::kFloat32) return run(float{});
  if (dtype == DType::kFloat16) return run(Half{});
  return run(BFloat16{});
}

}  // namespace apex_te
