// CPU kernels of multi_tensor's optimizer steps.
#include "common/cpu/block_128x128.h"
#include "common/cpu/quantize.h"
#include "common/numerics/with_dtype.h"
#include "multi_tensor/multi_tensor_chunks.h"
#include "multi_tensor/multi_tensor_fp8.h"

namespace apex_te {
namespace {

// The columns of one block: moments in place; weights (the master's where there is one) and
// gradients as floats, in place or in a buffer.
struct OptimBlock {
  const Row& row;
  int64_t begin, size;
  bool has_master;
  float grads[kRun], weights[kRun];
  const float* g;
  float *p, *m, *v;
  APEX_TE_INLINE OptimBlock(const Row& r, int64_t at, int64_t n, bool with_grad = true)
      : row(r), begin(at), size(n), has_master(r.data[kMaster] != nullptr) {
    if (with_grad) g = read_values(r.data[kGrad], r.dtype(kGrad), begin, size, grads);
    void* weight = has_master ? r.data[kMaster] : r.data[kParam];
    const DType dtype = has_master ? DType::kFloat32 : r.dtype(kParam);
    read_values(weight, dtype, begin, size, weights);
    p = result_values(weight, dtype, begin, weights);
    m = static_cast<float*>(r.data[kExpAvg]) + begin;
    v = static_cast<float*>(r.data[kExpAvgSq]) + begin;
  }
  // Writes the gradients times `factor`; those that were read may change.
  APEX_TE_INLINE void store_unscaled_grads(float factor) {
    float* out = result_values(row.data[kGrad], row.dtype(kGrad), begin, grads);
    for (int64_t k = 0; k < size; ++k) out[k] = g[k] * factor;
    finish_values(row.data[kGrad], row.dtype(kGrad), begin, size, out);
  }
  APEX_TE_INLINE void store_weights() const {
    finish_values(row.data[kParam], row.dtype(kParam), begin, size, p);
  }
};

struct AdamOp {
  using Result = bool;
  Moments moments;
  StepScalars scalars;
  DeviceScalars device;
  APEX_TE_INLINE bool chunk(const Row& row, int64_t begin, int64_t n) const {
    const Moments c = moments;
    const StepScalars s = scalars;
    for (int64_t i = 0; i < n; i += kRun) {
      OptimBlock b(row, begin + i, std::min(kRun, n - i));
      const float* g = b.g;
      float *p = b.p, *m = b.m, *v = b.v;
      const int64_t size = b.size;
#pragma GCC ivdep
      for (int64_t k = 0; k < size; ++k) adam_element(c, s, g[k], &p[k], &m[k], &v[k]);
      b.store_weights();
      if (device.unscale_grads) b.store_unscaled_grads(*device.inv_scale);
    }
    return false;
  }
};

struct SgdOp {
  using Result = bool;
  Sgd options;
  APEX_TE_INLINE bool chunk(const Row& row, int64_t begin, int64_t n) const {
    const Sgd c = options;
    const float lr = sgd_lr(options), inv_scale = sgd_inv_scale(options);
    for (int64_t i = 0; i < n; i += kRun) {
      OptimBlock b(row, begin + i, std::min(kRun, n - i));
      const float* g = b.g;
      float *p = b.p, *m = b.m, unused;
      const int64_t size = b.size;
      if (c.with_momentum) {
#pragma GCC ivdep
        for (int64_t k = 0; k < size; ++k) sgd_element(c, lr, inv_scale, g[k], &p[k], &m[k]);
      } else {
#pragma GCC ivdep
        for (int64_t k = 0; k < size; ++k) sgd_element(c, lr, inv_scale, g[k], &p[k], &unused);
      }
      b.store_weights();
      if (c.device.unscale_grads) b.store_unscaled_grads(*c.device.inv_scale);
    }
    return false;
  }
};

struct LambSums {
  float param, update;
};

struct LambMomentsOp {
  using Result = LambSums;
  Lamb options;
  StepScalars scalars;
  float factor;
  APEX_TE_INLINE LambSums chunk(const Row& row, int64_t begin, int64_t n) const {
    const Lamb c = options;
    const StepScalars s = scalars;
    const float f = factor;
    float params[kLanes] = {}, updates[kLanes] = {}, u[kRun];
    for (int64_t i = 0; i < n; i += kRun) {
      OptimBlock b(row, begin + i, std::min(kRun, n - i));
      const float *g = b.g, *p = b.p;
      float *m = b.m, *v = b.v;
      const int64_t size = b.size;
#pragma GCC ivdep
      for (int64_t k = 0; k < size; ++k) {
        lamb_moments(c, f, g[k], p[k], &m[k], &v[k]);
        u[k] = lamb_update(c, s, p[k], m[k], v[k]);
      }
      add_squares(p, size, params);
      add_squares(u, size, updates);
      if (c.device.unscale_grads) b.store_unscaled_grads(*c.device.inv_scale);
    }
    return {sum_lanes(params), sum_lanes(updates)};
  }
};

struct LambStepOp {
  using Result = bool;
  Lamb options;
  StepScalars scalars;
  float step_size;
  APEX_TE_INLINE bool chunk(const Row& row, int64_t begin, int64_t n) const {
    const Lamb c = options;
    const StepScalars s = scalars;
    const float step = step_size;
    for (int64_t i = 0; i < n; i += kRun) {
      const OptimBlock b(row, begin + i, std::min(kRun, n - i), false);
      const float *m = b.m, *v = b.v;
      float* p = b.p;
      const int64_t size = b.size;
#pragma GCC ivdep
      for (int64_t k = 0; k < size; ++k) p[k] -= step * lamb_update(c, s, p[k], m[k], v[k]);
      b.store_weights();
    }
    return false;
  }
};

template <typename Op>
void run_step(const Rows& rows, const Op& op) {
  const auto chunk = chunk_function<Op>();
  for_chunks(rows, kMultiTensorChunk, [&](size_t row, int64_t, int64_t begin, int64_t n) {
    chunk(op, rows[row], begin, n);
  });
}

// Casts a parameter that has been updated, with its scale.
template <typename T>
void cast_param(const FP8Row& f) {
  const float scale = *f.scale;
  const Quantize q{f.param, f.rows, f.cols, DType::kE4M3, f.rowwise, f.columnwise, f.rows};
  *f.amax = bits_float(quantize_all<T>(q, fp8_row_encoder<T>(DType::kE4M3, scale)));
  *f.rowwise_scale_inv = 1.0f / scale;
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(multi_tensor_adam) {
  using namespace apex_te;
  const Adam p = check_adam(args);
  if (p.device.found_inf.is_set()) return;
  run_step(*p.rows, AdamOp{p.moments, step_scalars(p.moments, p.device), p.device});
}

APEX_TE_DEFINE(multi_tensor_sgd) {
  using namespace apex_te;
  const Sgd p = check_sgd(args);
  if (p.device.found_inf.is_set()) return;
  run_step(*p.rows, SgdOp{p});
}

APEX_TE_DEFINE(multi_tensor_lamb) {
  using namespace apex_te;
  const Lamb p = check_lamb(args);
  if (p.device.found_inf.is_set()) return;
  const Rows& rows = *p.rows;
  const StepScalars s = step_scalars(p.moments, p.device);
  const LambMomentsOp moments{p, s, lamb_grad_factor(p, s)};
  const auto chunk = chunk_function<LambMomentsOp>();
  const auto first =
      for_chunks(rows, p.partials.chunk, [&](size_t row, int64_t c, int64_t begin, int64_t n) {
        const LambSums sums = chunk(moments, rows[row], begin, n);
        p.partials.sums[2 * c] = sums.param;
        p.partials.sums[2 * c + 1] = sums.update;
      });
  for (size_t i = 0; i < rows.size(); ++i) {
    double param = 0.0, update = 0.0;
    for (int64_t c = first[i]; c < first[i + 1]; ++c) {
      param += static_cast<double>(p.partials.sums[2 * c]);
      update += static_cast<double>(p.partials.sums[2 * c + 1]);
    }
    p.partials.totals[i] = static_cast<double>(trust_ratio(p, param, update));
  }
  const auto step = chunk_function<LambStepOp>();
  for_chunks(rows, p.partials.chunk, [&](size_t row, int64_t, int64_t begin, int64_t n) {
    const float ratio = static_cast<float>(p.partials.totals[row]);
    step(LambStepOp{p, s, s.lr * ratio}, rows[row], begin, n);
  });
}

APEX_TE_DEFINE(multi_tensor_adam_fp8) {
  using namespace apex_te;
  const AdamFP8 p = check_adam_with_cast(args, false);
  if (p.adam.device.found_inf.is_set()) return;
  run_step(*p.adam.rows,
           AdamOp{p.adam.moments, step_scalars(p.adam.moments, p.adam.device), p.adam.device});
  for (const FP8Row& f : *p.rows)
    with_dtype(f.row.dtype(kParam), [&](auto zero) { cast_param<decltype(zero)>(f); });
}

APEX_TE_DEFINE(multi_tensor_adam_block) {
  using namespace apex_te;
  const AdamFP8 p = check_adam_with_cast(args, true);
  if (p.adam.device.found_inf.is_set()) return;
  run_step(*p.adam.rows,
           AdamOp{p.adam.moments, step_scalars(p.adam.moments, p.adam.device), p.adam.device});
  for (const FP8Row& f : *p.rows)
    with_dtype(f.row.dtype(kParam), [&](auto zero) {
      cast_128x128(f.block_cast(p.rule), f.param.data<const decltype(zero)>());
    });
}

APEX_TE_DEFINE(multi_tensor_kept_scales) {
  for (const apex_te::KeptScale& k : apex_te::check_kept_scales(args)) apex_te::check_kept(k);
}
