// CUDA kernels of bias_gelu: common/activation/*cuda.h, with a bias.
#include "bias_gelu/bias_gelu.h"
#include "common/activation/launch_cuda.h"

APEX_TE_LIBRARY()

namespace apex_te {

using Kinds = ActivationKinds<true, Activation::kGelu, Activation::kGeluErf>;

}  // namespace apex_te

APEX_TE_DEFINE(bias_gelu_fwd) {
  using namespace apex_te;
  launch_activation<Kinds, false>(args, check_bias_gelu(args, false, false));
}

APEX_TE_DEFINE(bias_gelu_bwd) {
  using namespace apex_te;
  launch_activation<Kinds, true>(args, check_bias_gelu(args, true, false));
}

APEX_TE_DEFINE(bias_gelu_fwd_fp8) {
  using namespace apex_te;
  launch_activation<Kinds, false>(args, check_bias_gelu(args, false, true));
}

APEX_TE_DEFINE(bias_gelu_bwd_fp8) {
  using namespace apex_te;
  launch_activation<Kinds, true>(args, check_bias_gelu(args, true, true));
}
