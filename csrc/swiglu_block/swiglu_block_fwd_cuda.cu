// swiglu in FP8 blocks of 1 x 128 on CUDA, by rules that multiply.
#include "swiglu_block/swiglu_block_device.h"

APEX_TE_LIBRARY()

template void apex_te::swiglu_block::launch<false, false, false>(const Params&, cudaStream_t);

APEX_TE_DEFINE(swiglu_fwd_block) { apex_te::swiglu_block::run<false>(args); }
