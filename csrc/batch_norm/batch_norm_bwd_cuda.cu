// batch_norm on CUDA: the sums and gradients of backward.
#include "batch_norm/batch_norm_device.h"

namespace apex_te {
namespace batch_norm {
namespace {

void launch_sums(const BatchNorm& p, const char* name, cudaStream_t stream) {
  if (p.relu)
    launch_reduction<false, true>(p, {}, name, stream);
  else
    launch_reduction<false, false>(p, {}, name, stream);
}

}  // namespace
}  // namespace batch_norm
}  // namespace apex_te

APEX_TE_DEFINE(batch_norm_reduce) {
  using namespace apex_te;
  const BatchNorm p = check_batch_norm_reduce(args);
  const DeviceGuard guard(args.device_id());
  batch_norm::launch_sums(p, args.name(), static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(batch_norm_bwd) {
  using namespace apex_te;
  const BatchNorm p = check_batch_norm_bwd(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  batch_norm::launch_elements<true>(p, false, args.name(), stream);
}

APEX_TE_DEFINE(batch_norm_train_bwd) {
  using namespace apex_te;
  const BatchNormTrainBwd steps = check_batch_norm_train_bwd(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  batch_norm::launch_sums(steps.reduce, args.name(), stream);
  batch_norm::launch_elements<true>(steps.bwd, true, args.name(), stream);
}
