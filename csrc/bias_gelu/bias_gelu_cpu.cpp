// CPU kernels of bias_gelu: common/activation/cpu.h, with a bias.
#include "bias_gelu/bias_gelu.h"
#include "common/activation/cpu.h"

APEX_TE_LIBRARY()

namespace apex_te {

using Kinds = ActivationKinds<Activation::kGelu, Activation::kGeluErf>;

}  // namespace apex_te

APEX_TE_DEFINE(bias_gelu_fwd) {
  using namespace apex_te;
  run_activation<false, Kinds>(check_bias_gelu(args, false, false));
}

APEX_TE_DEFINE(bias_gelu_bwd) {
  using namespace apex_te;
  run_activation<true, Kinds>(check_bias_gelu(args, true, false));
}

APEX_TE_DEFINE(bias_gelu_fwd_fp8) {
  using namespace apex_te;
  run_activation<false, Kinds>(check_bias_gelu(args, false, true));
}

APEX_TE_DEFINE(bias_gelu_bwd_fp8) {
  using namespace apex_te;
  run_activation<true, Kinds>(check_bias_gelu(args, true, true));
}
