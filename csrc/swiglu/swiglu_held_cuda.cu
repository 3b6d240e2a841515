// CUDA entries of swiglu with a held input.
#include "swiglu/swiglu_device.h"

namespace apex_te {
namespace {

void run_held(Args& args, bool is_bwd) {
  const Swiglu p = is_bwd ? check_swiglu_bwd(args, true, true) : check_swiglu_fwd(args, true, true);
  check_held_vectors(args, p);
  if (!is_aligned(p.rowwise, 8))
    fail(kApexTeUnsupported, "%s: rowwise must be aligned to 8 bytes", args.name());
  const DeviceGuard guard(args.device_id());
  launch_swiglu_tile(p, is_bwd, static_cast<cudaStream_t>(args.stream()));
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(swiglu_fwd_held_fp8) { apex_te::run_held(args, false); }
APEX_TE_DEFINE(swiglu_bwd_held_fp8) { apex_te::run_held(args, true); }
