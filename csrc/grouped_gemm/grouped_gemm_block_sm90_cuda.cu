// CUDA side of grouped_gemm with block scales.
#include "grouped_gemm/grouped_gemm.h"

#if defined(__HIP_PLATFORM_AMD__)

APEX_TE_DEFINE(grouped_block_multiply) {
  apex_te::fail(kApexTeUnsupported, "%s: there is no kernel for AMD GPUs", args.name());
}
APEX_TE_DEFINE(grouped_block_contract) {
  apex_te::fail(kApexTeUnsupported, "%s: there is no kernel for AMD GPUs", args.name());
}

#else

#include "grouped_gemm/grouped_gemm_kernel.h"

APEX_TE_DEFINE(grouped_block_multiply) {
  using namespace apex_te;
  run_grouped_gemm<Scaling::kRowsAndBlocks, Scaling::kRowsAndBlocks>(args, false);
}
APEX_TE_DEFINE(grouped_block_contract) {
  using namespace apex_te;
  run_grouped_gemm<Scaling::kRowsAndColumns, Scaling::kRowsAndColumnBlocks>(args, true);
}

#endif
