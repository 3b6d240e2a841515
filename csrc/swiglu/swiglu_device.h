// Declarations that the CUDA sources of swiglu share.
//
// swiglu_cuda.cu         vectors of 8 elements, one row after another; results in the inputs' dtype
// swiglu_tile_cuda.cu    tiles of 16-bit elements: FP8 results in both layouts, and dbias
// swiglu_staged_cuda.cu  the same of rows at any alignment
// swiglu_any_cuda.cu     by element: any dtype, extent and alignment
// swiglu_held_cuda.cu    entries of held inputs, whose kernels are those of tiles
#pragma once

#include "common/activation/cuda.h"
#include "common/gpu/vec.h"
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

// Kernels read a held input in vectors of 8 columns that have one scale.
inline void check_held_vectors(const Args& args, const Swiglu& p) {
  if (p.cols % kVec || !is_aligned(p.gate, 8) || !is_aligned(p.grad_output, 16))
    fail(kApexTeUnsupported,
         "%s: input must have a multiple of 16 columns, and tensors be aligned to 16 bytes",
         args.name());
}

// 8 columns of kCount rows of a held input [M, 2F], of which `rows` rows exist; zeros for the
// others, and unless the columns exist.
template <int kCount, typename T>
__device__ __forceinline__ void load_held(const Swiglu& p, int64_t row, int64_t col, int rows,
                                          bool exist, Vec8<T>* in) {
  const uint8_t* codes = static_cast<const uint8_t*>(p.gate) + row * p.gate_ld + col;
  const float* scales = p.held_scales + col / kBlock * p.held_ld + row;
  uint2 words[kCount];
  float factors[kCount];
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    const bool exists = exist && r < rows;
    words[r] = exists ? *reinterpret_cast<const uint2*>(codes + r * p.gate_ld) : make_uint2(0, 0);
    factors[r] = exists ? scales[r] : 0.0f;
  }
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    float values[kVec];
    decode_values<E4M3>(words[r], values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] *= factors[r];
    pack(values, &in[r]);
  }
}

using GatedKinds = ActivationKinds<true, Activation::kSilu, Activation::kGelu, Activation::kGeluErf,
                                   Activation::kRelu, Activation::kSquaredRelu,
                                   Activation::kSigmoid, Activation::kSwish>;

}  // namespace apex_te
