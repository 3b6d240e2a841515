// grouped_gemm: products of FP8 codes over groups whose sizes only the device knows, on sm_90.
//
// Both operands are row-major with the inner dimension contiguous. What is multiplied with what is
// found on the device from the groups' ends; see grouped_quantize for how operands are made.
#pragma once

#include "common/numerics/block_scale.h"
#include "common/numerics/fp8_formats.h"

// out[r] = (b[g] . a[r]) * a_scale_inv[r] * b_scale_inv[g] of each row r of group g, which ends
// before row ends[g]: a [rows, K], b [G, N, K], out bfloat16 [rows, N]. Rows behind the last group
// are not written. With use_split_accumulator sums of 128 products, or of all if they are 512 at
// most, are added up in float32.
APEX_TE_FUNCTION(
    grouped_gemm_multiply,
    "a: A=F[r k], a_scale_inv: f32[r], b: B=F[g n k], b_scale_inv: f32[g], ends: i32[g], "
    "out: bf16[r n]!, use_split_accumulator: bool",
    "cuda")
// out[g] = (a of g . (b of g)^T) * a_scale_inv[g] * b_scale_inv[g]: group g has the columns up to
// ends[g] of a [M, columns] and b [N, columns] and begins at a multiple of 16; out bfloat16 or
// float32 [G, M, N], zeros of a group without columns. With `accumulate` a float32 out is added to,
// where subnormal sums may become 0.
APEX_TE_FUNCTION(
    grouped_gemm_contract,
    "a: A=F[m k], a_scale_inv: f32[g], b: B=F[n k], b_scale_inv: f32[g], ends: i32[g], "
    "out: bf16|f32[g m n]!!, use_split_accumulator: bool, accumulate: bool",
    "cuda")
// The same of data with block scales; the sums of each 128 products are scaled in float32.
// Multiply: a in blocks of 1x128, its scales as block_scale.h has those of [rows, K]; b in blocks
// of 128x128, scales [G, ceil(N / 128), ceil(K / 128) rounded up to 4]. Contract: both in blocks of
// 1x128 that begin with their group; group g's scales are the lines from g + begin / 128 on of
// [columns / 128 + G, M rounded up to 4] and [.., N rounded up to 4]. b_block_rows 128: b's blocks
// are of 128 rows, each of which has the scale.
APEX_TE_FUNCTION(grouped_block_multiply,
                 "a: A=F[r k], a_scale_inv: f32[k/128 r%4], b: B=F[g n k], "
                 "b_scale_inv: f32[g n/128 k/128%4], ends: i32[g], out: bf16[r n]!",
                 "cuda")
APEX_TE_FUNCTION(grouped_block_contract,
                 "a: A=F[m k], a_scale_inv: f32[lines(k g) m%4], b: B=F[n k], "
                 "b_scale_inv: f32[lines(k g) n%4], ends: i32[g], out: bf16|f32[g m n]!!, "
                 "accumulate: bool, b_block_rows: int",
                 "cuda")

namespace apex_te {

constexpr int64_t kMaxGemmGroups = 1023;
constexpr int64_t kCopyAlign = 16;  // of the operands' rows, in bytes, and of the groups' columns

struct GroupedGemm {
  DType a_type, b_type;
  const uint8_t *a, *b;
  const float *a_scale_inv, *b_scale_inv;
  const int32_t* ends;
  uint16_t* out;    // bfloat16, or null
  float* wide_out;  // else
  int64_t groups;
  int64_t a_rows, b_rows, k;  // of the stored matrices; b_rows of all groups
  int64_t m, n;               // of the result, m the rows of all groups in a multiplication
  // Distances of lines of block scales, and lines of b of a group in a multiplication.
  int64_t a_line, b_line, b_lines;
  bool contract, split, blocks, accumulate;
  bool b_in_blocks;  // of a contraction
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

// Checks the scales of each group, or of its rows, or of its blocks.
inline void check_grouped_scales(GroupedGemm* g, const TensorView& a, const TensorView& b) {
  a.has_dtype({DType::kFloat32});
  b.has_dtype({DType::kFloat32});
  g->a_line = padded_to_4(g->m);
  if (!g->blocks) {
    a.has_shape({g->contract ? g->groups : g->m});
    b.has_shape({g->groups});
  } else if (g->contract) {
    const int64_t lines = g->k / kBlock + g->groups;
    g->b_line = padded_to_4(g->n);
    a.has_shape({lines, g->a_line});
    b.has_shape({lines, g->b_line});
  } else {
    g->b_line = padded_to_4(num_blocks(g->k));
    g->b_lines = num_blocks(g->n);
    check_block_scales(a, g->m, g->k, 1);
    b.has_shape({g->groups, g->b_lines, g->b_line});
  }
  a.is_dense();
  b.is_dense();
}

inline GroupedGemm check_grouped_gemm(Args& args, bool contract, bool blocks) {
  GroupedGemm g{};
  g.contract = contract;
  g.blocks = blocks;
  const TensorView a = args.tensor(), a_scale = args.tensor();
  const TensorView b = args.tensor(), b_scale = args.tensor();
  const TensorView ends = args.tensor(), out = args.tensor();
  if (!blocks) g.split = args.boolean();
  if (contract) g.accumulate = args.boolean();
  if (contract && blocks) g.b_in_blocks = check_block_rows(args) == kBlock;
  a.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(2).is_dense();
  b.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(contract ? 2 : 3);
  ends.has_dtype({DType::kInt32}).has_ndim(1).is_dense();
  g.groups = ends.size(0);
  if (g.groups < 1 || g.groups > kMaxGemmGroups)
    fail(kApexTeUnsupported, "%s: ends must have 1 to %lld elements, got %lld", args.name(),
         static_cast<long long>(kMaxGemmGroups), static_cast<long long>(g.groups));
  g.m = g.a_rows = a.size(0);
  g.k = a.size(1);
  g.n = b.size(contract ? 0 : 1);
  g.b_rows = contract ? g.n : g.groups * g.n;
  if (contract) {
    b.has_shape({g.n, g.k}).is_dense();
    out.has_shape({g.groups, g.m, g.n});
  } else {
    b.has_shape({g.groups, g.n, g.k}).is_dense();
    out.has_shape({g.m, g.n});
  }
  if (contract)
    out.has_dtype({DType::kBFloat16, DType::kFloat32}).is_dense();
  else
    out.has_dtype({DType::kBFloat16}).is_dense();
  check_grouped_scales(&g, a_scale, b_scale);
  check_multiple(args, contract ? "columns of a and b" : "K", g.k, kCopyAlign);
  check_multiple(args, "N", g.n, 8);  // rows of out are written 16 bytes at a time
  if (g.accumulate) out.has_dtype({DType::kFloat32});
  g.a_type = a.dtype();
  g.b_type = b.dtype();
  g.a = a.data<const uint8_t>();
  g.b = b.data<const uint8_t>();
  g.a_scale_inv = a_scale.data<const float>();
  g.b_scale_inv = b_scale.data<const float>();
  g.ends = ends.data<const int32_t>();
  const bool is_wide = out.dtype() == DType::kFloat32;
  g.out = is_wide ? nullptr : out.data<uint16_t>();
  g.wide_out = is_wide ? out.data<float>() : nullptr;
  check_aligned(args, "a", g.a);
  check_aligned(args, "b", g.b);
  check_aligned(args, "out", out.data());
  return g;
}

}  // namespace apex_te
