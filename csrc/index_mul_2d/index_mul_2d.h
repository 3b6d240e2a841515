// index_mul_2d: out = in1[index] * in2, rows of one matrix that an index picks times those of
// another, and the gradients of both.
//
// din1[index] += dout * in2 adds a row's products in the order of their places, in fp32, and din2 =
// dout * in1[index]. The places come sorted by their index. A row whose index lies outside in1 is
// an error on the CPU; on the GPU its result is NaN and it adds nothing.
#pragma once

#include "common/abi/op.h"
#include "common/numerics/codec.h"

// Places of one task. Sums over parts of a row's places are added in order.
constexpr int64_t kIndexMulChunk = 32;

// out = in1[index] * in2, plus more1[index] * more2 where they are given.
APEX_TE_FUNCTION(index_mul_2d_fwd,
                 "in1: T[m d], in2: T[e d], index: i64[e], more1: T[m d]?, more2: T[e d]?more1, "
                 "out: T[e d]!")
APEX_TE_IN_PLACE(index_mul_2d_fwd, "out: in2, out: more2")
// keys: the sorted index; order: the places of the keys. A chunk's first sum in the workspace is of
// a row that began before it, its second of one that goes on behind it.
APEX_TE_FUNCTION(index_mul_2d_bwd,
                 "in1: T[m d], in2: T[e d], dout: T[e d], keys: i32[e], order: i64[e], "
                 "din1: T[m d]!!, din2: T[e d]!, workspace: f32[e/32 2 d]!")

namespace apex_te {

struct IndexMul {
  DType dtype;
  int64_t rows, places, cols;  // of in1, of in2, of both
  const void *in1, *in2, *more1, *more2, *dout;
  const int64_t *index, *order;
  const int32_t* keys;
  void *out, *din1, *din2;
  float* workspace;

  APEX_TE_HD bool has_row(int64_t row) const { return row >= 0 && row < rows; }
  APEX_TE_HD int64_t chunks() const { return (places + kIndexMulChunk - 1) / kIndexMulChunk; }
};

inline const void* check_rows(const TensorView& t, const IndexMul& p, int64_t rows) {
  if (t) t.has_dtype({p.dtype}).has_shape({rows, p.cols}).is_dense();
  return t.data();
}

inline IndexMul check_matrices(const TensorView& in1, const TensorView& in2) {
  IndexMul p = {};
  in1.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.dtype = in1.dtype();
  p.rows = in1.size(0);
  p.cols = in1.size(1);
  in2.has_ndim(2);
  p.places = in2.size(0);
  p.in1 = in1.data();
  p.in2 = check_rows(in2, p, p.places);
  return p;
}

inline IndexMul check_index_mul_2d_fwd(Args& args) {
  const TensorView in1 = args.tensor(), in2 = args.tensor(), index = args.tensor();
  const TensorView more1 = args.optional_tensor(), more2 = args.optional_tensor();
  const TensorView out = args.tensor();
  IndexMul p = check_matrices(in1, in2);
  index.has_dtype({DType::kInt64}).has_shape({p.places}).is_dense();
  if (bool(more1) != bool(more2))
    fail(kApexTeValueError, "%s: more2 must be given with more1, got one of them", args.name());
  p.index = index.data<int64_t>();
  p.more1 = check_rows(more1, p, p.rows);
  p.more2 = check_rows(more2, p, p.places);
  check_rows(out, p, p.places);
  p.out = out.data();
  return p;
}

inline IndexMul check_index_mul_2d_bwd(Args& args) {
  const TensorView in1 = args.tensor(), in2 = args.tensor(), dout = args.tensor();
  const TensorView keys = args.tensor(), order = args.tensor();
  const TensorView din1 = args.tensor(), din2 = args.tensor(), workspace = args.tensor();
  IndexMul p = check_matrices(in1, in2);
  p.dout = check_rows(dout, p, p.places);
  keys.has_dtype({DType::kInt32}).has_shape({p.places}).is_dense();
  order.has_dtype({DType::kInt64}).has_shape({p.places}).is_dense();
  if (p.rows > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "%s: in1 must have fewer than 2^31 rows, got %lld", args.name(),
         static_cast<long long>(p.rows));
  p.keys = keys.data<int32_t>();
  p.order = order.data<int64_t>();
  check_rows(din1, p, p.rows);
  check_rows(din2, p, p.places);
  p.din1 = din1.data();
  p.din2 = din2.data();
  workspace.has_dtype({DType::kFloat32}).has_shape({p.chunks(), 2, p.cols}).is_dense();
  p.workspace = workspace.data<float>();
  return p;
}

}  // namespace apex_te
