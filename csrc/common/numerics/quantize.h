// Arguments of quantizers with one scale for the tensor: the matrix and its FP8 data.
#pragma once

#include "common/numerics/columnwise.h"

namespace apex_te {

// Partial amaxes of a tensor at most; the size of the workspace in floats.
constexpr int64_t kMaxAmaxes = 1024;

struct Quantize {
  TensorView x;
  int64_t rows, cols;
  DType codes;  // dtype of the outputs
  uint8_t *rowwise, *columnwise;
  int64_t ld;  // row length of columnwise, which may be padded
};

inline TensorView check_quantize_input(const TensorView& x) {
  return x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
}

// Reads rowwise and columnwise, in this order.
inline Quantize check_quantize(Args& args, const TensorView& x,
                               std::initializer_list<DType> code_dtypes) {
  Quantize p;
  p.x = check_quantize_input(x);
  p.rows = x.size(0);
  p.cols = x.size(1);
  const TensorView rowwise = args.optional_tensor();
  const TensorView columnwise = args.optional_tensor();
  if (rowwise) rowwise.has_dtype(code_dtypes).has_shape({p.rows, p.cols}).is_dense();
  p.ld = columnwise ? check_columnwise(columnwise.has_dtype(code_dtypes), p.cols, p.rows) : p.rows;
  if (rowwise && columnwise) columnwise.has_dtype({rowwise.dtype()});
  if (!rowwise && !columnwise)
    fail(kApexTeValueError, "%s: rowwise or columnwise must be given, got None for both",
         args.name());
  p.codes = rowwise ? rowwise.dtype() : columnwise.dtype();
  p.rowwise = rowwise.data<uint8_t>();
  p.columnwise = columnwise.data<uint8_t>();
  return p;
}

inline float* float_scalar(const TensorView& tensor) {
  return tensor ? tensor.is_scalar(DType::kFloat32).data<float>() : nullptr;
}

inline uint32_t* check_amaxes(const TensorView& workspace) {
  workspace.has_dtype({DType::kFloat32}).has_shape({kMaxAmaxes}).is_dense();
  return workspace.data<uint32_t>();
}

}  // namespace apex_te
