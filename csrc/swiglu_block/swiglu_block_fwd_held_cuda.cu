// swiglu in FP8 blocks of 1 x 128 on CUDA, of a held input.
#include "swiglu_block/swiglu_block_device.h"

template void apex_te::swiglu_block::launch<false, false, true>(const Params&, cudaStream_t);

APEX_TE_DEFINE(swiglu_fwd_held_block) { apex_te::swiglu_block::run<false, true>(args); }
