// CUDA side of dense_gemm_swiglu and dense_gemm_swiglu_bwd, for sm_90.
#include "dense_gemm/dense_gemm.h"

#if !defined(__HIP_PLATFORM_AMD__)

#include "dense_gemm/dense_gemm_gated_bwd.h"
#include "dense_gemm/dense_gemm_kernel.h"

namespace apex_te {
namespace {

using Forward = Variant<256, 4, 0, false, true>;

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(dense_gemm_swiglu) {
  using namespace apex_te;
  const GatedProduct product = check_gated(args);
  const DeviceGuard guard(args.device_id());
  const Launch at = launch_of(args, product.g);
  if (product.g.m == 0 || product.g.n == 0) return;
  Params p;
  p.g = product.g;
  p.gated = product.gated;
  const int64_t outputs = p.g.n / 2;
  describe_boxes<3>(&p.out, kBFloat16s, p.g.out, {outputs, 2, p.g.m}, {outputs, p.g.n},
                    {64, 1, kWarpRows});
  describe(&p.act, kBytes, p.gated.act, p.g.m, p.g.n / 2, kWarpRows, Forward::kColumns / 2);
  launch_product<Forward, E4M3, E4M3, SwigluStore>(at, p);
}

APEX_TE_DEFINE(dense_gemm_swiglu_bwd) { apex_te::run_gated_bwd<false>(args); }

#endif
