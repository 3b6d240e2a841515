// CPU kernels of scaled_softmax: a row at a time, held in fp32 between its passes.
#include <algorithm>
#include <memory>

#include "common/activation.h"
#include "common/cpu_vec.h"
#include "common/parallel.h"
#include "scaled_softmax/scaled_softmax.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kChunk = 2048;  // columns whose values stay in the L1 cache between loops
constexpr int64_t kElementsPerTask = 1 << 15;
constexpr float kInf = std::numeric_limits<float>::infinity();

// Columns in whole steps of the row loops: a row's values are followed by some that change nothing.
constexpr int64_t kStep = 32;
constexpr int64_t padded(int64_t n) { return (n + kStep - 1) / kStep * kStep; }

// Widens a row's visible columns into `values`, hidden ones as -Inf; returns the largest.
template <typename T>
APEX_TE_INLINE float load_scores(const T* x, const uint8_t* mask, int64_t visible, bool negative,
                                 float* values) {
  float max = -kInf;
  for (int64_t begin = 0; begin < visible; begin += kChunk) {
    const int64_t n = std::min(kChunk, visible - begin);
    float* v = values + begin;
    widen(x + begin, n, v);
    if (negative)
      for (int64_t i = 0; i < n; ++i) v[i] = -v[i];
    if (mask) {
      const uint8_t* m = mask + begin;
      for (int64_t i = 0; i < n; ++i) v[i] = m[i] ? -kInf : v[i];
    }
    std::fill(v + n, v + padded(n), -kInf);
    max = std::max(max, max_of(v, padded(n)));
  }
  return max;
}

template <typename T>
APEX_TE_INLINE void fwd_row(const T* x, const uint8_t* mask, int64_t visible, int64_t cols,
                            const SoftmaxScale& scale, float* values, T* y) {
  float max = load_scores(x, mask, visible, scale.negative, values);
  max = max == -kInf ? 0.0f : max;
  const float c = scale.scale_log2;
  float sum = 0.0f;
  for (int64_t begin = 0; begin < visible; begin += kChunk) {
    const int64_t n = padded(std::min(kChunk, visible - begin));
    float* v = values + begin;
    for (int64_t i = 0; i < n; ++i) v[i] = power_of_two((v[i] - max) * c);
    sum += sum_of(v, n);
  }
  const bool is_nan = sum != sum;
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int64_t begin = 0; begin < visible; begin += kChunk) {
    const int64_t n = std::min(kChunk, visible - begin);
    float* v = values + begin;
    for (int64_t i = 0; i < padded(n); ++i) v[i] *= factor;
    if (is_nan)
      for (int64_t i = 0; i < n; ++i) v[i] = mask && mask[begin + i] ? 0.0f : sum;
    narrow(v, n, y + begin);
  }
  std::fill(y + visible, y + cols, T{});
}

template <typename T>
APEX_TE_INLINE void bwd_row(const T* dy, const T* y, int64_t visible, int64_t cols, float scale,
                            T* dx) {
  float g[kChunk], p[kChunk];
  const auto load = [&](int64_t begin, int64_t n) {
    widen(dy + begin, n, g);
    widen(y + begin, n, p);
    std::fill(g + n, g + padded(n), 0.0f);
    std::fill(p + n, p + padded(n), 0.0f);
  };
  float lanes[kStep] = {};
  for (int64_t begin = 0; begin < visible; begin += kChunk) {
    const int64_t n = std::min(kChunk, visible - begin);
    load(begin, n);
    for (int64_t i = 0; i < padded(n); i += kStep)
      for (int64_t k = 0; k < kStep; ++k) {
        const float product = g[i + k] * p[i + k];
        lanes[k] += p[i + k] != 0.0f ? product : 0.0f;
      }
  }
  const float dot = sum_of(lanes, kStep);
  for (int64_t begin = 0; begin < visible; begin += kChunk) {
    const int64_t n = std::min(kChunk, visible - begin);
    if (visible > kChunk) load(begin, n);
    for (int64_t i = 0; i < padded(n); ++i) {
      const float value = (g[i] - dot) * (p[i] * scale);
      g[i] = p[i] != 0.0f ? value : 0.0f;
    }
    narrow(g, n, dx + begin);
  }
  std::fill(dx + visible, dx + cols, T{});
}

// The variants of an instruction set.
#define APEX_TE_SOFTMAX_ROWS(suffix, target)                                                   \
  template <typename T>                                                                        \
  target void fwd_row_##suffix(const T* x, const uint8_t* mask, int64_t visible, int64_t cols, \
                               const SoftmaxScale& scale, float* values, T* y) {               \
    fwd_row(x, mask, visible, cols, scale, values, y);                                         \
  }                                                                                            \
  template <typename T>                                                                        \
  target void bwd_row_##suffix(const T* dy, const T* y, int64_t visible, int64_t cols,         \
                               float scale, T* dx) {                                           \
    bwd_row(dy, y, visible, cols, scale, dx);                                                  \
  }
APEX_TE_SOFTMAX_ROWS(portable, )
APEX_TE_SOFTMAX_ROWS(avx2, APEX_TE_TARGET_AVX2)
APEX_TE_SOFTMAX_ROWS(avx512, APEX_TE_TARGET_AVX512)

// Calls body(row, query, scratch of one row) for every row.
template <typename Body>
void for_rows(const SoftmaxShape& shape, int64_t scratch, const Body& body) {
  const int64_t per_task = std::max<int64_t>(1, kElementsPerTask / shape.cols);
  parallel_for((shape.rows + per_task - 1) / per_task, [&](int64_t task) {
    const std::unique_ptr<float[]> values(scratch ? new float[scratch] : nullptr);
    const int64_t end = std::min(shape.rows, (task + 1) * per_task);
    for (int64_t row = task * per_task; row < end; ++row)
      body(row, row % shape.queries, values.get());
  });
}

template <typename T>
void fwd(const SoftmaxFwd& p) {
  const SoftmaxShape& shape = p.shape;
  const SoftmaxScale scale(p.scale);
  const auto run_row = use_avx512() ? fwd_row_avx512<T>
                       : use_avx2() ? fwd_row_avx2<T>
                                    : fwd_row_portable<T>;
  for_rows(shape, padded(shape.cols), [&](int64_t row, int64_t query, float* values) {
    const uint8_t* mask = p.mask.data;
    if (mask) {
      const int64_t head = row / shape.queries;
      mask += head / shape.heads * p.mask.batch_stride + head % shape.heads * p.mask.head_stride +
              query * p.mask.query_stride;
    }
    run_row(p.x.data<const T>() + row * shape.cols, mask,
            shape.causal ? shape.visible(query) : shape.cols, shape.cols, scale, values,
            p.y.data<T>() + row * shape.cols);
  });
}

template <typename T>
void bwd(const SoftmaxBwd& p) {
  const SoftmaxShape& shape = p.shape;
  const auto run_row = use_avx512() ? bwd_row_avx512<T>
                       : use_avx2() ? bwd_row_avx2<T>
                                    : bwd_row_portable<T>;
  for_rows(shape, 0, [&](int64_t row, int64_t query, float*) {
    const int64_t begin = row * shape.cols;
    run_row(p.dy.data<const T>() + begin, p.y.data<const T>() + begin,
            shape.causal ? shape.visible(query) : shape.cols, shape.cols, p.scale,
            p.dx.data<T>() + begin);
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(scaled_softmax_fwd) {
  using namespace apex_te;
  const SoftmaxFwd p = check_scaled_softmax_fwd(args);
  if (p.shape.rows == 0 || p.shape.cols == 0) return;
  switch (p.x.dtype()) {
    case DType::kFloat32:
      return fwd<float>(p);
    case DType::kFloat16:
      return fwd<Half>(p);
    default:
      return fwd<BFloat16>(p);
  }
}

APEX_TE_DEFINE(scaled_softmax_bwd) {
  using namespace apex_te;
  const SoftmaxBwd p = check_scaled_softmax_bwd(args);
  if (p.shape.rows == 0 || p.shape.cols == 0) return;
  switch (p.dy.dtype()) {
    case DType::kFloat32:
      return bwd<float>(p);
    case DType::kFloat16:
      return bwd<Half>(p);
    default:
      return bwd<BFloat16>(p);
  }
}
