// swiglu in FP8 blocks of 1 x 128 on CUDA, by the rule that divides.
#include "swiglu_block/swiglu_block_device.h"

template void apex_te::swiglu_block::launch<false, true, false>(const Params&, cudaStream_t);
