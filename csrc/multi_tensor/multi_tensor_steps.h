// The steps of multi_tensor whose formula reads a weight, a gradient and at most one moment, and
// the first part of LAMB with options for each tensor: checks, and the arithmetic of one element.
//
// sgd, adagrad, novograd, lars: optimizers. descend: weight -= rate of the tensor * gradient.
//
// A step is a struct with what a kernel needs: scalars(row), which has what is computed once for a
// tensor, and element(scalars, g, p, m). The moments of all but sgd are of any dtype.
#pragma once

#include "multi_tensor/multi_tensor_optim.h"

namespace apex_te {

struct Sgd {
  static constexpr bool kFloatMoments = true;
  const Rows* rows;
  float lr, momentum, one_minus_dampening, weight_decay;
  bool with_momentum, nesterov, first_step, maximize;
  DeviceScalars device;

  struct Scalars {
    float lr, inv_scale;
  };
  APEX_TE_HD Scalars scalars(int64_t) const {
    const float inv_scale = device.inv_scale ? *device.inv_scale : 1.0f;
    return {device.lr ? *device.lr : lr, maximize ? -inv_scale : inv_scale};
  }
  APEX_TE_HD bool reads_moment() const { return with_momentum && !first_step; }
  APEX_TE_HD bool has_moment() const { return with_momentum; }
  // Products and sums are rounded where the compiler of PyTorch's fused step rounds them, once for
  // both: where little is left of a difference, the parameter's last digits depend on it.
  APEX_TE_HD void element(const Scalars& s, float g, float* p, float* m) const {
    g = fmaf(weight_decay, *p, g * s.inv_scale);
    if (with_momentum) {
      *m = first_step ? g : fmaf(one_minus_dampening, g, momentum * *m);
      g = nesterov ? fmaf(momentum, *m, g) : *m;
    }
    *p = fmaf(-s.lr, g, *p);
  }
};

// What the following steps have in common.
struct MomentStep {
  static constexpr bool kFloatMoments = false;
  const Rows* rows;
  DeviceScalars device;
  APEX_TE_HD bool reads_moment() const { return true; }
  APEX_TE_HD bool has_moment() const { return true; }
};

struct Adagrad : MomentStep {
  float lr, eps, weight_decay;
  bool decoupled;
  struct Scalars {};
  APEX_TE_HD Scalars scalars(int64_t) const { return {}; }
  APEX_TE_HD void element(const Scalars&, float g, float* p, float* m) const {
    if (!decoupled) g += weight_decay * *p;
    *m += g * g;
    float u = g / (sqrtf(*m) + eps);
    if (decoupled) u += weight_decay * *p;
    *p -= lr * u;
  }
};

struct Novograd : MomentStep {
  Moments moments;
  StepScalars step;
  float weight_of_grad;
  bool reg_inside_moment;
  const float* norms;
  struct Scalars {
    float divisor;
  };
  APEX_TE_HD Scalars scalars(int64_t row) const {
    return {norms[row] * step.inv_sqrt_bias_correction2 + moments.eps};
  }
  APEX_TE_HD void element(const Scalars& s, float g, float* p, float* m) const {
    if (reg_inside_moment) g = g / s.divisor + moments.weight_decay * *p;
    *m = moments.beta1 * *m + weight_of_grad * g;
    float u = *m * step.inv_bias_correction1;
    if (!reg_inside_moment) u = u / s.divisor + moments.weight_decay * *p;
    *p -= step.lr * u;
  }
};

struct Lars : MomentStep {
  float lr, trust_coefficient, eps, weight_decay, momentum;
  bool nesterov, adapts;
  const float *grad_norms, *param_norms;
  struct Scalars {
    float rate;
  };
  APEX_TE_HD Scalars scalars(int64_t row) const {
    const float g = grad_norms[row], p = param_norms[row];
    const bool has_ratio = adapts && g > 0.0f && p > 0.0f;
    return {has_ratio ? lr * (trust_coefficient * p / (g + p * weight_decay + eps)) : lr};
  }
  APEX_TE_HD void element(const Scalars& s, float g, float* p, float* m) const {
    const float change = s.rate * (g + weight_decay * *p);
    *m = momentum * *m - change;
    *p += nesterov ? momentum * *m - change : *m;
  }
};

struct Descend : MomentStep {
  const float* rates;
  struct Scalars {
    float rate;
  };
  APEX_TE_HD Scalars scalars(int64_t row) const { return {rates[row]}; }
  APEX_TE_HD bool reads_moment() const { return false; }
  APEX_TE_HD bool has_moment() const { return false; }
  APEX_TE_HD void element(const Scalars& s, float g, float* p, float*) const { *p -= s.rate * g; }
};

// LAMB's moments and its update before the trust ratio, with options for each tensor.
struct LambUpdate {
  const Rows* rows;
  DeviceScalars device;
  const float *beta1s, *beta2s, *epss, *weight_decays;
  const int32_t* bias_corrections;
  bool adamw;
  APEX_TE_STEP_HD Moments moments(int64_t row) const {
    Moments m{};
    const double beta1 = static_cast<double>(beta1s[row]);
    const double beta2 = static_cast<double>(beta2s[row]);
    m.beta1 = beta1s[row];
    m.beta2 = beta2s[row];
    m.one_minus_beta1 = static_cast<float>(1.0 - beta1);
    m.one_minus_beta2 = static_cast<float>(1.0 - beta2);
    m.log_beta1 = log(beta1);
    m.log_beta2 = log(beta2);
    m.eps = epss[row];
    m.weight_decay = weight_decays[row];
    m.adamw = adamw;
    m.bias_correction = bias_corrections[row] != 0;
    return m;
  }
};
enum LambUpdateColumn { kUpdate = kMaster };

// A number for each entry of the lists.
template <typename T = float>
const T* take_numbers(Args& args, int count, DType dtype = DType::kFloat32) {
  const TensorView numbers = args.tensor();
  numbers.has_dtype({dtype}).has_shape({count}).is_dense();
  return numbers.data<const T>();
}

inline Sgd check_sgd(Args& args) {
  const List lists[] = {List(args), List(args), List(args), List(args)};
  constexpr int kColumns[] = {kParam, kGrad, kExpAvg, kMaster};
  Sgd p{};
  p.rows = &fill_optimizer_rows(args, lists, kColumns, 4, 2);
  p.lr = static_cast<float>(args.floating());
  p.momentum = static_cast<float>(args.floating());
  p.one_minus_dampening = 1.0f - static_cast<float>(args.floating());
  p.weight_decay = static_cast<float>(args.floating());
  p.nesterov = args.boolean();
  p.first_step = args.boolean();
  p.maximize = args.boolean();
  p.with_momentum = p.momentum != 0.0f;
  if (p.with_momentum) lists[2].check_count(args, lists[0].count, "params");
  p.device.lr = take_scalar(args);
  take_scaling(args, &p.device);
  return p;
}

inline Adagrad check_adagrad(Args& args) {
  const List lists[] = {List(args), List(args), List(args)};
  constexpr int kColumns[] = {kParam, kGrad, kExpAvg};
  Adagrad p{};
  p.rows = &fill_optimizer_rows(args, lists, kColumns, 3, 3, Numbered::kYes);
  p.lr = static_cast<float>(args.floating());
  p.eps = check_eps(args);
  p.weight_decay = static_cast<float>(args.floating());
  p.decoupled = args.boolean();
  p.device.found_inf = take_flag(args);
  return p;
}

inline Novograd check_novograd(Args& args) {
  const List lists[] = {List(args), List(args), List(args)};
  constexpr int kColumns[] = {kParam, kGrad, kExpAvg};
  Novograd p{};
  p.rows = &fill_optimizer_rows(args, lists, kColumns, 3, 3, Numbered::kYes);
  p.norms = take_numbers(args, lists[0].count);
  p.moments = take_moments(args);
  p.reg_inside_moment = !p.moments.adamw;
  p.weight_of_grad = args.boolean() ? p.moments.one_minus_beta1 : 1.0f;
  if (p.moments.bias_correction && p.moments.step < 1)
    fail(kApexTeValueError, "%s: step must be at least 1, got %lld", args.name(),
         static_cast<long long>(p.moments.step));
  p.step = step_scalars(p.moments, p.device);
  p.device.found_inf = take_flag(args);
  return p;
}

inline Lars check_lars(Args& args) {
  const List lists[] = {List(args), List(args), List(args), List(args)};
  constexpr int kColumns[] = {kParam, kGrad, kExpAvg, kMaster};
  Lars p{};
  p.rows = &fill_optimizer_rows(args, lists, kColumns, 4, 3, Numbered::kYes);
  p.grad_norms = take_numbers(args, lists[0].count);
  p.param_norms = take_numbers(args, lists[0].count);
  p.lr = static_cast<float>(args.floating());
  p.trust_coefficient = static_cast<float>(args.floating());
  p.eps = check_eps(args);
  p.weight_decay = static_cast<float>(args.floating());
  p.momentum = static_cast<float>(args.floating());
  p.nesterov = args.boolean();
  p.adapts = args.boolean();
  p.device.found_inf = take_flag(args);
  return p;
}

inline Descend check_descend(Args& args) {
  const List lists[] = {List(args), List(args), List(args)};
  constexpr int kColumns[] = {kParam, kGrad, kMaster};
  Descend p{};
  p.rows = &fill_optimizer_rows(args, lists, kColumns, 3, 2, Numbered::kYes);
  p.rates = take_numbers(args, lists[0].count);
  p.device.found_inf = take_flag(args);
  return p;
}

inline LambUpdate check_lamb_update(Args& args) {
  const List lists[] = {List(args), List(args), List(args), List(args), List(args)};
  constexpr int kColumns[] = {kParam, kGrad, kExpAvg, kExpAvgSq};
  LambUpdate p{};
  lists[4].check_count(args, lists[0].count, "params");
  p.rows = &fill_optimizer_rows(
      args, lists, kColumns, 4, 4,
      [&](int i, Row& row) { add_column(args, row, kUpdate, lists[4], i, lists[0]); },
      Numbered::kYes);
  p.beta1s = take_numbers(args, lists[0].count);
  p.beta2s = take_numbers(args, lists[0].count);
  p.epss = take_numbers(args, lists[0].count);
  p.weight_decays = take_numbers(args, lists[0].count);
  p.bias_corrections = take_numbers<int32_t>(args, lists[0].count, DType::kInt32);
  p.adamw = args.boolean();
  const TensorView step = args.tensor().is_scalar(DType::kInt32);
  p.device.step = step.data();
  p.device.is_int_step = true;
  p.device.inv_scale = args.tensor().is_scalar(DType::kFloat32).data<const float>();
  p.device.found_inf = take_flag(args);
  return p;
}

}  // namespace apex_te
