// Gradients of swiglu in FP8 blocks of 1 x 128 on CUDA.
#include "swiglu_block/swiglu_block_device.h"

APEX_TE_DEFINE(swiglu_bwd_block) { apex_te::swiglu_block::run<true>(args); }
