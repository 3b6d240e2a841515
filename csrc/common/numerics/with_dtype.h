// One instance of a function for the dtype that a tensor has.
#pragma once

#include "common/abi/op.h"
#include "common/numerics/codec.h"

namespace apex_te {

// run(zero) with a zero of the dtype: float, Half or BFloat16.
template <typename Run>
void with_dtype(DType dtype, const Run& run) {
  if (dtype == DType::kFloat32)
    run(float{});
  else if (dtype == DType::kFloat16)
    run(Half{});
  else
    run(BFloat16{});
}

}  // namespace apex_te
