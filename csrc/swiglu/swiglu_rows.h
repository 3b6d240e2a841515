// Rows of swiglu on the CPU, in fp32.
#pragma once

#include "common/cpu/rows.h"
#include "swiglu/swiglu.h"

namespace apex_te {

// A row's arithmetic: forward into `first`; backward, dgate into `first` and dup into `second`.
using RowLoop = void (*)(const float* gate, const float* up, const float* grad, int64_t n,
                         const Clamp& clamp, float* first, float* second);

template <Activation kAct, bool kBwd>
APEX_TE_INLINE void row_loop(const float* __restrict__ gate, const float* __restrict__ up,
                             const float* __restrict__ grad, int64_t n, const Clamp& clamp,
                             float* __restrict__ first, float* __restrict__ second) {
  const Clamp own = clamp;  // no store changes it
  for (int64_t i = 0; i < n; ++i) {
    if (kBwd)
      gated_gradient<kAct>(gate[i], up[i], grad[i], own, &first[i], &second[i]);
    else
      first[i] = gated<kAct>(gate[i], up[i], own);
  }
}
template <Activation kAct, bool kBwd>
APEX_TE_TARGET_PORTABLE void row_portable(const float* gate, const float* up, const float* grad,
                                          int64_t n, const Clamp& clamp, float* first,
                                          float* second) {
  row_loop<kAct, kBwd>(gate, up, grad, n, clamp, first, second);
}
template <Activation kAct, bool kBwd>
APEX_TE_TARGET_AVX2 void row_avx2(const float* gate, const float* up, const float* grad, int64_t n,
                                  const Clamp& clamp, float* first, float* second) {
  row_loop<kAct, kBwd>(gate, up, grad, n, clamp, first, second);
}
template <Activation kAct, bool kBwd>
APEX_TE_TARGET_AVX512 void row_avx512(const float* gate, const float* up, const float* grad,
                                      int64_t n, const Clamp& clamp, float* first, float* second) {
  row_loop<kAct, kBwd>(gate, up, grad, n, clamp, first, second);
}

template <Activation kAct, bool kBwd>
RowLoop row_loop_of() {
  return use_avx512() ? row_avx512<kAct, kBwd>
         : use_avx2() ? row_avx2<kAct, kBwd>
                      : row_portable<kAct, kBwd>;
}
template <bool kBwd>
RowLoop row_loop_of(Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return row_loop_of<Activation::kGelu, kBwd>();
    case Activation::kGeluErf:
      return row_loop_of<Activation::kGeluErf, kBwd>();
    case Activation::kRelu:
      return row_loop_of<Activation::kRelu, kBwd>();
    case Activation::kSquaredRelu:
      return row_loop_of<Activation::kSquaredRelu, kBwd>();
    case Activation::kSwish:
      return row_loop_of<Activation::kSwish, kBwd>();
    case Activation::kSigmoid:
      return row_loop_of<Activation::kSigmoid, kBwd>();
    default:
      return row_loop_of<Activation::kSilu, kBwd>();
  }
}

// A part of a row as floats, with the bias added: where it lies, or in `values`.
APEX_TE_INLINE const float* read_row(const RowDType& dtype, const void* matrix, int64_t offset,
                                     const float* bias, int64_t n, float* values) {
  if (dtype.is_float() && !bias) return static_cast<const float*>(matrix) + offset;
  dtype.widen(matrix, offset, n, values);
  if (bias)
    for (int64_t c = 0; c < n; ++c) values[c] += bias[c];
  return values;
}

// A part of a row of gates, or with `offset` F of ups, as floats: where it lies, or in `values`.
APEX_TE_INLINE const float* read_half(const Swiglu& p, const void* half, int64_t ld, int64_t offset,
                                      int64_t row, int64_t col, const float* bias, int64_t n,
                                      float* values) {
  if (!p.held_scales) return read_row(RowDType(p.dtype), half, row * ld + col, bias, n, values);
  decode_row<E4M3>(static_cast<const uint8_t*>(half) + row * ld + col, n, values);
  for (int64_t c = 0; c < n; ++c) {
    const float scale_inv = p.held_scales[(offset + col + c) / kBlock * p.held_ld + row];
    values[c] = to_float(from_float<BFloat16>(values[c] * scale_inv));
  }
  return values;
}
APEX_TE_INLINE const float* read_gate(const Swiglu& p, int64_t row, int64_t col, const float* bias,
                                      int64_t n, float* values) {
  return read_half(p, p.gate, p.gate_ld, 0, row, col, bias, n, values);
}
APEX_TE_INLINE const float* read_up(const Swiglu& p, int64_t row, int64_t col, const float* bias,
                                    int64_t n, float* values) {
  return read_half(p, p.up, p.up_ld, p.cols, row, col, bias, n, values);
}

}  // namespace apex_te
