// CUDA side of rms_norm: its kernels are the instances of common/norm/*_cuda.h.
#include "common/norm/bwd_launch_cuda.h"
#include "common/norm/fwd_fp8_cuda.h"
#include "rms_norm/rms_norm.h"

APEX_TE_LIBRARY()

APEX_TE_DEFINE(rms_norm_fwd) {
  using namespace apex_te;
  const NormFwd p = check_norm_fwd<false>(args, false);
  const DeviceGuard guard(args.device_id());
  launch_norm_fwd<false>(p, args.name(), args.device_id(), args.stream());
}

APEX_TE_DEFINE(rms_norm_fwd_fp8) {
  using namespace apex_te;
  const NormFwd p = check_norm_fwd<false>(args, true);
  const DeviceGuard guard(args.device_id());
  launch_norm_fwd<false>(p, args.name(), args.device_id(), args.stream());
}

APEX_TE_DEFINE(rms_norm_again) {
  using namespace apex_te;
  const NormFwd p = check_norm_fwd<false>(args, false, true);
  const DeviceGuard guard(args.device_id());
  launch_norm_again<false>(p, args.name(), args.device_id(), args.stream());
}

APEX_TE_DEFINE(rms_norm_again_fp8) {
  using namespace apex_te;
  const NormFwd p = check_norm_fwd<false>(args, true, true);
  const DeviceGuard guard(args.device_id());
  launch_norm_again<false>(p, args.name(), args.device_id(), args.stream());
}

APEX_TE_DEFINE(rms_norm_bwd) {
  using namespace apex_te;
  const NormBwd p = check_norm_bwd<false>(args);
  const DeviceGuard guard(args.device_id());
  launch_norm_bwd<false>(p, args.name(), args.device_id(), args.stream());
}
