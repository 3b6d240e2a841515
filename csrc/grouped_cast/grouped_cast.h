// grouped_cast: grouped_quantize's casts of groups of rows that are computed where they are cast,
// instead of written and read.
//
// The elements [rows, cols] are one of
// - a gather, x[row_of[r]] of x [tokens, cols]: zeros where row_of is -1, NaN where it is another
//   value that is not a row;
// - gated rows, act(gate) * up of x [rows, 2 cols], gates then ups;
// - their gradient, dgate then dup of x [rows, cols], for grad [rows, cols / 2].
// With `interleaved` gates and ups alternate in x, its bias and the gradient; the kernels take it
// with swish and a bias alone. bias[g] is first added to the rows of x of group g, and the sum is
// rounded, as grouped_finish does. factor[r] multiplies the elements of the first two, and grad of
// the third, in fp32. An element is rounded to x's dtype once, before its amax is taken: the casts
// are those of the rounded matrix. partials[t, r] is the sum of grad * act(gate) * up over the
// columns from 128 t to 128 t + 127 of row r: over all t, the gradient of factor[r]. lines[i] are
// the column sums in fp32 of the rounded rows that have the columns from 16 i to 16 i + 15 in
// columnwise codes: over all lines of a group, the gradient of bias[g]. Lines of no row are not
// written.
//
// The kernels take vectors: 16-byte addresses and multiples of 8 columns (of each half), and for
// gated rows a 16-bit dtype. The Python side composes the ops for all else, and on the CPU.
#pragma once

#include "grouped_quantize/grouped_quantize_blocks.h"
#include "swiglu/swiglu.h"

APEX_TE_FUNCTION(
    grouped_cast,
    "x: Tensor, grad: Tensor?, row_of: i32[r]?, factor: f32[r]?, bias: Tensor?, "
    "partials: Tensor!?, lines: Tensor!?, activation: int, limit: float, "
    "alpha: float, offset: float, interleaved: bool, table: i32[table(g)], scale: f32[g], "
    "scale_inv: f32[g]!!, "
    "rowwise: F[r c]!?, columnwise: F[c columns(r g)]!?, row_scale_inv: f32[r]!?, "
    "amax: f32[g]!!?, due: i32[g]?, inverse_given: bool",
    "cuda")
APEX_TE_IN_PLACE(grouped_cast, "amax: scale")
APEX_TE_FUNCTION(
    grouped_block_cast,
    "x: Tensor, grad: Tensor?, row_of: i32[r]?, factor: f32[r]?, bias: Tensor?, "
    "partials: Tensor!?, lines: Tensor!?, activation: int, limit: float, "
    "alpha: float, offset: float, interleaved: bool, table: i32[table(g)], rowwise: F[r c]!?, "
    "rowwise_scale_inv: f32[c/128 r%4]!?rowwise, columnwise: F[c columns(r g)]!?, "
    "columnwise_scale_inv: f32[column_lines(r g) c%4]!?columnwise, columnwise_block_rows: int, "
    "eps: float, scales: int",
    "cuda")

namespace apex_te {

// Where elements come from; what a call does not have is null.
struct Produced {
  DType dtype;
  int64_t rows, cols;  // of the elements
  const void *x, *grad;
  const int32_t* row_of;
  int64_t tokens;  // rows of x
  const float* factor;
  const void* bias;
  float* partials;
  float* lines;
  int64_t num_lines;
  Activation activation;
  Clamp clamp;
  bool interleaved;
};

// The bias and lines, whose extents the table gives, are left to check_group_biases.
inline Produced check_produced(Args& args, TensorView& bias, TensorView& lines) {
  Produced p = {};
  const TensorView x = args.tensor(), grad = args.optional_tensor();
  const TensorView row_of = args.optional_tensor(), factor = args.optional_tensor();
  bias = args.optional_tensor();
  const TensorView partials = args.optional_tensor();
  lines = args.optional_tensor();
  p.activation = check_gated_activation(args, p.clamp);
  p.interleaved = args.boolean();
  x.has_ndim(2).is_dense();
  if (row_of) {
    x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
    row_of.has_dtype({DType::kInt32}).has_ndim(1).is_dense();
    if (grad) grad.refuse(kApexTeValueError, "be None with row_of", "a tensor");
    if (bias) bias.refuse(kApexTeValueError, "be None with row_of", "a tensor");
    p.rows = row_of.size(0);
    p.cols = x.size(1);
  } else {
    x.has_dtype({DType::kFloat16, DType::kBFloat16});
    const int64_t half = x.size(1) / 2;
    x.has_shape({x.size(0), 2 * half});
    p.rows = x.size(0);
    p.cols = grad ? 2 * half : half;
    if (grad) grad.has_dtype({x.dtype()}).has_shape({p.rows, half}).is_dense();
  }
  if (factor) factor.has_dtype({DType::kFloat32}).has_shape({p.rows}).is_dense();
  if (partials) {
    if (!grad) partials.refuse(kApexTeValueError, "be None without grad", "a tensor");
    partials.has_dtype({DType::kFloat32}).has_shape({num_blocks(p.cols / 2), p.rows}).is_dense();
  }
  p.dtype = x.dtype();
  p.x = x.data<void>();
  p.grad = grad.data<void>();
  p.row_of = row_of.data<const int32_t>();
  p.tokens = x.size(0);
  p.factor = factor.data<const float>();
  p.partials = partials.data<float>();
  return p;
}

inline void check_group_biases(const Args& args, Produced& p, const TensorView& bias,
                               const TensorView& lines, int64_t groups) {
  const int64_t width = (p.grad ? 1 : 2) * p.cols;
  if (bias) bias.has_dtype({p.dtype}).has_shape({groups, width}).is_dense();
  if (lines) {
    if (!p.grad || !bias)
      lines.refuse(kApexTeValueError, "be None without grad and bias", "a tensor");
    p.num_lines = (p.rows + kGroupAlign - 1) / kGroupAlign + groups;
    lines.has_dtype({DType::kFloat32}).has_shape({p.num_lines, width}).is_dense();
  }
  if (p.interleaved && !(bias && p.activation == Activation::kSwish))
    fail(kApexTeUnsupported, "%s: activation must be 7, and bias given, with interleaved, got %d",
         args.name(), static_cast<int>(p.activation));
  p.bias = bias.data<void>();
  p.lines = lines.data<float>();
}

// A call of either function; of the two casts it has one.
struct GroupedCast {
  Produced from;
  bool in_blocks;
  GroupedQuantize groups;
  GroupedBlocks blocks;
};

inline GroupedCast check_grouped_cast(Args& args, bool in_blocks) {
  GroupedCast p = {};
  TensorView bias, lines;
  p.from = check_produced(args, bias, lines);
  p.in_blocks = in_blocks;
  const auto fill = [&](auto& cast) {
    cast.dtype = p.from.dtype;
    cast.rows = p.from.rows;
    cast.cols = p.from.cols;
  };
  if (!in_blocks) {
    fill(p.groups);
    check_group_outputs(args, p.groups);
    check_group_biases(args, p.from, bias, lines, p.groups.table.groups);
    return p;
  }
  fill(p.blocks);
  p.blocks.x = p.from.x;
  p.blocks.table = check_table(args, args.tensor(), -1, p.from.rows);
  check_block_outputs(args, p.blocks);
  check_group_biases(args, p.from, bias, lines, p.blocks.table.groups);
  if (p.from.grad && p.from.cols % (2 * kBlock))
    fail(kApexTeValueError, "%s: grad must have a multiple of 128 columns, got %lld", args.name(),
         static_cast<long long>(p.from.cols / 2));
  return p;
}

}  // namespace apex_te
