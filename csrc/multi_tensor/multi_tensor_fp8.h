// Optimizer steps that also cast the new parameters to FP8, rowwise and columnwise, while they hold
// them; and the check by which a later cast with the same scale is left out.
//
// adam_fp8 casts as cast_transpose does, with each parameter's scale: scale_inv becomes 1 / scale,
// amax the parameter's amax. adam_block casts as block_quantize does, in blocks of 128 x 128. FP8
// data are those of the parameter as it is stored, so they equal what these ops make of it. A step
// that found_inf skips leaves all outputs as they were.
//
// kept_scales: are_equal = (scale_inv == 1 / scale), as bits; amax = max(amax, kept_amax).
#pragma once

#include "common/numerics/block_cast.h"
#include "multi_tensor/multi_tensor_optim.h"

namespace apex_te {

// A row of adam, and where its FP8 data go. rowwise_scale_inv is scale_inv of adam_fp8.
struct FP8Row {
  Row row;
  TensorView param;
  int64_t rows, cols;
  uint8_t *rowwise, *columnwise;
  float *rowwise_scale_inv, *columnwise_scale_inv;
  const float* scale;
  float* amax;

  BlockCast block_cast(const BlockRule& rule) const {
    BlockCast p = {};
    p.rows = rows;
    p.cols = cols;
    p.fp8 = DType::kE4M3;
    p.rowwise_rows = p.columnwise_ld = rows;
    p.row_line = p.row_scales = padded_to_4(rows);
    p.rowwise = rowwise;
    p.columnwise = columnwise;
    p.rowwise_scale_inv = rowwise_scale_inv;
    p.columnwise_scale_inv = columnwise_scale_inv;
    p.block_rows = kBlock;
    p.rule = rule;
    if (row.dtype(kParam) != DType::kFloat32)
      p.rule.largest_bits =
          row.dtype(kParam) == DType::kFloat16 ? kLargestHalfBits : kLargestBFloat16Bits;
    return p;
  }
};

struct AdamFP8 {
  Adam adam;
  const std::vector<FP8Row>* rows;
  BlockRule rule;  // of adam_block; `largest_bits` is each parameter's
};

// Kernels read and write vectors only.
inline void check_alignment(const Args& args, const void* data) {
  if (reinterpret_cast<uintptr_t>(data) % 16)
    fail(kApexTeValueError, "%s: tensors must be aligned to 16 bytes, got one at %p", args.name(),
         data);
}

// FP8 data of entry i, and the parameter's rows and columns.
inline FP8Row fp8_row(const Args& args, const List& params, const List& rowwise,
                      const List& columnwise, int i) {
  const TensorView x = params.item(args, i).has_ndim(2);
  FP8Row f{};
  f.param = x;
  f.rows = x.size(0);
  f.cols = x.size(1);
  if (f.rows % 16 || f.cols % 16)
    fail(kApexTeValueError,
         "%s: params must have rows and columns that are multiples of 16, got %lld x %lld",
         args.name(), static_cast<long long>(f.rows), static_cast<long long>(f.cols));
  const auto copy = [&](const List& list, int64_t rows, int64_t cols) {
    const TensorView codes = list.item(args, i);
    codes.has_dtype({DType::kE4M3}).has_shape({rows, cols}).is_dense();
    check_alignment(args, codes.data());
    return codes.data<uint8_t>();
  };
  f.rowwise = copy(rowwise, f.rows, f.cols);
  f.columnwise = copy(columnwise, f.cols, f.rows);
  return f;
}

inline AdamFP8 check_adam_with_cast(Args& args, bool in_blocks) {
  const List lists[] = {List(args), List(args), List(args), List(args), List(args)};
  const List rowwise(args), columnwise(args), first(args), second(args);
  rowwise.check_count(args, lists[0].count, "params");
  columnwise.check_count(args, lists[0].count, "params");
  first.check_count(args, lists[0].count, "params");
  second.check_count(args, lists[0].count, "params");
  static thread_local std::vector<FP8Row> found;
  found.clear();
  AdamFP8 p{};
  constexpr int kColumns[] = {kParam, kGrad, kExpAvg, kExpAvgSq, kMaster};
  const auto scalar = [&](const List& list, int i) {
    return list.item(args, i).is_scalar(DType::kFloat32).template data<float>();
  };
  const auto fill = [&](const auto& finish) -> const Rows& {
    return fill_optimizer_rows(args, lists, kColumns, 5, 4, [&](int i, const Row& row) {
      FP8Row f = fp8_row(args, lists[0], rowwise, columnwise, i);
      f.row = row;
      for (const void* data : row.data) check_alignment(args, data);
      finish(i, f);
      if (row.numel) found.push_back(f);
    });
  };
  if (in_blocks) {
    p.rule = check_block_rule(args, DType::kE4M3, DType::kFloat32);
    const Rows& rows = fill([&](int i, FP8Row& f) {
      const TensorView row_scales = first.item(args, i), column_scales = second.item(args, i);
      check_block_scales(row_scales, f.rows, f.cols, kBlock);
      check_block_scales(column_scales, f.cols, f.rows, kBlock);
      f.rowwise_scale_inv = row_scales.data<float>();
      f.columnwise_scale_inv = column_scales.data<float>();
    });
    p.adam = take_adam(args, rows, false);
  } else {
    const List amaxes(args);
    amaxes.check_count(args, lists[0].count, "params");
    const Rows& rows = fill([&](int i, FP8Row& f) {
      f.scale = scalar(first, i);
      f.rowwise_scale_inv = scalar(second, i);
      f.amax = scalar(amaxes, i);
    });
    p.adam = take_adam(args, rows, false);
  }
  p.rows = &found;
  return p;
}

struct KeptScale {
  const float *scale, *scale_inv, *kept_amax;
  float* amax;
  int32_t* is_equal;
};
APEX_TE_HD void check_kept(const KeptScale& k) {
  *k.is_equal = float_bits(*k.scale_inv) == float_bits(1.0f / *k.scale);
  if (!k.amax) return;
  const uint32_t kept = float_bits(*k.kept_amax), now = float_bits(*k.amax);
  *k.amax = bits_float(kept > now ? kept : now);
}

inline const std::vector<KeptScale>& check_kept_scales(Args& args) {
  const List scales(args), inverses(args), kept(args), amaxes(args), flags(args);
  inverses.check_count(args, scales.count, "scales");
  kept.check_count(args, scales.count, "scales");
  if (amaxes.count) amaxes.check_count(args, scales.count, "scales");
  flags.check_count(args, scales.count, "scales");
  static thread_local std::vector<KeptScale> found;
  found.assign(scales.count, KeptScale{});
  const auto scalar = [&](const List& list, int i) {
    return list.item(args, i).is_scalar(DType::kFloat32).template data<float>();
  };
  for (int i = 0; i < scales.count; ++i) {
    found[i] = {scalar(scales, i), scalar(inverses, i), scalar(kept, i),
                amaxes.count ? scalar(amaxes, i) : nullptr,
                flags.item(args, i).is_scalar(DType::kInt32).template data<int32_t>()};
  }
  return found;
}

}  // namespace apex_te
