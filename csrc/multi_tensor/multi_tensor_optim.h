// The optimizer steps of multi_tensor: options, argument checks and the arithmetic of one element,
// which both devices share so that they give the same bits.
//
// Columns of a row: parameter, gradient, exp_avg or momentum, exp_avg_sq, master weight. Moments
// and master weights are float32. With a master weight the parameter is only written: it becomes
// the rounded master weight. A gradient is written only on request: with its product with
// inv_scale.
#pragma once

#include <cmath>
#include <utility>

#include "common/numerics/scaling.h"
#include "multi_tensor/multi_tensor.h"

namespace apex_te {

enum Column { kParam, kGrad, kExpAvg, kExpAvgSq, kMaster, kNumColumns };
static_assert(kNumColumns == Row::kMaxLists, "a row holds every column");

// Scalars that may live on the device, so that a captured graph can be replayed with other values.
struct DeviceScalars {
  const float *lr, *inv_scale, *grad_norm;
  const void* step;
  bool is_int_step;
  Flag found_inf;
  bool unscale_grads;  // only with inv_scale
};

struct Moments {
  float beta1, beta2, one_minus_beta1, one_minus_beta2, eps, weight_decay;
  float eps_inside;  // added below the root; one of both is 0
  double log_beta1, log_beta2, lr;
  int64_t step;
  bool adamw, bias_correction, maximize;
};

// Scalars that a launch derives from Moments and DeviceScalars before its first element.
struct StepScalars {
  float lr, inv_scale, inv_bias_correction1, inv_sqrt_bias_correction2;
  float decay;  // 1 - lr * weight_decay
};

#if defined(__CUDACC__)
#define APEX_TE_STEP_HD __host__ __device__ inline
#else
#define APEX_TE_STEP_HD inline
#endif

// 1 - beta^step without cancellation.
APEX_TE_STEP_HD double bias_correction(double log_beta, double step) {
  return -expm1(step * log_beta);
}

APEX_TE_STEP_HD StepScalars step_scalars(const Moments& m, const DeviceScalars& d) {
  StepScalars s;
  const double lr = d.lr ? static_cast<double>(*d.lr) : m.lr;
  double step = static_cast<double>(m.step);
  if (d.step)
    step = d.is_int_step ? static_cast<double>(*static_cast<const int32_t*>(d.step))
                         : static_cast<double>(*static_cast<const float*>(d.step));
  s.lr = static_cast<float>(lr);
  s.inv_scale = d.inv_scale ? *d.inv_scale : 1.0f;
  if (m.maximize) s.inv_scale = -s.inv_scale;
  s.decay = static_cast<float>(1.0 - lr * static_cast<double>(m.weight_decay));
  s.inv_bias_correction1 = s.inv_sqrt_bias_correction2 = 1.0f;
  if (m.bias_correction) {
    s.inv_bias_correction1 = static_cast<float>(1.0 / bias_correction(m.log_beta1, step));
    s.inv_sqrt_bias_correction2 =
        static_cast<float>(1.0 / sqrt(bias_correction(m.log_beta2, step)));
  }
  return s;
}

#if defined(__CUDACC__)
// One block's scalars: the first thread computes them while the others' loads are under way.
__device__ __forceinline__ StepScalars shared_scalars(const Moments& m, const DeviceScalars& d) {
  __shared__ StepScalars scalars;
  if (threadIdx.x == 0) scalars = step_scalars(m, d);
  __syncthreads();
  return scalars;
}
#endif

// Scalars for a launch whose options are all the host's; the rest is computed on the device.
inline StepScalars host_scalars(const Moments& m, const DeviceScalars& d) {
  return d.lr || d.step || d.inv_scale ? StepScalars() : step_scalars(m, d);
}

// New moments for a gradient g; returns the direction, before the learning rate.
APEX_TE_HD void update_moments(const Moments& c, float weight_of_grad, float g, float* m,
                               float* v) {
  *m = c.beta1 * *m + weight_of_grad * g;
  *v = c.beta2 * *v + c.one_minus_beta2 * g * g;
}
APEX_TE_HD float direction(const Moments& c, const StepScalars& s, float m, float v) {
  const float root = sqrtf(v + c.eps_inside) * s.inv_sqrt_bias_correction2;
  return m * s.inv_bias_correction1 / (root + c.eps);
}

APEX_TE_HD void adam_element(const Moments& c, const StepScalars& s, float g, float* p, float* m,
                             float* v) {
  g *= s.inv_scale;
  float w = *p;
  if (c.adamw)
    w *= s.decay;
  else
    g += c.weight_decay * w;
  update_moments(c, c.one_minus_beta1, g, m, v);
  *p = w - s.lr * direction(c, s, *m, *v);
}

struct Adam {
  const Rows* rows;
  Moments moments;
  DeviceScalars device;
};

struct Lamb {
  const Rows* rows;
  Moments moments;
  DeviceScalars device;
  float weight_of_grad, max_grad_norm;
  bool with_ratio;  // trust ratios apply: weight decay or nvlamb
  Partials partials;
};

// The factor of every gradient: unscaling, then clipping of the global norm.
APEX_TE_STEP_HD float lamb_grad_factor(const Lamb& c, const StepScalars& s) {
  if (!c.device.grad_norm) return s.inv_scale;
  const float norm = *c.device.grad_norm * fabsf(s.inv_scale);
  return norm > c.max_grad_norm ? s.inv_scale * (c.max_grad_norm / norm) : s.inv_scale;
}
APEX_TE_HD void lamb_moments(const Moments& c, float weight_of_grad, float factor, float g, float p,
                             float* m, float* v) {
  g *= factor;
  if (!c.adamw) g += c.weight_decay * p;
  update_moments(c, weight_of_grad, g, m, v);
}
// From the moments alone, so that the second phase can compute it again instead of storing it.
APEX_TE_HD float lamb_update(const Moments& c, const StepScalars& s, float p, float m, float v) {
  const float u = direction(c, s, m, v);
  return c.adamw ? u + c.weight_decay * p : u;
}
APEX_TE_STEP_HD float trust_ratio(const Lamb& c, double param_squares, double update_squares) {
  const float p = static_cast<float>(sqrt(param_squares));
  const float u = static_cast<float>(sqrt(update_squares));
  return c.with_ratio && p != 0.0f && u != 0.0f ? p / u : 1.0f;
}

// Whether a step's lists are rows of the same numbers: empty ones, too, because other arguments
// have a value for each. Its moments may have 16 bits.
enum class Numbered { kNo, kYes };

// Fills rows from the five lists; a list that may be empty leaves its column null. Rows without an
// element are left out: there is nothing to update. Calls note(i, row) for each row, of the lists'
// entries i.
template <typename Note>
Rows& fill_optimizer_rows(const Args& args, const List* lists, const int* columns, int count,
                          int num_required, const Note& note, Numbered numbered = Numbered::kNo) {
  const bool keeps_all = numbered == Numbered::kYes;
  const List& params = lists[0];
  for (int k = 1; k < count; ++k)
    if (k < num_required || lists[k].count) lists[k].check_count(args, params.count, "params");
  Rows& rows = fresh_rows(params.count);
  int used = 0;
  for (int i = 0; i < params.count; ++i) {
    Row& row = rows[used];
    for (int k = 0; k < count; ++k)
      if (lists[k].count)
        add_column(args, row, columns[k], lists[k], i, params,
                   columns[k] == kMaster || (columns[k] >= 2 && !keeps_all));
    note(i, row);
    used += keeps_all || row.numel != 0;
  }
  rows.resize(used);
  return rows;
}
inline Rows& fill_optimizer_rows(const Args& args, const List* lists, const int* columns, int count,
                                 int num_required, Numbered numbered = Numbered::kNo) {
  return fill_optimizer_rows(
      args, lists, columns, count, num_required, [](int, const Row&) {}, numbered);
}

inline double take_beta(Args& args, const char* name) {
  const double beta = args.floating();
  if (!(beta >= 0.0 && beta < 1.0))
    fail(kApexTeValueError, "%s: %s must be at least 0 and below 1, got %g", args.name(), name,
         beta);
  return beta;
}

// lr to bias_correction, as adam and lamb share them.
inline Moments take_moments(Args& args) {
  Moments m{};
  m.lr = args.floating();
  const double beta1 = take_beta(args, "beta1"), beta2 = take_beta(args, "beta2");
  m.beta1 = static_cast<float>(beta1);
  m.beta2 = static_cast<float>(beta2);
  m.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  m.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  m.log_beta1 = std::log(beta1);
  m.log_beta2 = std::log(beta2);
  m.eps = check_eps(args);
  m.weight_decay = static_cast<float>(args.floating());
  m.step = args.integer();
  m.adamw = args.boolean();
  m.bias_correction = args.boolean();
  return m;
}

// inv_scale to unscale_grads, which all take.
inline void take_scaling(Args& args, DeviceScalars* d) {
  d->inv_scale = take_scalar(args);
  d->found_inf = take_flag(args);
  d->unscale_grads = args.boolean() && d->inv_scale;
}

inline void take_step_tensor(Args& args, const Moments& m, DeviceScalars* d) {
  const TensorView step = args.optional_tensor();
  if (step) {
    step.has_dtype({DType::kFloat32, DType::kInt32}).is_scalar(step.dtype());
    d->step = step.data();
    d->is_int_step = step.dtype() == DType::kInt32;
  } else if (m.bias_correction && m.step < 1) {
    fail(kApexTeValueError, "%s: step must be at least 1, got %lld", args.name(),
         static_cast<long long>(m.step));
  }
}

// The options of adam, which follow its lists.
inline Adam take_adam(Args& args, const Rows& rows, bool has_all_options) {
  Adam p{};
  p.rows = &rows;
  p.moments = take_moments(args);
  if (has_all_options) {
    p.moments.maximize = args.boolean();
    if (args.boolean()) std::swap(p.moments.eps, p.moments.eps_inside);
  }
  p.device.lr = take_scalar(args);
  take_step_tensor(args, p.moments, &p.device);
  take_scaling(args, &p.device);
  return p;
}
inline Adam check_adam(Args& args) {
  const List lists[] = {List(args), List(args), List(args), List(args), List(args)};
  constexpr int kColumns[] = {kParam, kGrad, kExpAvg, kExpAvgSq, kMaster};
  return take_adam(args, fill_optimizer_rows(args, lists, kColumns, 5, 4), true);
}

// A float32 number in two halves: the bfloat16 nearest to it, ties away from zero, and the signed
// rest of its bits, which comes as a bfloat16, too.
struct Halves {
  uint32_t high, low;  // 16 bits each
};
APEX_TE_HD float join_halves(float high, uint32_t low) {
  return bits_float(float_bits(high) + (low ^ 0x8000u) - 0x8000u);
}
APEX_TE_HD Halves split_halves(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {0x7FC0u, 0u};
  return {(bits + 0x8000u) >> 16, bits & 0xFFFFu};
}
inline Adam check_adam_halves(Args& args) {
  const List lists[] = {List(args), List(args), List(args), List(args), List(args)};
  constexpr int kColumns[] = {kParam, kGrad, kExpAvg, kExpAvgSq};
  for (const int k : {0, 4})
    for (int i = 0; i < lists[k].count; ++i) lists[k].item(args, i).has_dtype({DType::kBFloat16});
  lists[4].check_count(args, lists[0].count, "params");
  const Rows& rows = fill_optimizer_rows(args, lists, kColumns, 4, 4, [&](int i, Row& row) {
    add_column(args, row, kMaster, lists[4], i, lists[0]);
  });
  return take_adam(args, rows, true);
}

inline Lamb check_lamb(Args& args) {
  const List lists[] = {List(args), List(args), List(args), List(args), List(args)};
  constexpr int kColumns[] = {kParam, kGrad, kExpAvg, kExpAvgSq, kMaster};
  Lamb p{};
  const Rows& rows = fill_optimizer_rows(args, lists, kColumns, 5, 4);
  p.rows = &rows;
  p.moments = take_moments(args);
  p.weight_of_grad = args.boolean() ? p.moments.one_minus_beta1 : 1.0f;
  p.with_ratio = args.boolean() || p.moments.weight_decay != 0.0f;
  p.max_grad_norm = static_cast<float>(args.floating());
  p.device.grad_norm = take_scalar(args);
  p.device.lr = take_scalar(args);
  take_step_tensor(args, p.moments, &p.device);
  take_scaling(args, &p.device);
  p.partials = split_workspace(args, args.tensor(), rows, 2);
  return p;
}

}  // namespace apex_te
