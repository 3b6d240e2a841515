// CUDA side of dense_gemm_swiglu and dense_gemm_swiglu_bwd, for sm_90.
#include "dense_gemm/dense_gemm.h"

#if !defined(__HIP_PLATFORM_AMD__)

#include "dense_gemm/dense_gemm_gated_bwd.h"
#include "dense_gemm/dense_gemm_kernel.h"

namespace apex_te {
namespace {

using Forward = Variant<256, 4, 0, false, true>;
using Backward = Variant<192, 4, 4, true>;

template <typename A>
void launch_bwd(const Launch& at, const GatedProduct& product) {
  using V = Backward;
  constexpr size_t kBytesShared =
      V::kStages * V::kStageBytes + kExchangeBytes<V> + sizeof(Control<V::kStages>);
  static_assert(kBytesShared <= kSharedLimit, "what a block may have on sm_90");
  Params p;
  p.g = product.g;
  p.gated = product.gated;
  describe(&p.added, kBFloat16s, p.gated.hidden, p.g.m, 2 * p.g.n, kTileM, V::kColumns);
  prepare<V>(&p);
  launch_tiles<V>(at, gated_gradient_kernel<V, A, E4M3, Activation::kSilu>, kConsumers + 256,
                  kBytesShared, p);
}

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

APEX_TE_DEFINE(dense_gemm_swiglu_bwd) {
  using namespace apex_te;
  const GatedProduct product = check_gated_bwd(args);
  if (product.g.promotion != 512)
    fail(kApexTeUnsupported, "%s: promotion must be 512, got %lld", args.name(),
         static_cast<long long>(product.g.promotion));
  const DeviceGuard guard(args.device_id());
  const Launch at = launch_of(args, product.g);
  if (product.g.m == 0 || product.g.n == 0) return;
  if (product.g.a_type == DType::kE5M2)
    launch_bwd<E5M2>(at, product);
  else
    launch_bwd<E4M3>(at, product);
}

#endif
