// CPU kernel of cross_entropy: one row a thread; a row's exponentials stay in cache for the
// gradient.
#include <cmath>
#include <limits>
#include <vector>

#include "common/cpu_rows.h"
#include "common/exp.h"
#include "common/parallel.h"
#include "cross_entropy/cross_entropy.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kRowsPerChunk = 8;

struct RowFactors {
  float smoothing, factor;  // factor: 1 / num_valid
};

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
  // The loss is a difference of larger numbers, and a sum of losses adds up their rounding.
  const double lse = max + std::log(static_cast<double>(exp_sum));
  if (p.grad) {
    const float inv_sum = 1.0f / exp_sum, smooth = f.smoothing / static_cast<float>(n);
    const float p_target = values[target];
    for (int64_t i = 0; i < n; ++i) values[i] = (values[i] * inv_sum - smooth) * f.factor;
    values[target] = (p_target * inv_sum - smooth - (1.0f - f.smoothing)) * f.factor;
    dtype.narrow(values, n, p.grad.data(), row * n);
  }
  double loss = (1.0 - f.smoothing) * (lse - target_logit);
  if (f.smoothing != 0.0f) loss += f.smoothing * (lse - total / static_cast<double>(n));
  return static_cast<float>(loss);
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

void fwd(const CrossEntropy& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t t = p.target[row];
    if (t != p.target.ignore_index && (t < 0 || t >= p.cols))
      fail(kApexTeValueError,
           "cross_entropy_fwd: target[%lld] must be in [0, %lld) or ignore_index %lld, got %lld",
           static_cast<long long>(row), static_cast<long long>(p.cols),
           static_cast<long long>(p.target.ignore_index), static_cast<long long>(t));
  }
  const auto run_row = use_avx512() ? row_avx512 : use_avx2() ? row_avx2 : row_portable;
  const RowDType dtype(p.logits.dtype());
  const RowFactors f{p.label_smoothing,
                     p.num_valid ? 1.0f / static_cast<float>(*p.num_valid) : 1.0f};
  parallel_for((p.rows + kRowsPerChunk - 1) / kRowsPerChunk, [&](int64_t chunk) {
    std::vector<float> values(static_cast<size_t>(p.cols));
    const int64_t end = std::min(p.rows, (chunk + 1) * kRowsPerChunk);
    for (int64_t row = chunk * kRowsPerChunk; row < end; ++row) {
      const int64_t target = p.target[row];
      if (target != p.target.ignore_index) {
        p.loss[row] = run_row(p, dtype, row, target, f, values.data());
        continue;
      }
      p.loss[row] = 0.0f;
      if (p.grad) memset(dtype.at(p.grad.data(), row * p.cols), 0, p.cols * dtype.size());
    }
  });
}

template <typename T>
void bwd(const CrossEntropyBwd& p) {
  parallel_for(p.rows, [&](int64_t row) {
    const float factor = p.grad_output[p.per_row ? row : 0];
    if (factor == 1.0f) return;
    T* grad = p.grad.data<T>() + row * p.cols;
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
  switch (p.grad.dtype()) {
    case DType::kFloat32:
      return bwd<float>(p);
    case DType::kFloat16:
      return bwd<Half>(p);
    default:
      return bwd<BFloat16>(p);
  }
}
