// multi_tensor: one operation over a list of tensors of any number, sizes and dtypes.
//
// amax:     amax[i] = max(amax[i], max |x_i|), NaN above infinity.
// l2norm:   norms[i] = sqrt(sum x_i^2), total = sqrt(sum over the whole list).
// scale:    out = x * factor (* factor_tensor).
// axpby:    out = a * x + b * y.
// quantize: out = satcast_rne(x * scale), amax and scale_inv as in cast_transpose.
// adam, lamb: one step of the optimizer (multi_tensor_optim.h); adam_halves: adam whose master
//   weights are bfloat16 parameters and the rest of their bits, int16 numbers passed as bfloat16.
// sgd, adagrad, novograd, lars, descend, lamb_update: other steps (multi_tensor_steps.h).
// adam_fp8, adam_block: adam, and the cast of the parameters to FP8 (multi_tensor_fp8.h).
// kept_scales: whether FP8 data that are kept have the scales wanted (multi_tensor_fp8.h).
// All arithmetic is in float32. A launch's table of tensors travels in the kernel's parameters.
#pragma once

#include <vector>

#include "common/abi/op.h"
#include "common/numerics/codec.h"

// Elements that one thread block, or one turn of a CPU thread, works on; a short list is cut finer,
// so that it occupies a GPU. Partial sums, and so all results, depend on the sizes alone.
constexpr int64_t kMultiTensorChunk = 16384;
constexpr int64_t kMultiTensorMinChunk = 2048;
constexpr int64_t kMultiTensorWantedChunks = 2048;
// Reductions widen their chunks so that at most this many, plus one a tensor, leave partial sums.
constexpr int64_t kMultiTensorPartials = 16384;

APEX_TE_FUNCTION(multi_tensor_amax, "tensors: f32|H[*x][each n], amax: f32[n]!!")
APEX_TE_FUNCTION(multi_tensor_l2norm,
                 "tensors: f32|H[*x][each n], total: f32[1]!, norms: f32[n]!?, "
                 "workspace: f32[z]!")
APEX_TE_FUNCTION(multi_tensor_scale,
                 "inputs: f32|H[*x][each n], outputs: f32|H[inputs][each n]!, factor: float, "
                 "factor_tensor: f32[1]?, found_inf: f32|i32[1]!!?")
APEX_TE_FUNCTION(multi_tensor_axpby,
                 "xs: f32|H[*x][each n], ys: f32|H[xs][each n], outputs: f32|H[xs][each n]!, "
                 "a: float, b: float, check: int, found_inf: f32|i32[1]!!?")
APEX_TE_FUNCTION(multi_tensor_quantize,
                 "tensors: f32|H[*x][each n], outputs: F[tensors][each n]!, "
                 "scales: f32[1][each n], amaxes: f32[1][each n|0]!!, "
                 "scale_invs: f32[1][each n|0]!")
APEX_TE_FUNCTION(multi_tensor_adam,
                 "params: f32|H[*x][each n]!!, grads: f32|H[params][each n]!!, "
                 "exp_avgs: f32[params][each n]!!, exp_avg_sqs: f32[params][each n]!!, "
                 "masters: f32[params][each n|0]!!, lr: float, beta1: float, beta2: float, "
                 "eps: float, weight_decay: float, step: int, adamw: bool, bias_correction: bool, "
                 "maximize: bool, eps_inside_sqrt: bool, lr_tensor: f32[1]?, "
                 "step_tensor: f32|i32[1]?, inv_scale: f32[1]?, found_inf: f32|i32[1]?, "
                 "unscale_grads: bool")
APEX_TE_FUNCTION(multi_tensor_adam_halves,
                 "params: bf16[*x][each n]!!, grads: f32|H[params][each n]!!, "
                 "exp_avgs: f32[params][each n]!!, exp_avg_sqs: f32[params][each n]!!, "
                 "remainders: bf16[params][each n]!!, lr: float, beta1: float, beta2: float, "
                 "eps: float, weight_decay: float, step: int, adamw: bool, bias_correction: bool, "
                 "maximize: bool, eps_inside_sqrt: bool, lr_tensor: f32[1]?, "
                 "step_tensor: f32|i32[1]?, inv_scale: f32[1]?, found_inf: f32|i32[1]?, "
                 "unscale_grads: bool")
// Extents must be multiples of 16, which no contract says.
APEX_TE_FUNCTION(
    multi_tensor_adam_fp8,
    "params: Tensor![], grads: Tensor![], exp_avgs: Tensor![], exp_avg_sqs: Tensor![], "
    "masters: Tensor![], rowwise: Tensor![], columnwise: Tensor![], "
    "scales: Tensor[], scale_invs: Tensor![], amaxes: Tensor![], "
    "lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, "
    "step: int, adamw: bool, bias_correction: bool, lr_tensor: Tensor?, "
    "step_tensor: Tensor?, inv_scale: Tensor?, found_inf: Tensor?, "
    "unscale_grads: bool")
APEX_TE_FUNCTION(
    multi_tensor_adam_block,
    "params: Tensor![], grads: Tensor![], exp_avgs: Tensor![], exp_avg_sqs: Tensor![], "
    "masters: Tensor![], rowwise: Tensor![], columnwise: Tensor![], "
    "rowwise_scale_invs: Tensor![], columnwise_scale_invs: Tensor![], "
    "block_eps: float, scale_rule: int, "
    "lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, "
    "step: int, adamw: bool, bias_correction: bool, lr_tensor: Tensor?, "
    "step_tensor: Tensor?, inv_scale: Tensor?, found_inf: Tensor?, "
    "unscale_grads: bool")
APEX_TE_FUNCTION(multi_tensor_kept_scales,
                 "scales: f32[1][each n], scale_invs: f32[1][each n], "
                 "kept_amaxes: f32[1][each n], amaxes: f32[1][each n|0]!!, "
                 "are_equal: i32[1][each n]!")
APEX_TE_FUNCTION(multi_tensor_sgd,
                 "params: f32|H[*x][each n]!!, grads: f32|H[params][each n]!!, "
                 "momentums: f32[params][each n|0]!!, masters: f32[params][each n|0]!!, "
                 "lr: float, momentum: float, dampening: float, weight_decay: float, "
                 "nesterov: bool, first_step: bool, maximize: bool, lr_tensor: f32[1]?, "
                 "inv_scale: f32[1]?, found_inf: f32|i32[1]?, unscale_grads: bool")
APEX_TE_FUNCTION(multi_tensor_lamb,
                 "params: f32|H[*x][each n]!!, grads: f32|H[params][each n]!!, "
                 "exp_avgs: f32[params][each n]!!, exp_avg_sqs: f32[params][each n]!!, "
                 "masters: f32[params][each n|0]!!, lr: float, beta1: float, beta2: float, "
                 "eps: float, weight_decay: float, step: int, adamw: bool, bias_correction: bool, "
                 "grad_averaging: bool, nvlamb: bool, max_grad_norm: float, grad_norm: f32[1]?, "
                 "lr_tensor: f32[1]?, step_tensor: f32|i32[1]?, inv_scale: f32[1]?, "
                 "found_inf: f32|i32[1]?, unscale_grads: bool, workspace: f32[z]!")
APEX_TE_FUNCTION(multi_tensor_adagrad,
                 "params: f32|H[*x][each n]!!, grads: f32|H[params][each n], "
                 "sums: f32|H[params][each n]!!, lr: float, eps: float, weight_decay: float, "
                 "adagrad_w: bool, found_inf: f32|i32[1]?")
APEX_TE_FUNCTION(multi_tensor_novograd,
                 "params: f32|H[*x][each n]!!, grads: f32|H[params][each n], "
                 "exp_avgs: f32|H[params][each n]!!, norms: f32[n], lr: float, beta1: float, "
                 "beta2: float, eps: float, weight_decay: float, step: int, decoupled: bool, "
                 "bias_correction: bool, grad_averaging: bool, found_inf: f32|i32[1]?")
APEX_TE_FUNCTION(multi_tensor_lars,
                 "params: f32|H[*x][each n]!!, grads: f32|H[params][each n], "
                 "momentums: f32|H[params][each n]!!, masters: f32[params][each n|0]!!, "
                 "grad_norms: f32[n], param_norms: f32[n], lr: float, trust_coefficient: float, "
                 "eps: float, weight_decay: float, momentum: float, nesterov: bool, adapts: bool, "
                 "found_inf: f32|i32[1]?")
APEX_TE_FUNCTION(multi_tensor_descend,
                 "params: f32|H[*x][each n]!!, updates: f32|H[params][each n], "
                 "masters: f32[params][each n|0]!!, rates: f32[n], found_inf: f32|i32[1]?")
APEX_TE_FUNCTION(multi_tensor_lamb_update,
                 "params: f32|H[*x][each n], grads: f32|H[params][each n], "
                 "exp_avgs: f32|H[params][each n]!!, exp_avg_sqs: f32|H[params][each n]!!, "
                 "updates: f32|H[params][each n]!, beta1s: f32[n], beta2s: f32[n], eps: f32[n], "
                 "weight_decays: f32[n], bias_corrections: i32[n], adamw: bool, step: i32[1], "
                 "factor: f32[1], found_inf: f32|i32[1]?")

namespace apex_te {

// One entry of the table: the same place of every list of a call.
struct Row {
  static constexpr int kMaxLists = 5;
  void* data[kMaxLists];
  int64_t numel;
  // Two bits a list: DType of a float32, float16 or bfloat16 tensor, 0 or 1 for E4M3 or E5M2.
  uint32_t dtypes;
  DType dtype(int list) const { return static_cast<DType>(dtypes >> 2 * list & 3u); }
};
using Rows = std::vector<Row>;

// A list argument, and its items one by one as rows are filled.
struct List {
  const DLTensor* tensors;
  int count, index;
  explicit List(Args& args) : index(args.position()) { count = args.tensor_list(&tensors); }
  TensorView item(const Args& args, int i) const { return args.list_item(tensors, index, i); }

  void check_count(const Args& args, int expected, const char* first) const {
    if (count == expected) return;
    char name[64];
    args.parameter_name(index, name, sizeof(name));
    fail(kApexTeValueError, "%s: %s must have %d entries like %s, got %d", args.name(), name,
         expected, first, count);
  }
};

// Entries of one place of the lists have one shape.
inline void check_shape(const Args& args, const List& list, int i, const List& first) {
  const DLTensor &x = list.tensors[i], &model = first.tensors[i];
  bool same = x.ndim == model.ndim;
  for (int d = 0; same && d < x.ndim; ++d) same = x.shape[d] == model.shape[d];
  if (same) return;
  char expected[128] = "have shape ", actual[96];
  format_shape(expected + strlen(expected), 96, model.shape, model.ndim);
  format_shape(actual, sizeof(actual), x.shape, x.ndim);
  list.item(args, i).refuse(kApexTeValueError, expected, actual);
}

inline bool is_float(DType dtype) { return dtype <= DType::kBFloat16; }

// Adds a dense float tensor as column `column` of its row; all columns have column 0's shape.
inline void add_column(const Args& args, Row& row, int column, const List& list, int i,
                       const List& first, bool only_float32 = false) {
  const TensorView x = list.item(args, i);
  if (only_float32)
    x.has_dtype({DType::kFloat32});
  else if (!is_float(x.dtype()))
    x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  x.is_dense();
  if (column == 0) {
    row = Row{};
    row.numel = x.numel();
  } else {
    check_shape(args, list, i, first);
  }
  row.data[column] = x.data();
  row.dtypes |= static_cast<uint32_t>(x.dtype()) << 2 * column;
}

// The rows of the call that this thread is in; kept so that their memory is reused.
inline Rows& fresh_rows(int count) {
  static thread_local Rows rows;
  rows.resize(count);
  return rows;
}

// A flag as torch.amp's GradScaler (float32) or apex (int32) keeps it: one element, 0 or not.
struct Flag {
  uint32_t* bits = nullptr;
  uint32_t one = 0;
  APEX_TE_HD bool is_set() const { return bits && *bits != 0; }
};
inline Flag take_flag(Args& args) {
  const TensorView flag = args.optional_tensor();
  if (!flag) return Flag();
  flag.has_dtype({DType::kFloat32, DType::kInt32}).is_scalar(flag.dtype());
  return {flag.data<uint32_t>(), flag.dtype() == DType::kInt32 ? 1u : 0x3F800000u};
}
inline const float* take_scalar(Args& args) {
  const TensorView scalar = args.optional_tensor();
  if (scalar) scalar.is_scalar(DType::kFloat32);
  return scalar.data<const float>();
}

// Smallest magnitude, as bits, that a dtype cannot hold as a finite number.
APEX_TE_HD uint32_t overflow_bits(int dtype) {
  return dtype == 0 ? 0x7F800000u : dtype == 1 ? 0x477FF000u : 0x7F7F8000u;
}

inline int64_t elements_of(const Rows& rows) {
  int64_t total = 0;
  for (const Row& row : rows) total += row.numel;
  return total;
}
inline int64_t chunk_of(const Rows& rows) {
  const int64_t total = elements_of(rows);
  int64_t chunk = kMultiTensorChunk;
  while (chunk > kMultiTensorMinChunk && total < chunk * kMultiTensorWantedChunks) chunk /= 2;
  return chunk;
}

struct Amax {
  const Rows* rows;
  float* amax;
};
inline Amax check_amax(Args& args) {
  const List tensors(args);
  const TensorView amax = args.tensor();
  amax.has_dtype({DType::kFloat32}).has_shape({tensors.count}).is_dense();
  Rows& rows = fresh_rows(tensors.count);
  for (int i = 0; i < tensors.count; ++i) add_column(args, rows[i], 0, tensors, i, tensors);
  return {&rows, amax.data<float>()};
}

// Scratch of a reduction: `sums` partial sums for each chunk, then totals of each tensor.
//   [0] counter of finished blocks; [4, 4 + 2 n sums) totals, float64; then n first chunks, int32;
//   then the partial sums.
struct Partials {
  int64_t chunk;       // elements
  int64_t num_chunks;  // of the whole list, at least one a tensor
  uint32_t* counter;
  double* totals;
  int32_t* first_chunk;
  float* sums;
};
inline int64_t chunks_of(int64_t numel, int64_t chunk) {
  return numel > chunk ? (numel + chunk - 1) / chunk : 1;
}
inline Partials split_workspace(const Args& args, const TensorView& workspace, const Rows& rows,
                                int sums) {
  const int64_t count = static_cast<int64_t>(rows.size());
  Partials p{};
  const int64_t total = elements_of(rows), limit = kMultiTensorChunk * kMultiTensorPartials;
  p.chunk = total > limit ? kMultiTensorChunk * ((total + limit - 1) / limit) : chunk_of(rows);
  for (const Row& row : rows) p.num_chunks += chunks_of(row.numel, p.chunk);
  const int64_t words = 4 + (2 * sums + 1) * count + sums * (kMultiTensorPartials + count);
  workspace.has_dtype({DType::kFloat32}).has_ndim(1).is_dense();
  if (workspace.size(0) < words)
    fail(kApexTeValueError, "%s: workspace must have at least %lld elements, got %lld", args.name(),
         static_cast<long long>(words), static_cast<long long>(workspace.size(0)));
  float* base = workspace.data<float>();
  if (reinterpret_cast<uintptr_t>(base) % alignof(double))  // of the totals
    fail(kApexTeValueError, "%s: workspace must be aligned to 8 bytes", args.name());
  p.counter = reinterpret_cast<uint32_t*>(base);
  p.totals = reinterpret_cast<double*>(base + 4);
  p.first_chunk = reinterpret_cast<int32_t*>(base + 4 + 2 * sums * count);
  p.sums = base + 4 + (2 * sums + 1) * count;
  return p;
}

struct L2Norm {
  const Rows* rows;
  float *total, *norms;
  Partials partials;
};
inline L2Norm check_l2norm(Args& args) {
  const List tensors(args);
  const TensorView total = args.tensor().is_scalar(DType::kFloat32);
  const TensorView norms = args.optional_tensor();
  if (norms) norms.has_dtype({DType::kFloat32}).has_shape({tensors.count}).is_dense();
  const TensorView workspace = args.tensor();
  Rows& rows = fresh_rows(tensors.count);
  for (int i = 0; i < tensors.count; ++i) add_column(args, rows[i], 0, tensors, i, tensors);
  return {&rows, total.data<float>(), norms.data<float>(),
          split_workspace(args, workspace, rows, 1)};
}

struct Scale {
  const Rows* rows;
  float factor;
  const float* factor_tensor;
  Flag found_inf;
};
inline Scale check_scale(Args& args) {
  const List inputs(args), outputs(args);
  outputs.check_count(args, inputs.count, "inputs");
  Scale p;
  p.factor = static_cast<float>(args.floating());
  p.factor_tensor = take_scalar(args);
  p.found_inf = take_flag(args);
  Rows& rows = fresh_rows(inputs.count);
  p.rows = &rows;
  for (int i = 0; i < inputs.count; ++i) {
    add_column(args, rows[i], 0, inputs, i, inputs);
    add_column(args, rows[i], 1, outputs, i, inputs);
  }
  return p;
}

enum Check { kCheckResult = -1, kCheckX = 0, kCheckY = 1 };
struct Axpby {
  const Rows* rows;
  float a, b;
  int check;
  Flag found_inf;
};
inline Axpby check_axpby(Args& args) {
  const List xs(args), ys(args), outputs(args);
  ys.check_count(args, xs.count, "xs");
  outputs.check_count(args, xs.count, "xs");
  Axpby p;
  p.a = static_cast<float>(args.floating());
  p.b = static_cast<float>(args.floating());
  const int64_t check = args.integer();
  if (check < kCheckResult || check > kCheckY)
    fail(kApexTeValueError, "%s: check must be -1, 0 or 1, got %lld", args.name(),
         static_cast<long long>(check));
  p.check = static_cast<int>(check);
  p.found_inf = take_flag(args);
  Rows& rows = fresh_rows(xs.count);
  p.rows = &rows;
  for (int i = 0; i < xs.count; ++i) {
    add_column(args, rows[i], 0, xs, i, xs);
    add_column(args, rows[i], 1, ys, i, xs);
    add_column(args, rows[i], 2, outputs, i, xs);
  }
  return p;
}

// Columns: tensor, codes, scale, amax, scale_inv; the last two may be absent.
inline const Rows& check_quantize(Args& args) {
  const List tensors(args), outputs(args), scales(args), amaxes(args), scale_invs(args);
  outputs.check_count(args, tensors.count, "tensors");
  scales.check_count(args, tensors.count, "tensors");
  if (amaxes.count) amaxes.check_count(args, tensors.count, "tensors");
  if (scale_invs.count) scale_invs.check_count(args, tensors.count, "tensors");
  Rows& rows = fresh_rows(tensors.count);
  for (int i = 0; i < tensors.count; ++i) {
    Row& row = rows[i];
    add_column(args, row, 0, tensors, i, tensors);
    const TensorView out = outputs.item(args, i);
    out.has_dtype({DType::kE4M3, DType::kE5M2}).is_dense();
    check_shape(args, outputs, i, tensors);
    row.data[1] = out.data();
    row.dtypes |= (out.dtype() == DType::kE5M2 ? 1u : 0u) << 2;
    row.data[2] = scales.item(args, i).is_scalar(DType::kFloat32).data();
    if (amaxes.count) row.data[3] = amaxes.item(args, i).is_scalar(DType::kFloat32).data();
    if (scale_invs.count) row.data[4] = scale_invs.item(args, i).is_scalar(DType::kFloat32).data();
  }
  return rows;
}

}  // namespace apex_te
