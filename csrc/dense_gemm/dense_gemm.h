// dense_gemm: out[M, N] = (a[M, K] . b[N, K]^T) * a_scale_inv * b_scale_inv (+ bias[N]) (+ c[M, N])
// of FP8 codes, on sm_90.
//
// Both operands are row-major with K contiguous. fprop: x . w; dgrad: dy . w transposed; wgrad:
// dy transposed . x transposed.
#pragma once

#include "common/activation/functions.h"
#include "common/numerics/block_scale.h"
#include "common/numerics/columnwise.h"
#include "common/numerics/fp8_formats.h"

// c is residual, bfloat16, or with accumulate what out holds. `promotion` is the number of products
// of which sums are kept in the matrix units before they are added up in float32: 128, 256 or 512;
// 0: all of K. `columns` and `strip` choose tiles: their width, 0 for what suits the shape, and how
// many of a row are worked on at once. `cache`: sum of what the L2 cache keeps longer than
// usual, 1: a, 2: b, and less long, 4: what is written, 8: hidden.
APEX_TE_FUNCTION(dense_gemm,
                 "a: A=F[m k], b: B=F[n k], a_scale_inv: f32[1], b_scale_inv: f32[1], "
                 "out: bf16|f32[m n]!!, bias: bf16[n]?, residual: bf16[m n]?, accumulate: bool, "
                 "promotion: int, columns: int, strip: int, cache: int",
                 "cuda")
APEX_TE_IN_PLACE(dense_gemm, "out: residual")

// Products of a gated MLP together with the activation. The columns of hidden are all gates, then
// all ups.
//
// dense_gemm_swiglu: hidden = a . b^T as above, and of act(gate) * up of its rounded values, in
// float32, FP8 data act = satcast_rne(y * scale), and amax = max(amax, max |y|). Without scale:
// only amax.
//
// dense_gemm_swiglu_held: the same with hidden as block_quantize makes it of the rounded values: in
// E4M3, with scales of blocks of 1x128 that are powers of two. N is a multiple of 256.
//
// dense_gemm_swiglu_bwd: the gradient of that activation from grad = a . b^T, rounded to bfloat16,
// and hidden: FP8 data rowwise and columnwise [2 N, ld], where ld is a multiple of 16 and zeros
// follow the last row. Without scale: grad and amax instead. act_columnwise [N, ld]: the
// activation's FP8 data once more, with the forward's scale. scale_inv receives 1 / scale.
//
// dense_gemm_swiglu_held_bwd: the same with hidden in E4M3, with scales of blocks of 1x128; its
// values are rounded to bfloat16.
//
// Products of an MLP with GELU in its tanh form, likewise. Where dense_gemm_gelu_bwd is given
// dbias, it receives the column sums of the gradient of hidden before its cast, in lines of 32 rows
// whose sums lie in the workspace.
APEX_TE_FUNCTION(dense_gemm_swiglu,
                 "a: e4m3[m k], b: e4m3[n k], a_scale_inv: f32[1], b_scale_inv: f32[1], "
                 "hidden: bf16[m n]!, bias: bf16[n]?, scale: f32[1]?, act: e4m3[m n/2]!?, "
                 "amax: f32[1]!!?, scale_inv: f32[1]!?, activation: int, strip: int, cache: int",
                 "cuda")
APEX_TE_FUNCTION(dense_gemm_swiglu_held,
                 "a: e4m3[m k], b: e4m3[n k], a_scale_inv: f32[1], b_scale_inv: f32[1], "
                 "hidden: e4m3[m n]!, hidden_scale_inv: f32[n/128 m%4]!, bias: bf16[n]?, "
                 "scale: f32[1], act: e4m3[m n/2]!, amax: f32[1]!!?, scale_inv: f32[1]!?, "
                 "activation: int, strip: int, cache: int",
                 "cuda")
APEX_TE_FUNCTION(
    dense_gemm_swiglu_bwd,
    "a: F[m k], b: e4m3[n k], a_scale_inv: f32[1], b_scale_inv: f32[1], hidden: bf16[m 2n], "
    "scale: f32[1]?, grad: bf16[m n]!?, rowwise: F[m 2n]!?, columnwise: F[2n m%16]!?, "
    "amax: f32[1]!!?, scale_inv: f32[1]!?, act_scale: f32[1]?, act_columnwise: e4m3[n m%16]!?, "
    "activation: int, promotion: int, strip: int, cache: int",
    "cuda")
APEX_TE_FUNCTION(
    dense_gemm_swiglu_held_bwd,
    "a: F[m k], b: e4m3[n k], a_scale_inv: f32[1], b_scale_inv: f32[1], hidden: e4m3[m 2n], "
    "hidden_scale_inv: f32[2n/128 m%4], scale: f32[1]?, grad: bf16[m n]!?, rowwise: F[m 2n]!?, "
    "columnwise: F[2n m%16]!?, amax: f32[1]!!?, scale_inv: f32[1]!?, act_scale: f32[1]?, "
    "act_columnwise: e4m3[n m%16]!?, activation: int, promotion: int, strip: int, cache: int",
    "cuda")
APEX_TE_FUNCTION(dense_gemm_gelu,
                 "a: e4m3[m k], b: e4m3[n k], a_scale_inv: f32[1], b_scale_inv: f32[1], "
                 "hidden: bf16[m n]!, bias: bf16[n]?, scale: f32[1], act: e4m3[m n]!, "
                 "amax: f32[1]!!?, scale_inv: f32[1]!?, strip: int, cache: int",
                 "cuda")
APEX_TE_FUNCTION(dense_gemm_gelu_bwd,
                 "a: F[m k], b: e4m3[n k], a_scale_inv: f32[1], b_scale_inv: f32[1], "
                 "hidden: bf16[m n], scale: f32[1], rowwise: F[m n]!, columnwise: F[n m%16]!?, "
                 "amax: f32[1]!!?, scale_inv: f32[1]!?, act_scale: f32[1]?, "
                 "act_columnwise: e4m3[n m%16]!?, dbias: bf16[+ n]!?, "
                 "workspace: f32[m/32 n]!?dbias, promotion: int, strip: int, cache: int",
                 "cuda")

namespace apex_te {

// Outputs of an activation come in such groups: rows of its FP8 data begin at multiples of 16
// bytes.
constexpr int64_t kGatedGroup = 16;

// Rows that one line of the dbias workspace sums.
constexpr int kSumRows = 32;

// Of `cache`.
constexpr int64_t kKeepA = 1, kKeepB = 2, kStreamResults = 4, kStreamHidden = 8;

struct DenseGemm {
  DType a_type, b_type;
  const uint8_t *a, *b;
  const float *a_scale_inv, *b_scale_inv;
  uint16_t* out;            // bfloat16, or null
  float* wide_out;          // else
  const uint16_t* bias;     // bfloat16, or null
  const uint16_t* added;    // bfloat16, or null
  const float* wide_added;  // or null
  int64_t m, n, k;
  int64_t promotion, columns, strip, cache;
};

inline void check_aligned(const Args& args, const char* name, const void* data) {
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0)
    fail(kApexTeValueError, "%s: %s must begin at a multiple of 16 bytes, got another address",
         args.name(), name);
}

inline void check_multiple(const Args& args, const char* what, int64_t extent, int64_t of) {
  if (extent % of != 0)
    fail(kApexTeUnsupported, "%s: %s must be a multiple of %lld, got %lld", args.name(), what,
         static_cast<long long>(of), static_cast<long long>(extent));
}

inline void check_choices(const Args& args, const DenseGemm& g) {
  if (g.promotion != 0 && g.promotion != 128 && g.promotion != 256 && g.promotion != 512)
    fail(kApexTeValueError, "%s: promotion must be 0, 128, 256 or 512, got %lld", args.name(),
         static_cast<long long>(g.promotion));
  if (g.strip < 0 || g.strip > 1024)
    fail(kApexTeValueError, "%s: strip must be from 0 to 1024, got %lld", args.name(),
         static_cast<long long>(g.strip));
  if (g.cache < 0 || g.cache > 15)
    fail(kApexTeValueError, "%s: cache must be from 0 to 15, got %lld", args.name(),
         static_cast<long long>(g.cache));
}

inline DenseGemm check_dense_gemm(Args& args) {
  DenseGemm g{};
  const TensorView a = args.tensor(), b = args.tensor();
  const TensorView a_scale = args.tensor(), b_scale = args.tensor(), out = args.tensor();
  const TensorView bias = args.optional_tensor(), residual = args.optional_tensor();
  const bool accumulate = args.boolean();
  g.promotion = args.integer();
  g.columns = args.integer();
  g.strip = args.integer();
  g.cache = args.integer();
  a.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(2).is_dense();
  b.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(2);
  g.m = a.size(0);
  g.k = a.size(1);
  g.n = b.size(0);
  b.has_shape({g.n, g.k}).is_dense();
  if (is_e5m2(a.dtype()) && is_e5m2(b.dtype()))
    fail(kApexTeUnsupported,
         "%s: one of a and b must have dtype float8_e4m3fn, got float8_e5m2 twice", args.name());
  out.has_dtype({DType::kBFloat16, DType::kFloat32}).has_shape({g.m, g.n}).is_dense();
  if (bias) bias.has_dtype({DType::kBFloat16}).has_shape({g.n}).is_dense();
  if (residual) residual.has_dtype({DType::kBFloat16}).has_shape({g.m, g.n}).is_dense();
  if (residual && accumulate)
    fail(kApexTeValueError, "%s: accumulate must be false with residual, got true", args.name());
  check_choices(args, g);
  check_multiple(args, "K", g.k, 16);  // rows of a and b are copied 16 bytes at a time
  check_multiple(args, "N", g.n, 8);   // and rows of out written
  g.a_type = a.dtype();
  g.b_type = b.dtype();
  g.a = a.data<const uint8_t>();
  g.b = b.data<const uint8_t>();
  g.a_scale_inv = a_scale.is_scalar(DType::kFloat32).data<const float>();
  g.b_scale_inv = b_scale.is_scalar(DType::kFloat32).data<const float>();
  const bool is_wide = out.dtype() == DType::kFloat32;
  g.out = is_wide ? nullptr : out.data<uint16_t>();
  g.wide_out = is_wide ? out.data<float>() : nullptr;
  g.bias = bias ? bias.data<const uint16_t>() : nullptr;
  g.added = residual ? residual.data<const uint16_t>() : accumulate ? g.out : nullptr;
  g.wide_added = accumulate ? g.wide_out : nullptr;
  check_aligned(args, "a", g.a);
  check_aligned(args, "b", g.b);
  check_aligned(args, "out", out.data());
  if (residual) check_aligned(args, "residual", g.added);
  return g;
}

// What the epilogues of products with an activation have beside the product.
struct Gated {
  Activation activation;
  const float* scale;
  float *amax, *scale_inv;  // or null
  uint8_t* act;             // or null
  const uint16_t* hidden;
  uint8_t* held;       // or in E4M3, in place of hidden or of what the product makes
  float* held_scales;  // [columns / 128, held_ld]
  int64_t held_ld;
  uint16_t* grad;                 // or, in its place, the next two
  uint8_t *rowwise, *columnwise;  // columnwise: or null
  const float* act_scale;
  uint8_t* act_columnwise;  // or null
  int64_t ld;               // row length of both columnwise copies
  float* sums;              // [M / kSumRows, N], or null
  void* dbias;              // or null
};

struct GatedProduct {
  DenseGemm g;
  Gated gated;
};

inline void check_gated_activation(const Args& args, Gated& gated, int64_t activation) {
  gated.activation = static_cast<Activation>(activation);
  if (gated.activation != Activation::kSilu)
    fail(kApexTeUnsupported, "%s: activation must be 5, got %lld", args.name(),
         static_cast<long long>(activation));
}

inline void check_gated_operands(Args& args, DenseGemm& g, DType b_type) {
  const TensorView a = args.tensor(), b = args.tensor();
  const TensorView a_scale = args.tensor(), b_scale = args.tensor();
  a.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(2).is_dense();
  b.has_dtype({b_type}).has_ndim(2);
  g.m = a.size(0);
  g.k = a.size(1);
  g.n = b.size(0);
  b.has_shape({g.n, g.k}).is_dense();
  check_multiple(args, "K", g.k, 16);
  g.a_type = a.dtype();
  g.b_type = b.dtype();
  g.a = a.data<const uint8_t>();
  g.b = b.data<const uint8_t>();
  g.a_scale_inv = a_scale.is_scalar(DType::kFloat32).data<const float>();
  g.b_scale_inv = b_scale.is_scalar(DType::kFloat32).data<const float>();
  check_aligned(args, "a", g.a);
  check_aligned(args, "b", g.b);
}

inline void check_given(const Args& args, const char* name, const void* data, const char* with,
                        const void* other) {
  if (other && !data)
    fail(kApexTeValueError, "%s: %s must be given with %s, got None", args.name(), name, with);
}

inline float* check_float(const TensorView& x) {
  return x ? x.is_scalar(DType::kFloat32).data<float>() : nullptr;
}

// Reads hidden [M, columns] and, where it is held, its scales.
inline TensorView check_hidden(Args& args, GatedProduct& p, int64_t columns, bool is_held) {
  const TensorView hidden = args.tensor();
  hidden.has_dtype({is_held ? DType::kE4M3 : DType::kBFloat16}).has_shape({p.g.m, columns});
  check_aligned(args, "hidden", hidden.is_dense().data());
  if (!is_held) return hidden;
  Gated& gated = p.gated;
  gated.held = hidden.data<uint8_t>();
  gated.held_ld = padded_to_4(p.g.m);
  const TensorView scales = args.tensor();
  scales.has_dtype({DType::kFloat32}).has_shape({num_blocks(columns), gated.held_ld});
  gated.held_scales = scales.is_dense().data<float>();
  check_aligned(args, "hidden_scale_inv", gated.held_scales);
  return hidden;
}

// Without is_gated the activation is GELU.
inline GatedProduct check_gated(Args& args, bool is_held = false, bool is_gated = true) {
  GatedProduct p{};
  DenseGemm& g = p.g;
  check_gated_operands(args, g, DType::kE4M3);
  const int64_t width = is_gated ? 2 : 1;  // columns of hidden for each output
  check_multiple(args, "N", g.n, width * (is_held ? kBlock : kGatedGroup));
  const TensorView hidden = check_hidden(args, p, g.n, is_held);
  g.out = is_held ? nullptr : hidden.data<uint16_t>();
  const TensorView bias = args.optional_tensor();
  if (bias) bias.has_dtype({DType::kBFloat16}).has_shape({g.n}).is_dense();
  g.bias = bias.data<const uint16_t>();
  const auto read = [&] { return is_gated ? args.optional_tensor() : args.tensor(); };
  p.gated.scale = check_float(read());
  const TensorView act = read();
  if (act) act.has_dtype({DType::kE4M3}).has_shape({g.m, g.n / width}).is_dense();
  p.gated.act = act.data<uint8_t>();
  p.gated.amax = check_float(args.optional_tensor());
  p.gated.scale_inv = check_float(args.optional_tensor());
  check_given(args, "scale", p.gated.scale, "act", p.gated.act);
  check_given(args, "scale", p.gated.scale, "scale_inv", p.gated.scale_inv);
  if (is_gated) check_gated_activation(args, p.gated, args.integer());
  g.strip = args.integer();
  g.cache = args.integer();
  check_choices(args, g);
  if (g.a_type != DType::kE4M3)
    fail(kApexTeUnsupported, "%s: a must have dtype float8_e4m3fn, got float8_e5m2", args.name());
  check_aligned(args, "act", p.gated.act);
  return p;
}

// A columnwise copy whose rows are padded to 16, or null.
inline uint8_t* check_padded(const Args& args, const TensorView& x, DType dtype, int64_t cols,
                             const DenseGemm& g, int64_t* ld) {
  if (!x) return nullptr;
  *ld = check_columnwise(x.has_dtype({dtype}), cols, g.m);
  check_multiple(args, "the row length of columnwise copies", *ld, kColumnwiseMultiple);
  uint8_t* data = x.data<uint8_t>();
  check_aligned(args, "columnwise", data);
  return data;
}

inline void check_dbias(Args& args, GatedProduct& p) {
  const TensorView dbias = args.optional_tensor(), workspace = args.optional_tensor();
  if (!dbias) return;
  p.gated.dbias = dbias.has_dtype({DType::kBFloat16}).has_shape({p.g.n}).is_dense().data<void>();
  if (!workspace)
    fail(kApexTeValueError, "%s: workspace must be given with dbias, got None", args.name());
  workspace.has_dtype({DType::kFloat32}).has_shape({(p.g.m + kSumRows - 1) / kSumRows, p.g.n});
  p.gated.sums = workspace.is_dense().data<float>();
}

inline GatedProduct check_gated_bwd(Args& args, bool is_held = false, bool is_gated = true) {
  GatedProduct p{};
  DenseGemm& g = p.g;
  check_gated_operands(args, g, DType::kE4M3);
  check_multiple(args, "N", g.n, kGatedGroup);
  const int64_t columns = is_gated ? 2 * g.n : g.n;
  const TensorView hidden = check_hidden(args, p, columns, is_held);
  if (!is_held) p.gated.hidden = hidden.data<const uint16_t>();
  const auto read = [&] { return is_gated ? args.optional_tensor() : args.tensor(); };
  p.gated.scale = check_float(read());
  const TensorView grad = is_gated ? args.optional_tensor() : TensorView{};
  const TensorView rowwise = read(), columnwise = args.optional_tensor();
  if (is_gated && static_cast<bool>(grad) == static_cast<bool>(rowwise))
    fail(kApexTeValueError, "%s: one of grad and rowwise must be given, got %s", args.name(),
         grad ? "both" : "None twice");
  if (grad) grad.has_dtype({DType::kBFloat16}).has_shape({g.m, g.n}).is_dense();
  if (rowwise) rowwise.has_dtype({g.a_type}).has_shape({g.m, columns}).is_dense();
  p.gated.grad = grad.data<uint16_t>();
  p.gated.rowwise = rowwise.data<uint8_t>();
  p.gated.columnwise = check_padded(args, columnwise, g.a_type, columns, g, &p.gated.ld);
  p.gated.amax = check_float(args.optional_tensor());
  p.gated.scale_inv = check_float(args.optional_tensor());
  p.gated.act_scale = check_float(args.optional_tensor());
  const TensorView act = args.optional_tensor();
  p.gated.act_columnwise = check_padded(args, act, DType::kE4M3, g.n, g, &p.gated.ld);
  check_given(args, "scale", p.gated.scale, "rowwise", p.gated.rowwise);
  check_given(args, "scale", p.gated.scale, "scale_inv", p.gated.scale_inv);
  check_given(args, "rowwise", p.gated.rowwise, "columnwise", p.gated.columnwise);
  check_given(args, "act_scale", p.gated.act_scale, "act_columnwise", p.gated.act_columnwise);
  if (is_gated)
    check_gated_activation(args, p.gated, args.integer());
  else
    check_dbias(args, p);
  g.promotion = args.integer();
  g.strip = args.integer();
  g.cache = args.integer();
  check_choices(args, g);
  check_aligned(args, "rowwise", p.gated.rowwise);
  check_aligned(args, "grad", p.gated.grad);
  return p;
}

}  // namespace apex_te
