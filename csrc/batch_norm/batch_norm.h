// batch_norm: batch normalisation in the steps between which ranks may combine their results.
//
// y = relu(xhat * weight + bias + z) with xhat = (x - mean) * inv_std of a channel; relu and z are
// optional. With d = dy, 0 where the ReLU's argument is not positive:
// dx = (d - sum_dy / n - (x - mean) * inv_std^2 * sum_dy_xmu / n) * inv_std * weight, dz = d, where
// n is the sum of the counts. Data are [n, c, s]; channels-last data have s = 1. Arithmetic is
// fp32; results of parts are added in fp64.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/abi/op.h"
#include "common/numerics/codec.h"

// The biased variance; zeros where there are no elements.
APEX_TE_FUNCTION(batch_norm_stats,
                 "x: T[n c s], mean: f32[c]!, var: f32[c]!, "
                 "workspace: f32[batch_norm_floats(n c s)]!; whole n s")

// Of w parts' biased variances the unbiased one of all, 1 / sqrt(biased + eps), and
// running += momentum * (value - running).
APEX_TE_FUNCTION(batch_norm_combine,
                 "means: f32[w c], vars: f32[w c], counts: i32[w], mean: f32[c]!, var: f32[c]!, "
                 "inv_std: f32[c]!, running_mean: f32[c]!!?, running_var: f32[c]!!?, eps: float, "
                 "momentum: float; whole w")

APEX_TE_FUNCTION(batch_norm_fwd,
                 "x: T[n c s], z: T[n c s]?, mean: f32[c], inv_std: f32[c], "
                 "weight: W=T|f32[c]?, bias: W=T|f32[c]?, y: T[n c s]!, relu: bool")

// sum_dy = sum(d), sum_dy_xmu = sum(d * (x - mean)), dweight = sum_dy_xmu * inv_std,
// dbias = sum_dy. z and bias matter to the ReLU alone.
APEX_TE_FUNCTION(batch_norm_reduce,
                 "dy: T[n c s], x: T[n c s], z: T[n c s]?, mean: f32[c], inv_std: f32[c], "
                 "weight: W=T|f32[c]?, bias: W=T|f32[c]?, sum_dy: f32[+ c]!, "
                 "sum_dy_xmu: f32[+ c]!, dweight: W=T|f32[+ c]!?, dbias: W=T|f32[+ c]!?, "
                 "workspace: f32[batch_norm_floats(n c s)]!, relu: bool")

// Without dx, of dz alone, the sums are not read.
APEX_TE_FUNCTION(batch_norm_bwd,
                 "dy: T[n c s], x: T[n c s], z: T[n c s]?, mean: f32[c], inv_std: f32[c], "
                 "weight: W=T|f32[c]?, bias: W=T|f32[c]?, sum_dy: f32[c]?dx, "
                 "sum_dy_xmu: f32[c]?dx, counts: i32[w]?dx, dx: T[n c s]!?, dz: T[n c s]!?, "
                 "relu: bool; whole w")

// batch_norm_stats, batch_norm_combine of this part alone and batch_norm_fwd, with their bits.
APEX_TE_FUNCTION(batch_norm_train_fwd,
                 "x: T[n c s], z: T[n c s]?, weight: W=T|f32[c]?, bias: W=T|f32[c]?, "
                 "mean: f32[c]!, inv_std: f32[c]!, running_mean: f32[c]!!?, "
                 "running_var: f32[c]!!?, y: T[n c s]!, workspace: f32[batch_norm_floats(n c s)]!, "
                 "eps: float, momentum: float, relu: bool; whole n s")

// batch_norm_reduce and batch_norm_bwd of this part alone, with their bits.
APEX_TE_FUNCTION(batch_norm_train_bwd,
                 "dy: T[n c s], x: T[n c s], z: T[n c s]?, mean: f32[c], inv_std: f32[c], "
                 "weight: W=T|f32[c]?, bias: W=T|f32[c]?, sum_dy: f32[c]!, sum_dy_xmu: f32[c]!, "
                 "dweight: W=T|f32[c]!?, dbias: W=T|f32[c]!?, dx: T[n c s]!, dz: T[n c s]!?, "
                 "workspace: f32[batch_norm_floats(n c s)]!, relu: bool; whole n s")

namespace apex_te {

constexpr int64_t kBatchNormTile = 256;  // columns that a task or a block has
constexpr int64_t kBatchNormVec = 8;     // elements of a row that are counted as one place

// How a reduction is divided, by the shape alone: into lines of places, each of which leaves two
// values for each of `width` columns. With `by_columns` the data are a matrix [n, c * s], whose
// places are its rows and whose columns are summed by channel at the end; else the places of a
// channel are the vectors of its n rows of s.
struct BatchNormSplit {
  int64_t n, c, s;
  bool by_columns;
  int64_t places, lines, chunk, width;

  APEX_TE_HD int64_t row_places() const { return (s + kBatchNormVec - 1) / kBatchNormVec; }
  APEX_TE_HD int64_t begin(int64_t line) const {
    return line * chunk < places ? line * chunk : places;
  }
  // Elements of one column in front of a place.
  APEX_TE_HD int64_t elements(int64_t place) const {
    if (by_columns || place == 0) return place;
    const int64_t row = place / row_places(), in_row = (place - row * row_places()) * kBatchNormVec;
    return row * s + (in_row < s ? in_row : s);
  }
  // Elements of one column in a line.
  APEX_TE_HD int64_t count(int64_t line) const {
    return elements(begin(line + 1)) - elements(begin(line));
  }
};

inline BatchNormSplit batch_norm_split(int64_t n, int64_t c, int64_t s) {
  BatchNormSplit p = {n, c, s, s == 1 || (s % kBatchNormVec != 0 && n >= 32), 0, 0, 0, 0};
  int64_t wanted, most;  // lines that fill a GPU, and those that have work enough
  if (p.by_columns) {
    p.width = c * s;
    p.places = n;
    wanted = 264 / std::max<int64_t>((p.width + kBatchNormTile - 1) / kBatchNormTile, 1);
    most = (n + 63) / 64;
  } else {
    p.width = c;
    p.places = n * p.row_places();
    wanted = 1056 / std::max<int64_t>(c, 1);
    most = (p.places + 2047) / 2048;
  }
  p.lines = std::max<int64_t>(std::min(wanted, most), 1);
  p.chunk = std::max<int64_t>((p.places + p.lines - 1) / p.lines, 1);
  p.lines = std::max<int64_t>((p.places + p.chunk - 1) / p.chunk, 1);  // none is empty
  return p;
}

struct BatchNormParams {  // weight and bias; null where there is none
  const void *weight, *bias;
  bool is_fp32;  // else the dtype of x
};

struct BatchNorm {
  DType dtype;
  int64_t n, c, s;
  const void *x, *z, *dy;
  const float *mean, *inv_std;
  BatchNormParams params;
  bool relu;
  void *y, *dx, *dz;
  const float *sum_dy, *sum_dy_xmu;  // that backward reads
  const int32_t* counts;             // null: the elements here are all
  int64_t ranks;
  BatchNormSplit split;
  float* results[2];     // of a reduction: mean and var, or the sums
  float* workspace;      // [lines, 2, width]
  void* param_grads[2];  // of weight and bias
  bool param_grads_fp32;

  APEX_TE_HD int64_t numel() const { return n * c * s; }
};

struct BatchNormCombine {
  int64_t parts, channels;
  const float *means, *vars;
  const int32_t* counts;
  int64_t count;  // of one part, where there are no counts
  float *mean, *var, *inv_std, *running_mean, *running_var;
  float eps, momentum;
};

// The steps of one call. The combination overwrites the statistics.
struct BatchNormTrainFwd {
  BatchNorm stats;
  BatchNormCombine combine;
  BatchNorm fwd;
};
struct BatchNormTrainBwd {
  BatchNorm reduce, bwd;
};

namespace batch_norm {

inline float* channel(const TensorView& t, int64_t c) {
  if (t) t.has_dtype({DType::kFloat32}).has_shape({c}).is_dense();
  return t.data<float>();
}

inline TensorView data_of(const TensorView& t, BatchNorm& p) {
  t.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(3).is_dense();
  p.dtype = t.dtype();
  p.n = t.size(0);
  p.c = t.size(1);
  p.s = t.size(2);
  return t;
}

inline void* like(const TensorView& t, const BatchNorm& p) {
  if (t) t.has_dtype({p.dtype}).has_shape({p.n, p.c, p.s}).is_dense();
  return t.data();
}

// Of x's dtype or fp32, and of the other's dtype where that is given.
inline TensorView param(const TensorView& t, const TensorView& other, const BatchNorm& p) {
  if (!t) return t;
  if (other)
    t.has_dtype({other.dtype()});
  else if (p.dtype == DType::kFloat32)
    t.has_dtype({p.dtype});
  else
    t.has_dtype({p.dtype, DType::kFloat32});
  t.has_shape({p.c}).is_dense();
  return t;
}

// weight?, bias?
inline void check_params(Args& args, BatchNorm& p) {
  const TensorView weight = param(args.optional_tensor(), TensorView(), p);
  const TensorView bias = param(args.optional_tensor(), weight, p);
  const bool is_fp32 = (weight || bias) && (weight ? weight : bias).dtype() == DType::kFloat32;
  p.params = {weight.data(), bias.data(), is_fp32};
}

// z?, mean, inv_std, weight?, bias?
inline void check_operands(Args& args, BatchNorm& p) {
  p.z = like(args.optional_tensor(), p);
  p.mean = channel(args.tensor(), p.c);
  p.inv_std = channel(args.tensor(), p.c);
  check_params(args, p);
}

// sum_dy, sum_dy_xmu, dweight?, dbias?
inline void check_sums(Args& args, BatchNorm& p) {
  for (float*& result : p.results) result = channel(args.tensor(), p.c);
  const TensorView dweight = param(args.optional_tensor(), TensorView(), p);
  const TensorView dbias = param(args.optional_tensor(), dweight, p);
  p.param_grads[0] = dweight.data();
  p.param_grads[1] = dbias.data();
  p.param_grads_fp32 = (dweight || dbias) && (dweight ? dweight : dbias).dtype() == DType::kFloat32;
}

inline void check_workspace(Args& args, BatchNorm& p) {
  p.split = batch_norm_split(p.n, p.c, p.s);
  const TensorView t = args.tensor();
  t.has_dtype({DType::kFloat32}).has_shape({p.split.lines * 2 * p.split.width}).is_dense();
  p.workspace = t.data<float>();
}

}  // namespace batch_norm

inline BatchNorm check_batch_norm_stats(Args& args) {
  BatchNorm p = {};
  p.x = batch_norm::data_of(args.tensor(), p).data();
  for (float*& result : p.results) result = batch_norm::channel(args.tensor(), p.c);
  batch_norm::check_workspace(args, p);
  return p;
}

inline BatchNormCombine check_batch_norm_combine(Args& args) {
  BatchNormCombine p = {};
  const TensorView means = args.tensor(), vars = args.tensor(), counts = args.tensor();
  means.has_dtype({DType::kFloat32}).has_ndim(2).is_dense();
  p.parts = means.size(0);
  p.channels = means.size(1);
  vars.has_dtype({DType::kFloat32}).has_shape({p.parts, p.channels}).is_dense();
  counts.has_dtype({DType::kInt32}).has_shape({p.parts}).is_dense();
  p.means = means.data<float>();
  p.vars = vars.data<float>();
  p.counts = counts.data<int32_t>();
  for (float** result : {&p.mean, &p.var, &p.inv_std})
    *result = batch_norm::channel(args.tensor(), p.channels);
  p.running_mean = batch_norm::channel(args.optional_tensor(), p.channels);
  p.running_var = batch_norm::channel(args.optional_tensor(), p.channels);
  p.eps = static_cast<float>(args.floating());
  p.momentum = static_cast<float>(args.floating());
  return p;
}

inline BatchNorm check_batch_norm_fwd(Args& args) {
  BatchNorm p = {};
  p.x = batch_norm::data_of(args.tensor(), p).data();
  batch_norm::check_operands(args, p);
  p.y = batch_norm::like(args.tensor(), p);
  p.relu = args.boolean();
  return p;
}

inline BatchNorm check_batch_norm_reduce(Args& args) {
  BatchNorm p = {};
  p.dy = batch_norm::data_of(args.tensor(), p).data();
  p.x = batch_norm::like(args.tensor(), p);
  batch_norm::check_operands(args, p);
  batch_norm::check_sums(args, p);
  batch_norm::check_workspace(args, p);
  p.relu = args.boolean();
  return p;
}

inline BatchNorm check_batch_norm_bwd(Args& args) {
  BatchNorm p = {};
  p.dy = batch_norm::data_of(args.tensor(), p).data();
  p.x = batch_norm::like(args.tensor(), p);
  batch_norm::check_operands(args, p);
  const TensorView sum_dy = args.optional_tensor(), sum_dy_xmu = args.optional_tensor();
  const TensorView counts = args.optional_tensor(), dx = args.optional_tensor();
  const TensorView dz = args.optional_tensor();
  if (!dx && !dz) fail(kApexTeValueError, "%s: dx or dz must be given, got neither", args.name());
  if (dx && (!sum_dy || !sum_dy_xmu || !counts))
    fail(kApexTeValueError, "%s: sum_dy, sum_dy_xmu and counts must be given with dx, got %s",
         args.name(), sum_dy || sum_dy_xmu || counts ? "some of them" : "none");
  p.sum_dy = batch_norm::channel(sum_dy, p.c);
  p.sum_dy_xmu = batch_norm::channel(sum_dy_xmu, p.c);
  if (counts) {
    counts.has_dtype({DType::kInt32}).has_ndim(1).is_dense();
    p.counts = counts.data<int32_t>();
    p.ranks = counts.size(0);
  }
  p.dx = batch_norm::like(dx, p);
  p.dz = batch_norm::like(dz, p);
  p.relu = args.boolean();
  return p;
}

inline BatchNormTrainFwd check_batch_norm_train_fwd(Args& args) {
  BatchNormTrainFwd steps = {};
  BatchNorm& p = steps.fwd;
  BatchNormCombine& combine = steps.combine;
  p.x = batch_norm::data_of(args.tensor(), p).data();
  p.z = batch_norm::like(args.optional_tensor(), p);
  batch_norm::check_params(args, p);
  // The biased variance is in the place of inv_std until that is computed from it.
  for (float*& result : p.results) result = batch_norm::channel(args.tensor(), p.c);
  p.mean = combine.means = combine.mean = p.results[0];
  p.inv_std = combine.vars = combine.inv_std = p.results[1];
  combine.running_mean = batch_norm::channel(args.optional_tensor(), p.c);
  combine.running_var = batch_norm::channel(args.optional_tensor(), p.c);
  p.y = batch_norm::like(args.tensor(), p);
  batch_norm::check_workspace(args, p);
  combine.parts = 1;
  combine.channels = p.c;
  combine.count = p.n * p.s;
  combine.eps = static_cast<float>(args.floating());
  combine.momentum = static_cast<float>(args.floating());
  p.relu = args.boolean();
  steps.stats = p;
  steps.stats.z = nullptr;
  steps.stats.y = nullptr;
  steps.stats.relu = false;
  return steps;
}

inline BatchNormTrainBwd check_batch_norm_train_bwd(Args& args) {
  BatchNormTrainBwd steps = {};
  BatchNorm &p = steps.reduce, &bwd = steps.bwd;
  p.dy = batch_norm::data_of(args.tensor(), p).data();
  p.x = batch_norm::like(args.tensor(), p);
  batch_norm::check_operands(args, p);
  batch_norm::check_sums(args, p);
  void* const dx = batch_norm::like(args.tensor(), p);
  void* const dz = batch_norm::like(args.optional_tensor(), p);
  batch_norm::check_workspace(args, p);
  p.relu = args.boolean();
  bwd = p;
  bwd.sum_dy = p.results[0];
  bwd.sum_dy_xmu = p.results[1];
  bwd.dx = dx;
  bwd.dz = dz;
  return steps;
}

// A channel's statistics of one part or, with var and inv_std, of all.
struct BatchNormPart {
  double count;
  float mean, var;
};
struct BatchNormCombined {
  double total, mean, var;
  float inv_std;
};

// part_of(i): the i-th part.
template <typename PartOf>
APEX_TE_HD BatchNormCombined combine_parts(int64_t parts, float eps, const PartOf& part_of) {
  double total = 0.0, mean = 0.0, squares = 0.0;
  for (int64_t i = 0; i < parts; ++i) {
    const BatchNormPart part = part_of(i);
    if (part.count <= 0.0) continue;
    total += part.count;
    mean += part.count * part.mean;
  }
  if (total > 0.0) mean /= total;
  for (int64_t i = 0; i < parts; ++i) {
    const BatchNormPart part = part_of(i);
    const double apart = part.mean - mean;
    if (part.count > 0.0) squares += part.count * (part.var + apart * apart);
  }
  const double biased = total > 0.0 ? squares / total : 0.0;
  const double var = total > 0.0 ? squares / (total - 1.0) : 0.0;
  return {total, mean, var, static_cast<float>(1.0 / sqrt(biased + eps))};
}

APEX_TE_HD void store_combined(const BatchNormCombine& p, int64_t channel,
                               const BatchNormCombined& all) {
  p.mean[channel] = static_cast<float>(all.mean);
  if (p.var) p.var[channel] = static_cast<float>(all.var);
  p.inv_std[channel] = all.inv_std;
  if (all.total <= 0.0) return;
  const double factor = p.momentum;
  if (p.running_mean)
    p.running_mean[channel] =
        static_cast<float>((1.0 - factor) * p.running_mean[channel] + factor * all.mean);
  if (p.running_var)
    p.running_var[channel] =
        static_cast<float>((1.0 - factor) * p.running_var[channel] + factor * all.var);
}

// One channel of batch_norm_combine. Its results may take the place of a single part's.
APEX_TE_HD void combine_channel(const BatchNormCombine& p, int64_t channel) {
  const auto part_of = [&](int64_t i) {
    const auto count = static_cast<double>(p.counts ? p.counts[i] : p.count);
    return BatchNormPart{count, p.means[i * p.channels + channel],
                         p.vars[i * p.channels + channel]};
  };
  store_combined(p, channel, combine_parts(p.parts, p.eps, part_of));
}

// What the elements of a channel are computed with: xhat * weight = (x - mean) * scale, and
// dx = (d - mean_dy - (x - mean) * slope) * scale.
struct BatchNormChannel {
  float mean, scale, shift, mean_dy, slope;

  APEX_TE_HD float activation(float x, float z) const { return (x - mean) * scale + shift + z; }
  APEX_TE_HD float gradient(float x, float d) const {
    return (d - mean_dy - (x - mean) * slope) * scale;
  }
};
APEX_TE_HD float relu_of(float value) { return value < 0.0f ? 0.0f : value; }
APEX_TE_HD float relu_gradient(float value, float dy) { return value <= 0.0f ? 0.0f : dy; }

// The first element of a channel. Lines leave how far their means are from it: the means
// themselves, rounded to fp32, would add an error to the variance where they are large.
APEX_TE_HD float batch_norm_pivot(const BatchNorm& p, int64_t channel) {
  if (p.numel() == 0) return 0.0f;
  const int64_t at = channel * p.s;
  if (p.dtype == DType::kFloat32) return static_cast<const float*>(p.x)[at];
  if (p.dtype == DType::kFloat16) return to_float(static_cast<const Half*>(p.x)[at]);
  return to_float(static_cast<const BFloat16*>(p.x)[at]);
}

template <typename T>
APEX_TE_HD float batch_norm_param(const BatchNormParams& p, const void* values, int64_t channel,
                                  float otherwise) {
  if (!values) return otherwise;
  return p.is_fp32 ? static_cast<const float*>(values)[channel]
                   : to_float(static_cast<const T*>(values)[channel]);
}

template <typename T>
APEX_TE_HD BatchNormChannel batch_norm_channel_of(const BatchNormParams& params, int64_t channel,
                                                  float mean, float inv_std) {
  return {mean, inv_std * batch_norm_param<T>(params, params.weight, channel, 1.0f),
          batch_norm_param<T>(params, params.bias, channel, 0.0f), 0.0f, 0.0f};
}

// inv_total: 1 / sum of the counts.
APEX_TE_HD void set_sums(BatchNormChannel& at, float sum_dy, float sum_dy_xmu, float inv_std,
                         float inv_total) {
  at.mean_dy = sum_dy * inv_total;
  at.slope = sum_dy_xmu * inv_total * inv_std * inv_std;
}

template <typename T>
APEX_TE_HD BatchNormChannel batch_norm_channel(const BatchNorm& p, int64_t channel,
                                               float inv_total) {
  const float inv_std = p.inv_std[channel];
  auto at = batch_norm_channel_of<T>(p.params, channel, p.mean[channel], inv_std);
  if (p.sum_dy) set_sums(at, p.sum_dy[channel], p.sum_dy_xmu[channel], inv_std, inv_total);
  return at;
}

}  // namespace apex_te
