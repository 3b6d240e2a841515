// CUDA side of dense_gemm_swiglu and dense_gemm_swiglu_bwd, for sm_90.
#include "dense_gemm/dense_gemm.h"

#if !defined(__HIP_PLATFORM_AMD__)

#include "dense_gemm/dense_gemm_gated.h"
#include "dense_gemm/dense_gemm_gated_bwd.h"

APEX_TE_DEFINE(dense_gemm_swiglu) { apex_te::run_gated<false>(args); }
APEX_TE_DEFINE(dense_gemm_swiglu_bwd) { apex_te::run_gated_bwd<false>(args); }

#endif
