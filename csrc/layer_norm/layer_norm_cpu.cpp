// CPU side of layer_norm: its kernels are the instances of common/norm/cpu.h.
#include "common/norm/cpu.h"
#include "layer_norm/layer_norm.h"

APEX_TE_LIBRARY()

APEX_TE_DEFINE(layer_norm_fwd) {
  apex_te::norm_fwd_cpu<true>(apex_te::check_norm_fwd<true>(args, false));
}

APEX_TE_DEFINE(layer_norm_fwd_fp8) {
  apex_te::norm_fwd_cpu<true>(apex_te::check_norm_fwd<true>(args, true));
}

APEX_TE_DEFINE(layer_norm_again) {
  apex_te::norm_fwd_cpu<true>(apex_te::check_norm_fwd<true>(args, false, true));
}

APEX_TE_DEFINE(layer_norm_again_fp8) {
  apex_te::norm_fwd_cpu<true>(apex_te::check_norm_fwd<true>(args, true, true));
}

APEX_TE_DEFINE(layer_norm_bwd) { apex_te::norm_bwd_cpu<true>(apex_te::check_norm_bwd<true>(args)); }
