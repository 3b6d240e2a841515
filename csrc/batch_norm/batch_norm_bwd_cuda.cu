// batch_norm on CUDA: the sums and gradients of backward.
#include "batch_norm/batch_norm_device.h"

APEX_TE_DEFINE(batch_norm_reduce) {
  using namespace apex_te;
  const BatchNorm p = check_batch_norm_reduce(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  if (p.relu)
    batch_norm::launch_reduction<false, true>(p, args.name(), stream);
  else
    batch_norm::launch_reduction<false, false>(p, args.name(), stream);
}

APEX_TE_DEFINE(batch_norm_bwd) {
  using namespace apex_te;
  const BatchNorm p = check_batch_norm_bwd(args);
  const DeviceGuard guard(args.device_id());
  batch_norm::launch_elements<true>(p, args.name(), static_cast<cudaStream_t>(args.stream()));
}
