// CUDA side of dense_gemm_gelu and dense_gemm_gelu_bwd, for sm_90.
#include "dense_gemm/dense_gemm.h"

#if !defined(__HIP_PLATFORM_AMD__)

#include "dense_gemm/dense_gemm_gelu.h"
#include "dense_gemm/dense_gemm_gelu_bwd.h"

APEX_TE_DEFINE(dense_gemm_gelu) { apex_te::run_gelu(args); }
APEX_TE_DEFINE(dense_gemm_gelu_bwd) { apex_te::run_gelu_bwd(args); }

#endif
