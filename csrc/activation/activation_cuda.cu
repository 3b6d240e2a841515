// CUDA kernels of activation: common/activation/*cuda.h, without a bias.
#include "activation/activation.h"
#include "common/activation/launch_cuda.h"

APEX_TE_LIBRARY()

namespace apex_te {

using Kinds =
    ActivationKinds<false, Activation::kGelu, Activation::kGeluErf, Activation::kQuickGelu,
                    Activation::kRelu, Activation::kSquaredRelu, Activation::kSilu>;

}  // namespace apex_te

APEX_TE_DEFINE(activation_fwd) {
  using namespace apex_te;
  launch_activation<Kinds, false>(args, check_activation(args, false, false));
}

APEX_TE_DEFINE(activation_bwd) {
  using namespace apex_te;
  launch_activation<Kinds, true>(args, check_activation(args, true, false));
}

APEX_TE_DEFINE(activation_fwd_fp8) {
  using namespace apex_te;
  launch_activation<Kinds, false>(args, check_activation(args, false, true));
}

APEX_TE_DEFINE(activation_bwd_fp8) {
  using namespace apex_te;
  launch_activation<Kinds, true>(args, check_activation(args, true, true));
}
