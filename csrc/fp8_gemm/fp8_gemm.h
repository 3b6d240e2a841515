// fp8_gemm: out[M, N] = (a[M, K] . b[N, K]^T) * a_scale_inv * b_scale_inv (+ bias[N], GELU).
//
// Both operands are row-major with K contiguous. fprop: x . w; dgrad: dy . w transposed; wgrad:
// dy transposed . x transposed. CUDA does all of it through cuBLASLt. On the CPU fp8_decode and
// fp8_gemm_epilogue stand around an fp32 product of the caller's.
#pragma once

#include "common/op.h"

APEX_TE_FUNCTION(fp8_gemm,
                 "a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out: Tensor, "
                 "bias: Tensor?, aux: Tensor?, workspace: Tensor?, accumulate: bool, "
                 "use_split_accumulator: bool, algorithm: int",
                 "cuda")
// cuBLASLt's version on the machine; the tensor only names the device.
APEX_TE_FUNCTION(cublaslt_version, "probe: Tensor -> int", "cuda")
APEX_TE_FUNCTION(fp8_decode, "codes: Tensor, out: Tensor", "cpu")
APEX_TE_FUNCTION(fp8_gemm_epilogue,
                 "product: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out: Tensor, "
                 "bias: Tensor?, aux: Tensor?, accumulate: bool",
                 "cpu")

namespace apex_te {

constexpr int kMaxAlgorithms = 16;

struct Fp8Epilogue {
  TensorView out, bias, aux;
  const float *a_scale_inv, *b_scale_inv;
};

// The part of the contract that both devices share: out [M, N], bias [N], aux [M, N].
inline void check_epilogue(const Fp8Epilogue& e, int64_t m, int64_t n) {
  e.out.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .has_shape({m, n})
      .is_dense();
  // The bias of a float32 output is bfloat16, as cuBLASLt has it.
  const DType bias = e.out.dtype() == DType::kFloat32 ? DType::kBFloat16 : e.out.dtype();
  if (e.bias) e.bias.has_dtype({bias}).has_shape({n}).is_dense();
  if (e.aux) e.aux.has_dtype({e.out.dtype()}).has_shape({m, n}).is_dense();
}

struct Fp8Gemm : Fp8Epilogue {
  TensorView a, b, workspace;
  int64_t m, n, k;
  bool accumulate, use_split_accumulator;
  int64_t algorithm;  // place in the heuristic's list, 0 the first
};

inline Fp8Gemm check_fp8_gemm(Args& args) {
  Fp8Gemm g;
  g.a = args.tensor();
  g.b = args.tensor();
  g.a.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(2).is_dense();
  g.m = g.a.size(0);
  g.k = g.a.size(1);
  g.b.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(2);
  g.n = g.b.size(0);
  g.b.has_shape({g.n, g.k}).is_dense();
  if (g.a.dtype() == DType::kE5M2 && g.b.dtype() == DType::kE5M2)
    fail(kApexTeUnsupported,
         "%s: one of a and b must have dtype float8_e4m3fn, got float8_e5m2 twice", args.name());
  g.a_scale_inv = args.tensor().is_scalar(DType::kFloat32).data<float>();
  g.b_scale_inv = args.tensor().is_scalar(DType::kFloat32).data<float>();
  g.out = args.tensor();
  g.bias = args.optional_tensor();
  g.aux = args.optional_tensor();
  check_epilogue(g, g.m, g.n);
  g.workspace = args.optional_tensor();
  if (g.workspace) g.workspace.has_dtype({DType::kUInt8}).has_ndim(1).is_dense();
  g.accumulate = args.boolean();
  g.use_split_accumulator = args.boolean();
  g.algorithm = args.integer();
  if (g.algorithm < 0 || g.algorithm >= kMaxAlgorithms)
    fail(kApexTeValueError, "%s: algorithm must be from 0 to %d, got %lld", args.name(),
         kMaxAlgorithms - 1, static_cast<long long>(g.algorithm));
  if (g.accumulate && g.aux)
    fail(kApexTeValueError, "%s: accumulate must be false with aux, got true", args.name());
  return g;
}

}  // namespace apex_te
