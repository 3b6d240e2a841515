// Block scaling of groups of rows and of their weights; see grouped_quantize.h.
#pragma once

#include "common/numerics/block_cast.h"
#include "grouped_quantize/grouped_quantize.h"

namespace apex_te {

// rows and cols are those of x, or of each matrix; pointers, those of all groups.
struct GroupedBlocks : BlockCast {
  DType dtype;
  const void* x;
  Matrices matrices;
  Table table;
};

// The lines of columnwise scales begin with those of a group whose columns begin at `column`, one
// for each 128 columns: there is room for all, and at most one between two groups is unused.
APEX_TE_HD int64_t first_line(int64_t column, int group) { return column / kBlock + group; }

inline void check_grouped_codes(GroupedBlocks* p, const TensorView& rowwise,
                                const TensorView& row_scales, const TensorView& columnwise,
                                const TensorView& column_scales) {
  const int64_t groups = p->table.groups, rows = p->rows, cols = p->cols;
  for (const TensorView& out : {rowwise, columnwise})
    if (out) out.has_dtype({DType::kE4M3, DType::kE5M2}).is_dense();
  for (const TensorView& out : {row_scales, column_scales})
    if (out) out.has_dtype({DType::kFloat32}).is_dense();
  if (rowwise && columnwise) columnwise.has_dtype({rowwise.dtype()});
  p->rowwise_rows = p->columnwise_ld = rows;
  p->row_line = padded_to_4(rows);
  if (p->matrices) {
    if (rowwise) {
      rowwise.has_shape({groups, rows, cols});
      row_scales.has_shape({groups, num_blocks(rows), padded_to_4(num_blocks(cols))});
    }
    if (columnwise) {
      columnwise.has_shape({groups, cols, rows});
      column_scales.has_shape({groups, num_blocks(cols), padded_to_4(num_blocks(rows))});
    }
  } else {
    p->columnwise_ld = (rows + kGroupAlign - 1) / kGroupAlign * kGroupAlign + groups * kGroupAlign;
    if (rowwise) {
      rowwise.has_shape({rows, cols});
      row_scales.has_shape({num_blocks(cols), p->row_line});
    }
    if (columnwise) {
      columnwise.has_shape({cols, p->columnwise_ld});
      column_scales.has_shape({p->columnwise_ld / kBlock + groups, padded_to_4(cols)});
    }
  }
}

// Reads the outputs, columnwise_block_rows (of rows), eps and scales: p has the elements' dtype,
// rows, cols and table.
inline void check_block_outputs(Args& args, GroupedBlocks& p) {
  const TensorView rowwise = args.optional_tensor(), row_scales = args.optional_tensor();
  const TensorView columnwise = args.optional_tensor(), column_scales = args.optional_tensor();
  if (!rowwise != !row_scales || !columnwise != !column_scales || !(rowwise || columnwise))
    fail(kApexTeValueError, "%s: rowwise or columnwise must be given, and each with its scale_inv",
         args.name());
  check_grouped_codes(&p, rowwise, row_scales, columnwise, column_scales);
  p.fp8 = rowwise ? rowwise.dtype() : columnwise.dtype();
  p.columnwise_block_rows = p.matrices ? kBlock : check_block_rows(args);
  p.repeats_scales = !p.matrices;
  p.rule = check_block_rule(args, p.fp8, p.dtype);
  p.rowwise = rowwise.data<uint8_t>();
  p.rowwise_scale_inv = row_scales.data<float>();
  p.columnwise = columnwise.data<uint8_t>();
  p.columnwise_scale_inv = column_scales.data<float>();
}

inline GroupedBlocks check_grouped_blocks(Args& args, bool of_matrices) {
  GroupedBlocks p = {};
  if (of_matrices) {
    check_matrices(args, &p, kBlock);
  } else {
    const TensorView x = args.tensor();
    x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
    p.dtype = x.dtype();
    p.rows = x.size(0);
    p.cols = x.size(1);
    p.x = x.data<void>();
    p.table = check_table(args, args.tensor(), -1, p.rows);
  }
  check_block_outputs(args, p);
  return p;
}

}  // namespace apex_te
