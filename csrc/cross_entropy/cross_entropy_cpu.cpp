// CPU kernel of cross_entropy: one row a thread; a row's exponentials stay in cache for the
// gradient.
#include <cmath>
#include <limits>

#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"
#include "common/numerics/exp.h"
#include "common/numerics/with_dtype.h"
#include "cross_entropy/cross_entropy.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kRowsPerChunk = 8;

struct RowFactors {
  float smoothing;
  double factor;  // 1 / num_valid, times grad_output in backward
};

inline double grad_factor(const CrossEntropy& p, float grad_output) {
  return p.num_valid ? static_cast<double>(grad_output) / *p.num_valid : grad_output;
}

// Puts the gradient of a row in the place of its exponentials.
APEX_TE_INLINE void grad_of_exps(float* values, int64_t n, int64_t target, float exp_sum,
                                 const RowFactors& f) {
  const double scale = f.factor / exp_sum, smooth = f.factor * f.smoothing / static_cast<double>(n);
  const double at_target = values[target] * scale - smooth - f.factor * (1.0 - f.smoothing);
  const float scale_f = static_cast<float>(scale), smooth_f = static_cast<float>(smooth);
  for (int64_t i = 0; i < n; ++i) values[i] = values[i] * scale_f - smooth_f;
  values[target] = static_cast<float>(at_target);
}

// sum_of exp(x - max), without a pass of its own; kKeep: the exponentials take the place of x.
template <bool kKeep>
APEX_TE_INLINE float exp_sum_of(float* x, int64_t n, float max) {
  constexpr int64_t kLanes = 64;
  float lanes[kLanes] = {};
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    float e[kLanes];
    for (int64_t k = 0; k < kLanes; ++k) e[k] = exp_fast(x[i + k] - max);
    for (int64_t k = 0; k < kLanes; ++k) lanes[k] += e[k];
    if (kKeep) std::copy_n(e, kLanes, x + i);
  }
  for (int64_t i = whole; i < n; ++i) {
    const float e = exp_fast(x[i] - max);
    lanes[i - whole] += e;
    if (kKeep) x[i] = e;
  }
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  return lanes[0];
}

// Loss of one row; `values` is scratch of p.cols floats.
APEX_TE_INLINE float row_loss_and_grad(const CrossEntropy& p, const RowDType& dtype, int64_t row,
                                       int64_t target, const RowFactors& f, float* values) {
  const int64_t n = p.cols;
  if (dtype.is_float() && !p.grad)
    values = p.logits.data<float>() + row * n;  // only read
  else
    dtype.widen(p.logits.data<const void>(), row * n, n, values);
  const float target_logit = values[target];
  const float total = f.smoothing != 0.0f ? sum_of(values, n) : 0.0f;
  const float max = max_of(values, n);
  const float exp_sum =
      p.grad ? exp_sum_of<true>(values, n, max) : exp_sum_of<false>(values, n, max);
  if (p.stats) {
    p.stats[2 * row] = max;
    p.stats[2 * row + 1] = exp_sum;
  }
  // The loss is a difference of larger numbers, and a sum of losses adds up their rounding.
  const double lse = max + std::log(static_cast<double>(exp_sum));
  if (p.grad) {
    grad_of_exps(values, n, target, exp_sum, f);
    dtype.narrow(values, n, p.grad.data(), row * n);
  }
  double loss = (1.0 - f.smoothing) * (lse - target_logit);
  if (f.smoothing != 0.0f) loss += f.smoothing * (lse - total / static_cast<double>(n));
  return static_cast<float>(loss);
}

// The gradient of one row; `values` is scratch of p.cols floats.
APEX_TE_INLINE void row_grad(const CrossEntropy& p, const RowDType& dtype, int64_t row,
                             int64_t target, const RowFactors& f, float* values) {
  const int64_t n = p.cols;
  const float max = p.stats[2 * row];
  dtype.widen(p.logits.data<const void>(), row * n, n, values);
  for (int64_t i = 0; i < n; ++i) values[i] = exp_fast(values[i] - max);
  grad_of_exps(values, n, target, p.stats[2 * row + 1], f);
  dtype.narrow(values, n, p.grad.data(), row * n);
}

APEX_TE_TARGET_PORTABLE float row_portable(const CrossEntropy& p, const RowDType& dtype,
                                           int64_t row, int64_t target, const RowFactors& f,
                                           float* values) {
  return row_loss_and_grad(p, dtype, row, target, f, values);
}
APEX_TE_TARGET_AVX2 float row_avx2(const CrossEntropy& p, const RowDType& dtype, int64_t row,
                                   int64_t target, const RowFactors& f, float* values) {
  return row_loss_and_grad(p, dtype, row, target, f, values);
}

APEX_TE_TARGET_AVX512 float row_avx512(const CrossEntropy& p, const RowDType& dtype, int64_t row,
                                       int64_t target, const RowFactors& f, float* values) {
  return row_loss_and_grad(p, dtype, row, target, f, values);
}

APEX_TE_TARGET_PORTABLE void grad_portable(const CrossEntropy& p, const RowDType& dtype,
                                           int64_t row, int64_t target, const RowFactors& f,
                                           float* values) {
  row_grad(p, dtype, row, target, f, values);
}
APEX_TE_TARGET_AVX2 void grad_avx2(const CrossEntropy& p, const RowDType& dtype, int64_t row,
                                   int64_t target, const RowFactors& f, float* values) {
  row_grad(p, dtype, row, target, f, values);
}
APEX_TE_TARGET_AVX512 void grad_avx512(const CrossEntropy& p, const RowDType& dtype, int64_t row,
                                       int64_t target, const RowFactors& f, float* values) {
  row_grad(p, dtype, row, target, f, values);
}

void check_targets(const CrossEntropy& p, const char* name) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t t = p.target[row];
    if (t != p.target.ignore_index && (t < 0 || t >= p.cols))
      fail(kApexTeValueError,
           "%s: target[%lld] must be in [0, %lld) or ignore_index %lld, got %lld", name,
           static_cast<long long>(row), static_cast<long long>(p.cols),
           static_cast<long long>(p.target.ignore_index), static_cast<long long>(t));
  }
}

// Calls run(row, target, scratch of p.cols floats) for the rows that count, and makes the others'
// losses and gradients 0.
template <typename Run>
void for_rows(const CrossEntropy& p, const RowDType& dtype, const Run& run) {
  parallel_for((p.rows + kRowsPerChunk - 1) / kRowsPerChunk, [&](int64_t chunk) {
    const auto values = make_scratch<float>(p.cols);
    const int64_t end = std::min(p.rows, (chunk + 1) * kRowsPerChunk);
    for (int64_t row = chunk * kRowsPerChunk; row < end; ++row) {
      const int64_t target = p.target[row];
      if (target != p.target.ignore_index) {
        run(row, target, values.get());
        continue;
      }
      if (p.loss) p.loss[row] = 0.0f;
      if (p.grad) memset(dtype.at(p.grad.data(), row * p.cols), 0, p.cols * dtype.size());
    }
  });
}

void fwd(const CrossEntropy& p) {
  check_targets(p, "cross_entropy_fwd");
  const auto run_row = use_avx512() ? row_avx512 : use_avx2() ? row_avx2 : row_portable;
  const RowDType dtype(p.logits.dtype());
  const RowFactors f{p.label_smoothing, grad_factor(p, 1.0f)};
  for_rows(p, dtype, [&](int64_t row, int64_t target, float* values) {
    p.loss[row] = run_row(p, dtype, row, target, f, values);
  });
}

void bwd(const CrossEntropyBwd& p) {
  if (p.grad_output.made && *p.grad_output.data == 1.0f) return;
  check_targets(p, "cross_entropy_bwd");
  const auto run_row = use_avx512() ? grad_avx512 : use_avx2() ? grad_avx2 : grad_portable;
  const RowDType dtype(p.logits.dtype());
  for_rows(p, dtype, [&](int64_t row, int64_t target, float* values) {
    const RowFactors f{p.label_smoothing, grad_factor(p, p.grad_output[row])};
    run_row(p, dtype, row, target, f, values);
  });
}

template <typename T>
void scale(const CrossEntropyScale& p) {
  if (p.is_kept()) return;
  const float factor = *p.grad_output;
  parallel_for(p.rows, [&](int64_t row) {
    if (p.is_kept(row)) return;
    T* grad = static_cast<T*>(p.grad) + row * p.cols;
    for (int64_t i = 0; i < p.cols; ++i) grad[i] = from_float<T>(to_float(grad[i]) * factor);
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(cross_entropy_fwd) {
  using namespace apex_te;
  const CrossEntropy p = check_cross_entropy_fwd(args);
  fwd(p);
}

APEX_TE_DEFINE(cross_entropy_count) {
  using namespace apex_te;
  const CrossEntropyCount p = check_cross_entropy_count(args);
  int32_t count = 0;
  for (int64_t row = 0; row < p.target.rows; ++row) count += p.target[row] != p.target.ignore_index;
  *p.num_valid = count;
}

APEX_TE_DEFINE(cross_entropy_sum) {
  using namespace apex_te;
  const CrossEntropySum p = check_cross_entropy_sum(args);
  double sum = 0.0;
  for (int64_t row = 0; row < p.rows; ++row) sum += p.loss[row];
  *p.total = static_cast<float>(p.num_valid ? sum / *p.num_valid : sum);
}

APEX_TE_DEFINE(cross_entropy_bwd) {
  using namespace apex_te;
  const CrossEntropyBwd p = check_cross_entropy_bwd(args);
  bwd(p);
}

APEX_TE_DEFINE(cross_entropy_scale) {
  using namespace apex_te;
  const CrossEntropyScale p = check_cross_entropy_scale(args);
  with_dtype(p.dtype, [&](auto zero) { scale<decltype(zero)>(p); });
}
