// rope: rotary position embedding, and its gradient, the rotation by the negative angle.
//
// The first rotary_dim of head_dim elements form pairs (i, i + rotary_dim / 2), or (2i, 2i + 1)
// where interleaved. A pair (a, b) at angle t becomes (a cos t - b sin t, b cos t + a sin t) in
// fp32, rounded once; the other elements are copied. A position outside the table gives NaN, a
// token of no sequence is rotated by 0. x and out have any strides but a dense last dimension; out
// may be x.
#pragma once

#include <cmath>

#include "common/abi/op.h"
#include "common/numerics/codec.h"

APEX_TE_FUNCTION(rope_fwd,
                 "x: T[*r h d], freqs: f32[p k]?, cos: f32[p k]?, sin: f32[cos]?cos, "
                 "starts: i32|i64[q]?, cu_seqlens: i32[bounds(q)]?, out: T[x]!, rotary_dim: int, "
                 "start: int, layout: int, interleaved: bool")
APEX_TE_IN_PLACE(rope_fwd, "out: x")
APEX_TE_FUNCTION(rope_bwd,
                 "x: T[*r h d], freqs: f32[p k]?, cos: f32[p k]?, sin: f32[cos]?cos, "
                 "starts: i32|i64[q]?, cu_seqlens: i32[bounds(q)]?, out: T[x]!, rotary_dim: int, "
                 "start: int, layout: int, interleaved: bool")
APEX_TE_IN_PLACE(rope_bwd, "out: x")

namespace apex_te {

enum RopeLayout : int64_t { kSbhd = 0, kBshd = 1, kThd = 2 };

// Rows of the head dimension are numbered (outer, inner, head); for thd outer is 1.
struct Rope {
  DType dtype;
  const void* x;
  void* out;
  int64_t outer, inner, heads, head_dim, rotary_dim;
  int64_t x_outer, x_inner, x_head, out_outer, out_inner, out_head;  // strides in elements
  const float *freqs, *cos, *sin;
  int64_t table_rows, table_cols;
  int64_t pair_step;  // columns from one pair's angle to the next
  const void* starts;
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t start;
  bool starts_are_int64, inner_is_token, interleaved;
  float sign;

  static constexpr int64_t kNoSequence = INT64_MIN;
  static constexpr int64_t kFar = int64_t{1} << 40;  // outside of any table; sums stay numbers

  // Row of the angle table that row (o, i) uses, perhaps outside the table.
  APEX_TE_HD int64_t position(int64_t o, int64_t i) const {
    int64_t sequence = inner_is_token ? o : i, token = inner_is_token ? i : o;
    if (cu_seqlens) {
      if (sequences == 0 || token < cu_seqlens[0] || token >= cu_seqlens[sequences])
        return kNoSequence;
      int64_t low = 0, high = sequences;  // cu_seqlens[low] <= token < cu_seqlens[high]
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (cu_seqlens[middle] <= token ? low : high) = middle;
      }
      sequence = low;
      token -= cu_seqlens[low];
    }
    if (starts) {
      const int64_t added = starts_are_int64 ? static_cast<const int64_t*>(starts)[sequence]
                                             : static_cast<const int32_t*>(starts)[sequence];
      if (added < -kFar || added > kFar) return -1;
      token += added;
    }
    return start + token;
  }
};

// cos, sin or freqs as Python gives them: a column for each element or for each pair.
inline void check_rope_table(const TensorView& table, int64_t rotary_dim) {
  table.has_dtype({DType::kFloat32}).has_ndim(2).is_dense();
  if (table.size(1) == rotary_dim || table.size(1) * 2 == rotary_dim) return;
  char expected[96], actual[32];
  snprintf(expected, sizeof(expected), "have rotary_dim = %lld or half as many columns",
           static_cast<long long>(rotary_dim));
  snprintf(actual, sizeof(actual), "%lld", static_cast<long long>(table.size(1)));
  table.refuse(kApexTeValueError, expected, actual);
}

// A tensor of rows of the head dimension; strides in the order (outer, inner, head).
inline void check_rope_rows(const TensorView& t, int64_t* outer, int64_t* inner, int64_t* head) {
  const int n = t.ndim();
  if (t.size(n - 1) > 1 && t.stride(n - 1) != 1 && t.numel())
    t.refuse(kApexTeValueError, "be dense in its last dimension", "another stride");
  *outer = n == 4 ? t.stride(0) : 0;
  *inner = t.stride(n - 3);
  *head = t.stride(n - 2);
}

inline void check_rope_tensors(const Args& args, const TensorView& x, const TensorView& out,
                               bool is_thd, Rope& p) {
  x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(is_thd ? 3 : 4);
  p.dtype = x.dtype();
  p.x = x.data();
  check_rope_rows(x, &p.x_outer, &p.x_inner, &p.x_head);
  const int n = x.ndim();
  p.outer = is_thd ? 1 : x.size(0);
  p.inner = x.size(n - 3);
  p.heads = x.size(n - 2);
  p.head_dim = x.size(n - 1);
  if (p.rotary_dim < 0 || p.rotary_dim > p.head_dim || p.rotary_dim % 2)
    fail(kApexTeValueError, "%s: rotary_dim must be even and from 0 to %lld, got %lld", args.name(),
         static_cast<long long>(p.head_dim), static_cast<long long>(p.rotary_dim));
  if (p.rotary_dim > 8192)
    fail(kApexTeUnsupported, "%s: rotary_dim must be at most 8192, got %lld", args.name(),
         static_cast<long long>(p.rotary_dim));

  out.has_dtype({p.dtype});
  is_thd ? out.has_shape({p.inner, p.heads, p.head_dim})
         : out.has_shape({p.outer, p.inner, p.heads, p.head_dim});
  check_rope_rows(out, &p.out_outer, &p.out_inner, &p.out_head);
  for (int i = 0; i < n; ++i)
    if (out.size(i) > 1 && out.stride(i) == 0)
      out.refuse(kApexTeValueError, "not overlap itself", "a stride of 0");
  p.out = out.data();
}

inline void check_rope_angles(const Args& args, const TensorView& freqs, const TensorView& cos,
                              const TensorView& sin, Rope& p) {
  if (bool(freqs) == bool(cos) || bool(cos) != bool(sin))
    fail(kApexTeValueError, "%s: freqs, or cos and sin, must be given", args.name());
  const TensorView& table = freqs ? freqs : cos;
  check_rope_table(table, p.rotary_dim);
  if (cos) sin.has_dtype({DType::kFloat32}).has_shape({cos.size(0), cos.size(1)}).is_dense();
  p.freqs = freqs.data<float>();
  p.cos = cos.data<float>();
  p.sin = sin.data<float>();
  p.table_rows = table.size(0);
  p.table_cols = table.size(1);
  p.pair_step = p.table_cols == p.rotary_dim && p.interleaved ? 2 : 1;
}

// Checks the first position, the positions of sequences and the bounds of packed sequences.
inline void check_rope_positions(const Args& args, const TensorView& starts,
                                 const TensorView& cu_seqlens, bool is_thd, Rope& p) {
  if (bool(cu_seqlens) != is_thd)
    fail(kApexTeValueError, "%s: cu_seqlens must be given with layout thd and with no other",
         args.name());
  p.sequences = p.inner_is_token ? p.outer : p.inner;
  if (cu_seqlens) {
    cu_seqlens.has_dtype({DType::kInt32}).has_ndim(1).is_dense();
    if (cu_seqlens.size(0) < 1)
      cu_seqlens.refuse(kApexTeValueError, "have batch + 1 elements", "none");
    p.sequences = cu_seqlens.size(0) - 1;
  }
  p.cu_seqlens = cu_seqlens.data<int32_t>();
  if (starts) starts.has_dtype({DType::kInt32, DType::kInt64}).has_shape({p.sequences}).is_dense();
  p.starts = starts.data();
  p.starts_are_int64 = starts && starts.dtype() == DType::kInt64;

  const int64_t tokens = p.inner_is_token ? p.inner : p.outer;
  const bool is_known = !starts && !cu_seqlens && tokens > 0;
  if (p.start < 0 || p.start > Rope::kFar ||
      (is_known && (p.start > p.table_rows || tokens > p.table_rows - p.start)))
    fail(kApexTeValueError,
         "%s: start must be at least 0 and leave %lld positions in a table of %lld, got %lld",
         args.name(), static_cast<long long>(is_known ? tokens : 0),
         static_cast<long long>(p.table_rows), static_cast<long long>(p.start));
}

inline Rope check_rope(Args& args, bool is_backward) {
  Rope p;
  const TensorView x = args.tensor();
  const TensorView freqs = args.optional_tensor(), cos = args.optional_tensor();
  const TensorView sin = args.optional_tensor(), starts = args.optional_tensor();
  const TensorView cu_seqlens = args.optional_tensor(), out = args.tensor();
  p.rotary_dim = args.integer();
  p.start = args.integer();
  const int64_t layout = args.integer();
  p.interleaved = args.boolean();
  p.sign = is_backward ? -1.0f : 1.0f;
  if (layout < kSbhd || layout > kThd)
    fail(kApexTeValueError, "%s: layout must be 0, 1 or 2, got %lld", args.name(),
         static_cast<long long>(layout));
  p.inner_is_token = layout != kSbhd;
  check_rope_tensors(args, x, out, layout == kThd, p);
  check_rope_angles(args, freqs, cos, sin, p);
  check_rope_positions(args, starts, cu_seqlens, layout == kThd, p);
  return p;
}

}  // namespace apex_te
