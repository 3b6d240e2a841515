// dense_gemm: out[M, N] = (a[M, K] . b[N, K]^T) * a_scale_inv * b_scale_inv (+ bias[N]) (+ c[M, N])
// of FP8 codes, on sm_90.
//
// Both operands are row-major with K contiguous. fprop: x . w; dgrad: dy . w transposed; wgrad:
// dy transposed . x transposed.
#pragma once

#include "common/abi/op.h"
#include "common/numerics/fp8_formats.h"

// c is residual, bfloat16, or with accumulate what out holds. `promotion` is the number of products
// of which sums are kept in the matrix units before they are added up in float32: 128, 256 or 512;
// 0: all of K. `columns` and `strip` choose tiles: their width, 0 for what suits the shape, and how
// many of a row are worked on at once; `variant` is 0, others are for measurements.
APEX_TE_FUNCTION(dense_gemm,
                 "a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out: Tensor!, "
                 "bias: Tensor?, residual: Tensor?, accumulate: bool, promotion: int, "
                 "columns: int, strip: int, variant: int",
                 "cuda")

namespace apex_te {

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
  int64_t promotion, columns, strip, variant;
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
  g.variant = args.integer();
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

}  // namespace apex_te
