// CUDA side of dense_gemm, for sm_90: the plain product, and which tiles suit a shape.
#include "dense_gemm/dense_gemm.h"

APEX_TE_LIBRARY()

#if defined(__HIP_PLATFORM_AMD__)

APEX_TE_DEFINE(dense_gemm) {
  apex_te::fail(kApexTeUnsupported, "%s: there is no kernel for AMD GPUs", args.name());
}
APEX_TE_DEFINE(dense_gemm_swiglu) {
  apex_te::fail(kApexTeUnsupported, "%s: there is no kernel for AMD GPUs", args.name());
}
APEX_TE_DEFINE(dense_gemm_swiglu_bwd) {
  apex_te::fail(kApexTeUnsupported, "%s: there is no kernel for AMD GPUs", args.name());
}

#else

#include "dense_gemm/dense_gemm_kernel.h"
#include "dense_gemm/dense_gemm_store.h"

namespace apex_te {
namespace {

template <typename V, typename A, typename B>
void launch(const Launch& at, const DenseGemm& g) {
  Params p;
  p.g = g;
  if (g.out) describe(&p.out, kBFloat16s, g.out, g.m, g.n, kWarpRows, V::kBox);
  if (g.added) describe(&p.added, kBFloat16s, g.added, g.m, g.n, kTileM, V::kColumns);
  if (g.wide_added) describe(&p.added, kFloats, g.wide_added, g.m, g.n, kTileM, V::kColumns);
  if constexpr (V::kColumns == 256) {
    if (g.out && !g.added) return launch_product<V, A, B, LateStore>(at, p);
  }
  launch_product<V, A, B, PlainStore>(at, p);
}

using Fast256 = Variant<256, 4, 0>;
using Fast192 = Variant<192, 5, 0>;
using Fast128 = Variant<128, 6, 0>;
template <int kInterval>
using Split192 = Variant<192, 4, kInterval, true>;
template <int kInterval>
using Split128 = Variant<128, 6, kInterval, true>;

template <typename Call>
bool with_variant(const DenseGemm& g, int64_t columns, const Call& call) {
  const int64_t key = g.promotion * 1000 + columns;
  switch (key) {
    case 256:
      return call(Fast256{}), true;
    case 192:
      return call(Fast192{}), true;
    case 128:
      return call(Fast128{}), true;
    case 128192:
      return call(Split192<1>{}), true;
    case 256192:
      return call(Split192<2>{}), true;
    case 512192:
      return call(Split192<4>{}), true;
    case 128128:
      return call(Split128<1>{}), true;
    case 256128:
      return call(Split128<2>{}), true;
    case 512128:
      return call(Split128<4>{}), true;
    default:
      return false;
  }
}

// The width of tiles that takes least time: clusters take as many turns each, of which one costs
// its columns and what a tile costs beside its products. Narrow tiles read more of shared memory
// for the same products; the clocks are measured ones, relative to the columns.
int64_t columns_of(const DenseGemm& g, int64_t clusters) {
  struct Choice {
    int columns, clocks;
  };
  constexpr Choice kFast[] = {{256, 256}, {192, 200}, {128, 132}};
  constexpr Choice kSplit[] = {{192, 192}, {128, 136}};
  const int64_t blocks = (g.k + kTileK - 1) / kTileK;
  constexpr int64_t kBeside = 1500;  // clocks to fill the ring and to write a tile
  int64_t best = 0, least = INT64_MAX;
  const auto consider = [&](const Choice& choice) {
    const int64_t turns = turns_of(g, choice.columns);
    const int64_t rounds = (turns + clusters - 1) / clusters;
    const int64_t clocks = rounds * (blocks * choice.clocks * 4 + kBeside);
    if (clocks < least) best = choice.columns, least = clocks;
  };
  if (g.promotion)
    for (const Choice& choice : kSplit) consider(choice);
  else
    for (const Choice& choice : kFast) consider(choice);
  return best;
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(dense_gemm) {
  using namespace apex_te;
  const DenseGemm g = check_dense_gemm(args);
  const DeviceGuard guard(args.device_id());
  const Launch at = launch_of(args, g);
  if (g.m == 0 || g.n == 0) return;
  const int64_t columns = g.columns ? g.columns : columns_of(g, at.multiprocessors / 2);
  const bool is_known = with_variant(g, columns, [&](auto variant) {
    using V = decltype(variant);
    const bool is_a_e5m2 = g.a_type == DType::kE5M2, is_b_e5m2 = g.b_type == DType::kE5M2;
    if (is_a_e5m2)
      launch<V, E5M2, E4M3>(at, g);
    else if (is_b_e5m2)
      launch<V, E4M3, E5M2>(at, g);
    else
      launch<V, E4M3, E4M3>(at, g);
  });
  if (!is_known)
    fail(kApexTeValueError, "%s: columns must be 0, 128, 192 or 256, got %lld", args.name(),
         static_cast<long long>(g.columns));
}

#endif
