// Chooses the kernel of a call of the ops activation and bias_gelu.
#pragma once

#include "common/activation/any_cuda.h"
#include "common/activation/staged_cuda.h"
#include "common/numerics/with_dtype.h"

namespace apex_te {

template <typename Kinds, bool kBwd>
void launch_activation(Args& args, ActivationOp p) {
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  // Where no result depends on what a row is, rows are taken together until vectors fill them.
  if (p.rows && !p.columnwise && !p.bias && !p.dbias)
    for (; p.cols % kVec && p.rows % 2 == 0; p.cols *= 2) p.rows /= 2;
  if (p.out && !p.dbias && activation_flat_fits(p))
    launch_activation_flat<Kinds, kBwd>(p, stream);
  else if ((!p.out || p.dbias) && activation_tile_fits(p))
    launch_activation_tile<Kinds, kBwd>(p, stream);
  else if (p.dtype != DType::kFloat32 && p.rows && p.cols)
    launch_activation_staged<Kinds, kBwd>(p, stream);
  else
    launch_activation_any<Kinds, kBwd>(p, stream);
  if constexpr (kBwd && Kinds::kBias) {
    if (!p.dbias) return;
    const int64_t lines = (p.rows + kActivationTileRows - 1) / kActivationTileRows;
    with_dtype(p.dtype, [&](auto zero) {
      launch_column_sums<decltype(zero)>(p.workspace, lines, p.cols, p.dbias, stream);
    });
  }
}

}  // namespace apex_te
