// Declarations that the CUDA sources of swiglu share.
//
// swiglu_cuda.cu         vectors of 8 elements, one row after another; results in the inputs' dtype
// swiglu_tile_cuda.cu    tiles of 16-bit elements: FP8 results in both layouts, and dbias
// swiglu_staged_cuda.cu  the same of rows at any alignment
// swiglu_any_cuda.cu     by element: any dtype, extent and alignment
#pragma once

#include "common/activation/cuda.h"
#include "swiglu/swiglu.h"

namespace apex_te {

void launch_swiglu_tile(const Swiglu& p, bool is_bwd, cudaStream_t stream);
void launch_swiglu_staged(const Swiglu& p, bool is_bwd, cudaStream_t stream);
void launch_swiglu_any(const Swiglu& p, bool is_bwd, cudaStream_t stream);

// 16-byte accesses fit the inputs: pointers and distances of rows.
inline bool swiglu_inputs_aligned(const Swiglu& p) {
  return p.cols % kVec == 0 && p.gate_ld % kVec == 0 && p.up_ld % kVec == 0 &&
         is_aligned(p.gate, 16) && is_aligned(p.up, 16) && is_aligned(p.gate_bias, 16) &&
         is_aligned(p.up_bias, 16) && is_aligned(p.grad_output, 16);
}

using GatedKinds = ActivationKinds<true, Activation::kSilu, Activation::kGelu, Activation::kGeluErf,
                                   Activation::kRelu, Activation::kSquaredRelu,
                                   Activation::kSigmoid, Activation::kSwish>;

}  // namespace apex_te
