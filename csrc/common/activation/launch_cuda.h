// Chooses the kernel of a call of the ops activation and bias_gelu.
#pragma once

#include "common/activation/any_cuda.h"
#include "common/activation/tile_cuda.h"

namespace apex_te {

template <typename Kinds, bool kBwd>
void launch_activation(Args& args, const ActivationOp& p) {
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  if (p.out && !p.dbias && activation_flat_fits(p))
    launch_activation_flat<Kinds, kBwd>(p, stream);
  else if ((!p.out || p.dbias) && activation_tile_fits(p))
    launch_activation_tile<Kinds, kBwd>(p, stream);
  else
    launch_activation_any<Kinds, kBwd>(p, stream);
  if constexpr (kBwd && Kinds::kBias) {
    if (!p.dbias) return;
    const int64_t lines = (p.rows + kActivationTileRows - 1) / kActivationTileRows;
    switch (p.dtype) {
      case DType::kFloat32:
        return launch_column_sums<float>(p.workspace, lines, p.cols, p.dbias, stream);
      case DType::kFloat16:
        return launch_column_sums<Half>(p.workspace, lines, p.cols, p.dbias, stream);
      default:
        return launch_column_sums<BFloat16>(p.workspace, lines, p.cols, p.dbias, stream);
    }
  }
}

}  // namespace apex_te
