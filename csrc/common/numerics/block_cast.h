// What a cast in blocks of 1 x 128 or 128 x 128 writes, for ops that cast a matrix or compute what
// they cast: rowwise and columnwise FP8 data with their scales, and the matrix's amax.
//
// The columnwise copy may be padded (common/numerics/columnwise.h). The rowwise copy of 1 x 128
// blocks may have as many rows as its scales, a multiple of 4, of which those beyond the matrix
// become zeros: cuBLASLt multiplies that many. Beside it the columnwise copy may have blocks of
// 128 x 128: cuBLASLt multiplies those faster, and one 1 x 128 operand is enough for it.
#pragma once

#include "common/numerics/block_rule.h"
#include "common/numerics/block_scale.h"
#include "common/numerics/columnwise.h"

namespace apex_te {

// Plain data, so kernels take it whole; what a call does not ask for is null.
struct BlockCast {
  int64_t rows, cols;                   // of the matrix
  DType fp8;                            // kOther when only amax is wanted
  int64_t rowwise_rows, columnwise_ld;  // rows of rowwise, row length of columnwise
  uint8_t *rowwise, *columnwise;
  float *rowwise_scale_inv, *columnwise_scale_inv, *amax;
  int64_t block_rows, columnwise_block_rows;
  BlockRule rule;
  // Blocks of 1 x 128: the distance of lines of rowwise scales, and how many of one are written.
  int64_t row_line, row_scales;
  // A columnwise block of 128 x 128 has its scale at each of the matrix's columns.
  bool repeats_scales;
};

// Checks the rowwise copy and returns how many rows it has.
inline int64_t check_rowwise(const TensorView& rowwise, int64_t rows, int64_t cols,
                             int64_t block_rows) {
  const bool is_padded =
      block_rows == 1 && rowwise.ndim() == 2 && rowwise.size(0) == padded_to_4(rows);
  if (is_padded) rows = padded_to_4(rows);
  rowwise.has_shape({rows, cols}).is_dense();
  return rows;
}

// The arguments of a cast that tell its blocks; others have 1 row.
enum class BlockArguments { kNone, kColumnwise, kBoth };

// Reads rowwise, rowwise_scale_inv, columnwise, columnwise_scale_inv, amax, block_rows,
// columnwise_block_rows, eps and scales. dtype: of the matrix [rows, cols].
inline BlockCast check_block_cast(Args& args, DType dtype, int64_t rows, int64_t cols,
                                  BlockArguments blocks = BlockArguments::kBoth) {
  BlockCast p = {};
  p.rows = rows;
  p.cols = cols;
  const TensorView rowwise = args.optional_tensor();
  const TensorView rowwise_scales = args.optional_tensor();
  const TensorView columnwise = args.optional_tensor();
  const TensorView transposed_scales = args.optional_tensor();
  const TensorView amax = args.optional_tensor();
  p.block_rows = blocks == BlockArguments::kBoth ? check_block_rows(args) : 1;
  p.columnwise_block_rows = blocks != BlockArguments::kNone ? check_block_rows(args) : 1;
  if (p.columnwise_block_rows < p.block_rows)
    fail(kApexTeValueError,
         "%s: columnwise_block_rows must be 128 where block_rows is, got 1: blocks of 128 x 128 "
         "are those of both copies",
         args.name());
  p.fp8 = rowwise ? rowwise.dtype() : columnwise ? columnwise.dtype() : DType::kOther;
  p.rule = check_block_rule(args, p.fp8, dtype);
  if (!rowwise != !rowwise_scales || !columnwise != !transposed_scales)
    fail(kApexTeValueError, "%s: each of rowwise and columnwise must be given with its scale_inv",
         args.name());
  p.rowwise_rows = p.columnwise_ld = p.rows;
  p.row_line = p.row_scales = padded_to_4(p.rows);
  if (rowwise) {
    rowwise.has_dtype({DType::kE4M3, DType::kE5M2});
    p.rowwise_rows = check_rowwise(rowwise, p.rows, p.cols, p.block_rows);
    check_block_scales(rowwise_scales, p.rows, p.cols, p.block_rows);
  }
  if (columnwise) {
    columnwise.has_dtype({DType::kE4M3, DType::kE5M2});
    p.columnwise_ld = check_columnwise(columnwise, p.cols, p.rows);
    check_block_scales(transposed_scales, p.cols, p.rows, p.columnwise_block_rows);
  }
  if (rowwise && columnwise) columnwise.has_dtype({p.fp8});
  if (amax) amax.is_scalar(DType::kFloat32);
  p.rowwise = rowwise.data<uint8_t>();
  p.columnwise = columnwise.data<uint8_t>();
  p.rowwise_scale_inv = rowwise_scales.data<float>();
  p.columnwise_scale_inv = transposed_scales.data<float>();
  p.amax = amax.data<float>();
  return p;
}

}  // namespace apex_te
