// CPU kernels of multi_tensor's optimizer steps.
#include "common/cpu/block_128x128.h"
#include "common/cpu/quantize.h"
#include "common/numerics/with_dtype.h"
#include "multi_tensor/multi_tensor_chunks.h"
#include "multi_tensor/multi_tensor_fp8.h"
#include "multi_tensor/multi_tensor_steps.h"

namespace apex_te {
namespace {

// The columns of one block: moments in place; weights (the master's where there is one) and
// gradients as floats, in place or in a buffer.
template <int64_t kSize = kRun>
struct OptimBlock {
  const Row& row;
  int64_t begin, size;
  bool has_master;
  float grads[kSize], weights[kSize];
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

// A row without its last column, which is not the master weights of parameters.
APEX_TE_INLINE Row without_master(Row row) {
  row.data[kMaster] = nullptr;
  return row;
}

// Weights are the parameters and, in the last column, the rest of their bits.
struct AdamHalvesOp {
  using Result = bool;
  Moments moments;
  StepScalars scalars;
  DeviceScalars device;
  APEX_TE_INLINE bool chunk(const Row& row, int64_t begin, int64_t n) const {
    const Moments c = moments;
    const StepScalars s = scalars;
    const Row own = without_master(row);
    uint16_t* high = static_cast<uint16_t*>(row.data[kParam]) + begin;
    uint16_t* low = static_cast<uint16_t*>(row.data[kMaster]) + begin;
    for (int64_t i = 0; i < n; i += kRun) {
      OptimBlock b(own, begin + i, std::min(kRun, n - i));
      const float* g = b.g;
      float *p = b.p, *m = b.m, *v = b.v;
      const int64_t size = b.size;
      uint16_t *h = high + i, *l = low + i;
#pragma GCC ivdep
      for (int64_t k = 0; k < size; ++k) {
        p[k] = join_halves(p[k], l[k]);
        adam_element(c, s, g[k], &p[k], &m[k], &v[k]);
        const Halves halves = split_halves(p[k]);
        h[k] = static_cast<uint16_t>(halves.high);
        l[k] = static_cast<uint16_t>(halves.low);
      }
      if (device.unscale_grads) b.store_unscaled_grads(*device.inv_scale);
    }
    return false;
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

// A moment of any dtype as floats, in place or in a buffer.
template <int64_t kSize = kRun>
struct MomentBlock {
  void* data;
  DType dtype;
  int64_t begin, size;
  float values[kSize];
  float* at;
  APEX_TE_INLINE MomentBlock(const Row& row, int column, int64_t first, int64_t n)
      : data(row.data[column]), dtype(row.dtype(column)), begin(first), size(n) {
    read_values(data, dtype, begin, size, values);
    at = result_values(data, dtype, begin, values);
  }
  APEX_TE_INLINE void store() const { finish_values(data, dtype, begin, size, at); }
};

// A step of multi_tensor_steps.h.
template <typename Step>
struct StepOp {
  using Result = bool;
  Step step;
  typename Step::Scalars scalars;
  APEX_TE_INLINE bool chunk(const Row& row, int64_t begin, int64_t n) const {
    const Step c = step;
    const typename Step::Scalars s = scalars;
    for (int64_t i = 0; i < n; i += kRun) {
      OptimBlock b(row, begin + i, std::min(kRun, n - i));
      const float* g = b.g;
      float* p = b.p;
      const int64_t size = b.size;
      if (c.has_moment()) {
        MomentBlock moment(row, kExpAvg, b.begin, size);
        float* m = moment.at;
#pragma GCC ivdep
        for (int64_t k = 0; k < size; ++k) c.element(s, g[k], &p[k], &m[k]);
        moment.store();
      } else {
        float unused = 0.0f;
#pragma GCC ivdep
        for (int64_t k = 0; k < size; ++k) c.element(s, g[k], &p[k], &unused);
      }
      b.store_weights();
      if (c.device.unscale_grads) b.store_unscaled_grads(*c.device.inv_scale);
    }
    return false;
  }
};

struct LambUpdateOp {
  using Result = bool;
  Moments moments;
  StepScalars scalars;
  APEX_TE_INLINE bool chunk(const Row& row, int64_t begin, int64_t n) const {
    const Moments c = moments;
    const StepScalars s = scalars;
    const Row own = without_master(row);
    const DType dtype = row.dtype(kUpdate);
    constexpr int64_t kHalf = kRun / 2;  // four buffers: a stack frame stays small
    for (int64_t i = 0; i < n; i += kHalf) {
      OptimBlock<kHalf> b(own, begin + i, std::min(kHalf, n - i));
      MomentBlock<kHalf> first(row, kExpAvg, b.begin, b.size);
      MomentBlock<kHalf> second(row, kExpAvgSq, b.begin, b.size);
      const float *g = b.g, *p = b.p;
      float *m = first.at, *v = second.at;
      float* u = result_values(row.data[kUpdate], dtype, b.begin, b.grads);
      const int64_t size = b.size;
#pragma GCC ivdep
      for (int64_t k = 0; k < size; ++k) {
        lamb_moments(c, c.one_minus_beta1, s.inv_scale, g[k], p[k], &m[k], &v[k]);
        u[k] = lamb_update(c, s, p[k], m[k], v[k]);
      }
      first.store();
      second.store();
      finish_values(row.data[kUpdate], dtype, b.begin, size, u);
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
        lamb_moments(c.moments, c.weight_of_grad, f, g[k], p[k], &m[k], &v[k]);
        u[k] = lamb_update(c.moments, s, p[k], m[k], v[k]);
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
      for (int64_t k = 0; k < size; ++k) p[k] -= step * lamb_update(c.moments, s, p[k], m[k], v[k]);
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

// Runs an operation that op_of(row) makes for each row.
template <typename OpOf>
void run_rows(const Rows& rows, const OpOf& op_of) {
  using Op = decltype(op_of(size_t()));
  const auto chunk = chunk_function<Op>();
  std::vector<Op> ops;
  for (size_t i = 0; i < rows.size(); ++i) ops.push_back(op_of(i));
  for_chunks(rows, kMultiTensorChunk, [&](size_t row, int64_t, int64_t begin, int64_t n) {
    chunk(ops[row], rows[row], begin, n);
  });
}

template <typename Step>
void run_tensor_step(const Step& p) {
  if (p.device.found_inf.is_set()) return;
  run_rows(*p.rows,
           [&](size_t row) { return StepOp<Step>{p, p.scalars(static_cast<int64_t>(row))}; });
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

APEX_TE_DEFINE(multi_tensor_adam_halves) {
  using namespace apex_te;
  const Adam p = check_adam_halves(args);
  if (p.device.found_inf.is_set()) return;
  run_step(*p.rows, AdamHalvesOp{p.moments, step_scalars(p.moments, p.device), p.device});
}

APEX_TE_DEFINE(multi_tensor_sgd) { apex_te::run_tensor_step(apex_te::check_sgd(args)); }

APEX_TE_DEFINE(multi_tensor_adagrad) { apex_te::run_tensor_step(apex_te::check_adagrad(args)); }

APEX_TE_DEFINE(multi_tensor_novograd) { apex_te::run_tensor_step(apex_te::check_novograd(args)); }

APEX_TE_DEFINE(multi_tensor_lars) { apex_te::run_tensor_step(apex_te::check_lars(args)); }

APEX_TE_DEFINE(multi_tensor_descend) { apex_te::run_tensor_step(apex_te::check_descend(args)); }

APEX_TE_DEFINE(multi_tensor_lamb_update) {
  using namespace apex_te;
  const LambUpdate p = check_lamb_update(args);
  if (p.device.found_inf.is_set()) return;
  run_rows(*p.rows, [&](size_t row) {
    const Moments moments = p.moments(static_cast<int64_t>(row));
    return LambUpdateOp{moments, step_scalars(moments, p.device)};
  });
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
