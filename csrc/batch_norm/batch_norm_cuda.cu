// batch_norm on CUDA: statistics, their combination and forward.
#include "batch_norm/batch_norm_device.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace batch_norm {
namespace {

constexpr int kCombineThreads = 128;

__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const BatchNormCombine p) {
  const int64_t channel = int64_t{blockIdx.x} * kCombineThreads + threadIdx.x;
  if (channel < p.channels) combine_channel(p, channel);
}

}  // namespace
}  // namespace batch_norm
}  // namespace apex_te

APEX_TE_DEFINE(batch_norm_stats) {
  using namespace apex_te;
  const BatchNorm p = check_batch_norm_stats(args);
  const DeviceGuard guard(args.device_id());
  batch_norm::launch_reduction<true, false>(p, {}, args.name(),
                                            static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(batch_norm_combine) {
  using namespace apex_te;
  const BatchNormCombine p = check_batch_norm_combine(args);
  if (p.channels == 0) return;
  constexpr int kThreads = batch_norm::kCombineThreads;
  const int64_t blocks = (p.channels + kThreads - 1) / kThreads;
  if (blocks > 0x7FFFFFFF) fail(kApexTeUnsupported, "%s: too many channels", args.name());
  const DeviceGuard guard(args.device_id());
  batch_norm::combine_kernel<<<static_cast<unsigned>(blocks), kThreads, 0,
                               static_cast<cudaStream_t>(args.stream())>>>(p);
  check_cuda(cudaGetLastError(), args.name());
}

APEX_TE_DEFINE(batch_norm_fwd) {
  using namespace apex_te;
  const BatchNorm p = check_batch_norm_fwd(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  batch_norm::launch_elements<false>(p, false, args.name(), stream);
}

APEX_TE_DEFINE(batch_norm_train_fwd) {
  using namespace apex_te;
  const BatchNormTrainFwd steps = check_batch_norm_train_fwd(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  batch_norm::launch_reduction<true, false>(steps.stats, steps.combine, args.name(), stream);
  batch_norm::launch_elements<false>(steps.fwd, true, args.name(), stream);
}
