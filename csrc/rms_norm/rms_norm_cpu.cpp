// CPU side of rms_norm: its kernels are the instances of common/norm/cpu.h.
#include "common/norm/cpu.h"
#include "rms_norm/rms_norm.h"

APEX_TE_LIBRARY()

APEX_TE_DEFINE(rms_norm_fwd) {
  apex_te::norm_fwd_cpu<false>(apex_te::check_norm_fwd<false>(args, false));
}

APEX_TE_DEFINE(rms_norm_fwd_fp8) {
  apex_te::norm_fwd_cpu<false>(apex_te::check_norm_fwd<false>(args, true));
}

APEX_TE_DEFINE(rms_norm_again) {
  apex_te::norm_fwd_cpu<false>(apex_te::check_norm_fwd<false>(args, false, true));
}

APEX_TE_DEFINE(rms_norm_again_fp8) {
  apex_te::norm_fwd_cpu<false>(apex_te::check_norm_fwd<false>(args, true, true));
}

APEX_TE_DEFINE(rms_norm_bwd) { apex_te::norm_bwd_cpu<false>(apex_te::check_norm_bwd<false>(args)); }
