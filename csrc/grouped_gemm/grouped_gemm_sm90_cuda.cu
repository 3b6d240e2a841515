// CUDA side of grouped_gemm with one scale for each group or row.
#include "grouped_gemm/grouped_gemm.h"

APEX_TE_LIBRARY()

#if defined(__HIP_PLATFORM_AMD__)

APEX_TE_DEFINE(grouped_gemm_multiply) {
  apex_te::fail(kApexTeUnsupported, "%s: there is no kernel for AMD GPUs", args.name());
}
APEX_TE_DEFINE(grouped_gemm_contract) {
  apex_te::fail(kApexTeUnsupported, "%s: there is no kernel for AMD GPUs", args.name());
}

#else

#include "grouped_gemm/grouped_gemm_kernel.h"

APEX_TE_DEFINE(grouped_gemm_multiply) {
  using namespace apex_te;
  run_grouped_gemm<Scaling::kFast, Scaling::kSplit>(args, false);
}
APEX_TE_DEFINE(grouped_gemm_contract) {
  using namespace apex_te;
  run_grouped_gemm<Scaling::kFast, Scaling::kSplit>(args, true);
}

#endif
