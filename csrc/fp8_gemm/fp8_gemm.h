// fp8_gemm: out[M, N] = (a[M, K] . b[N, K]^T) * a_scale_inv * b_scale_inv (+ c[M, N], bias[N],
// GELU).
//
// c has the dtype of out and is added in float32, before the one rounding of the sum.
// Both operands are row-major with K contiguous. fprop: x . w; dgrad: dy . w transposed; wgrad:
// dy transposed . x transposed. CUDA does all of it through cuBLASLt. On the CPU fp8_decode and
// fp8_gemm_epilogue stand around an fp32 product of the caller's.
#pragma once

#include "common/abi/op.h"
#include "common/numerics/block_scale.h"
#include "common/numerics/fp8_formats.h"

APEX_TE_FUNCTION(fp8_gemm,
                 "a: A=F*[m k], b: B=F*[n k], a_scale_inv: f32[1], b_scale_inv: f32[1], "
                 "out: T[m n]!!, bias: Tensor?, c: T[m n]?, aux: T[m n]!?, workspace: u8[w]!?, "
                 "accumulate: bool, use_split_accumulator: bool, algorithm: int",
                 "cuda")
APEX_TE_IN_PLACE(fp8_gemm, "out: c")
// FP8 product with one scale for each block of 1 x 128 (block_rows 1) or 128 x 128 elements, laid
// out as in common/numerics/block_scale.h: out = sum over slices of 128 along K of (a . b^T) *
// a_scale
// * b_scale, partial sums in float32.
APEX_TE_FUNCTION(
    fp8_gemm_block,
    "a: A=F*[m k], b: B=F*[n k], a_scale_inv: f32[block_scales(m k a_block_rows)], "
    "b_scale_inv: f32[block_scales(n k b_block_rows)], out: T[m n]!!, bias: Tensor?, c: T[m n]?, "
    "workspace: u8[w]!?, a_block_rows: int, b_block_rows: int, accumulate: bool, algorithm: int",
    "cuda")
APEX_TE_IN_PLACE(fp8_gemm_block, "out: c")
// fp8_gemm with a scale for each row of an operand: out[m, n] = (a . b^T)[m, n] * a_scale_inv[m] *
// b_scale_inv[n] (+ c[m, n], bias[n]).
APEX_TE_FUNCTION(fp8_gemm_rows,
                 "a: A=F[m k], b: B=F[n k], a_scale_inv: f32[m 1], b_scale_inv: f32[n 1], "
                 "out: T[m n]!!, bias: Tensor?, c: T[m n]?, workspace: u8[w]!?, accumulate: bool, "
                 "use_split_accumulator: bool, algorithm: int",
                 "cuda")
APEX_TE_IN_PLACE(fp8_gemm_rows, "out: c")
// out[M, N] = dy[K, M]^T . x[K, N], added to out with accumulate: the weight gradient of a layer in
// float16 or bfloat16, K its rows. Sums of products are kept in float32; out is float32 or has the
// operands' dtype, to which cuBLASLt rounds the product before it adds a 16-bit out to it.
APEX_TE_FUNCTION(wgrad_gemm,
                 "dy: T=H[k m], x: T[k n], out: T|f32[m n]!!, workspace: u8[w]!?, accumulate: bool",
                 "cuda")
// cuBLASLt's version on the machine; the tensor only names the device.
APEX_TE_FUNCTION(cublaslt_version, "probe: Tensor -> int", "cuda")
APEX_TE_FUNCTION(fp8_decode, "fp8_data: F*[r c], out: f32[r c]!", "cpu")
APEX_TE_FUNCTION(fp8_gemm_epilogue,
                 "product: f32[m n], a_scale_inv: f32[1], b_scale_inv: f32[1], out: T[m n]!!, "
                 "bias: Tensor?, c: T[m n]?, aux: T[m n]!?, accumulate: bool",
                 "cpu")
APEX_TE_IN_PLACE(fp8_gemm_epilogue, "out: c")
// sum = fma(product * a_scale, b_scale, sum), elementwise, for one slice of K: `product` is its
// matrix product, the scales those of the whole operands, which have extent `k`.
APEX_TE_FUNCTION(fp8_block_accumulate,
                 "product: f32[m n], a_scale_inv: f32[block_scales(m k a_block_rows)], "
                 "b_scale_inv: f32[block_scales(n k b_block_rows)], sum: f32[m n]!!, "
                 "a_block_rows: int, b_block_rows: int, k: int, slice: int",
                 "cpu")

namespace apex_te {

constexpr int kMaxAlgorithms = 16;
constexpr int64_t kScaledRows = -1;

struct Fp8Epilogue {
  TensorView out, bias, c, aux;
  const float *a_scale_inv, *b_scale_inv;
};

// The part of the contract that both devices share: out [M, N], bias [N], c and aux [M, N].
inline void check_epilogue(const Fp8Epilogue& e, int64_t m, int64_t n) {
  e.out.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .has_shape({m, n})
      .is_dense();
  // The bias of a float32 output is bfloat16, as cuBLASLt has it.
  const DType bias = e.out.dtype() == DType::kFloat32 ? DType::kBFloat16 : e.out.dtype();
  if (e.bias) e.bias.has_dtype({bias}).has_shape({n}).is_dense();
  if (e.c) e.c.has_dtype({e.out.dtype()}).has_shape({m, n}).is_dense();
  if (e.aux) e.aux.has_dtype({e.out.dtype()}).has_shape({m, n}).is_dense();
}

struct Fp8Gemm : Fp8Epilogue {
  TensorView a, b, workspace;
  int64_t m, n, k;
  bool accumulate, use_split_accumulator;
  int64_t algorithm;  // place in the heuristic's list, 0 the first
  // 0: one scale for the whole operand; kScaledRows: one for each row.
  int64_t a_block_rows = 0, b_block_rows = 0;
  bool k_is_outer = false;  // a is [K, M] and b [K, N], without scales
};

inline void check_accumulate(Args& args, const Fp8Epilogue& e, bool accumulate) {
  if (accumulate && e.aux)
    fail(kApexTeValueError, "%s: accumulate must be false with aux, got true", args.name());
  if (accumulate && e.c)
    fail(kApexTeValueError, "%s: accumulate must be false with c, got true", args.name());
  if (e.c && e.aux) e.c.refuse(kApexTeValueError, "be None with aux", "a tensor");
}

inline TensorView workspace_of(Args& args) {
  const TensorView workspace = args.optional_tensor();
  if (workspace) workspace.has_dtype({DType::kUInt8}).has_ndim(1).is_dense();
  return workspace;
}

inline void check_operands(Args& args, Fp8Gemm* g) {
  g->a = args.tensor();
  g->b = args.tensor();
  g->a.has_dtype(kFP8DTypes).has_ndim(2).is_dense();
  g->m = g->a.size(0);
  g->k = g->a.size(1);
  g->b.has_dtype(kFP8DTypes).has_ndim(2);
  g->n = g->b.size(0);
  g->b.has_shape({g->n, g->k}).is_dense();
  if (is_e5m2(g->a.dtype()) && is_e5m2(g->b.dtype()))
    fail(kApexTeUnsupported,
         "%s: one of a and b must have dtype float8_e4m3fn, got float8_e5m2 twice", args.name());
}

inline int64_t check_algorithm(Args& args) {
  const int64_t algorithm = args.integer();
  if (algorithm < 0 || algorithm >= kMaxAlgorithms)
    fail(kApexTeValueError, "%s: algorithm must be from 0 to %d, got %lld", args.name(),
         kMaxAlgorithms - 1, static_cast<long long>(algorithm));
  return algorithm;
}

inline Fp8Gemm check_fp8_gemm(Args& args) {
  Fp8Gemm g;
  check_operands(args, &g);
  g.a_scale_inv = args.tensor().is_scalar(DType::kFloat32).data<float>();
  g.b_scale_inv = args.tensor().is_scalar(DType::kFloat32).data<float>();
  g.out = args.tensor();
  g.bias = args.optional_tensor();
  g.c = args.optional_tensor();
  g.aux = args.optional_tensor();
  check_epilogue(g, g.m, g.n);
  g.workspace = workspace_of(args);
  g.accumulate = args.boolean();
  g.use_split_accumulator = args.boolean();
  g.algorithm = check_algorithm(args);
  check_accumulate(args, g, g.accumulate);
  return g;
}

inline void refuse_two_square_blocks(Args& args, int64_t a_block_rows, int64_t b_block_rows) {
  if (a_block_rows == kBlock && b_block_rows == kBlock)
    fail(kApexTeUnsupported, "%s: one of a_block_rows and b_block_rows must be 1, got 128 twice",
         args.name());
}

inline Fp8Gemm check_fp8_gemm_block(Args& args) {
  Fp8Gemm g;
  check_operands(args, &g);
  const TensorView a_scale_inv = args.tensor(), b_scale_inv = args.tensor();
  g.out = args.tensor();
  g.bias = args.optional_tensor();
  g.c = args.optional_tensor();
  check_epilogue(g, g.m, g.n);
  g.workspace = workspace_of(args);
  g.a_block_rows = check_block_rows(args);
  g.b_block_rows = check_block_rows(args);
  refuse_two_square_blocks(args, g.a_block_rows, g.b_block_rows);
  check_block_scales(a_scale_inv, g.m, g.k, g.a_block_rows);
  check_block_scales(b_scale_inv, g.n, g.k, g.b_block_rows);
  g.a_scale_inv = a_scale_inv.data<float>();
  g.b_scale_inv = b_scale_inv.data<float>();
  g.accumulate = args.boolean();
  check_accumulate(args, g, g.accumulate);
  g.use_split_accumulator = true;
  g.algorithm = check_algorithm(args);
  return g;
}

inline Fp8Gemm check_fp8_gemm_rows(Args& args) {
  Fp8Gemm g;
  check_operands(args, &g);
  for (const TensorView& operand : {g.a, g.b}) operand.has_dtype({DType::kE4M3, DType::kE5M2});
  const auto scales_of = [&](int64_t rows) {
    const TensorView scale_inv = args.tensor();
    return scale_inv.has_dtype({DType::kFloat32}).has_shape({rows, 1}).is_dense().data<float>();
  };
  g.a_scale_inv = scales_of(g.m);
  g.b_scale_inv = scales_of(g.n);
  g.out = args.tensor();
  g.bias = args.optional_tensor();
  g.c = args.optional_tensor();
  check_epilogue(g, g.m, g.n);
  g.workspace = workspace_of(args);
  g.a_block_rows = g.b_block_rows = kScaledRows;
  g.accumulate = args.boolean();
  g.use_split_accumulator = args.boolean();
  g.algorithm = check_algorithm(args);
  check_accumulate(args, g, g.accumulate);
  return g;
}

inline Fp8Gemm check_wgrad_gemm(Args& args) {
  Fp8Gemm g;
  g.a = args.tensor();
  g.b = args.tensor();
  g.a.has_dtype({DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  g.k = g.a.size(0);
  g.m = g.a.size(1);
  g.b.has_dtype({g.a.dtype()}).has_ndim(2);
  g.n = g.b.size(1);
  g.b.has_shape({g.k, g.n}).is_dense();
  g.out = args.tensor();
  g.out.has_dtype({DType::kFloat32, g.a.dtype()}).has_shape({g.m, g.n}).is_dense();
  g.a_scale_inv = g.b_scale_inv = nullptr;
  g.workspace = workspace_of(args);
  g.accumulate = args.boolean();
  g.use_split_accumulator = true;
  g.algorithm = 0;
  g.k_is_outer = true;
  return g;
}

}  // namespace apex_te
