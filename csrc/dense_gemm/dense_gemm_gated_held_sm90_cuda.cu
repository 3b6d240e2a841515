// CUDA side of dense_gemm_swiglu_held and dense_gemm_swiglu_held_bwd, for sm_90.
#include "dense_gemm/dense_gemm.h"

#if !defined(__HIP_PLATFORM_AMD__)

#include "dense_gemm/dense_gemm_gated.h"
#include "dense_gemm/dense_gemm_gated_bwd.h"

APEX_TE_DEFINE(dense_gemm_swiglu_held) { apex_te::run_gated<true>(args); }
APEX_TE_DEFINE(dense_gemm_swiglu_held_bwd) { apex_te::run_gated_bwd<true>(args); }

#endif
