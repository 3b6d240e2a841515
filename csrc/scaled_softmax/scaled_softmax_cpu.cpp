// CPU kernels of scaled_softmax: a row at a time, held in fp32 between its passes.
#include <algorithm>

#include "common/activation/functions.h"
#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"
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
APEX_TE_INLINE float load_scores(const RowDType& dtype, const void* x, const uint8_t* mask,
                                 int64_t visible, bool negative, float* values) {
  float max = -kInf;
  for (int64_t begin = 0; begin < visible; begin += kChunk) {
    const int64_t n = std::min(kChunk, visible - begin);
    float* v = values + begin;
    dtype.widen(x, begin, n, v);
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

// Columns of a row that are hidden.
APEX_TE_INLINE void fill_hidden(const RowDType& dtype, void* row, int64_t visible, int64_t cols) {
  memset(dtype.at(row, visible), 0, (cols - visible) * dtype.size());
}

APEX_TE_INLINE void fwd_row(const RowDType& dtype, const void* x, const uint8_t* mask,
                            int64_t visible, int64_t cols, const SoftmaxScale& scale, float* values,
                            void* y) {
  float max = load_scores(dtype, x, mask, visible, scale.negative, values);
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
    dtype.narrow(v, n, y, begin);
  }
  fill_hidden(dtype, y, visible, cols);
}

APEX_TE_INLINE void bwd_row(const RowDType& dtype, const void* dy, const void* y, int64_t visible,
                            int64_t cols, float scale, float* values, void* dx) {
  float *g = values, *p = values + kChunk;
  const auto load = [&](int64_t begin, int64_t n) {
    dtype.widen(dy, begin, n, g);
    dtype.widen(y, begin, n, p);
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
    dtype.narrow(g, n, dx, begin);
  }
  fill_hidden(dtype, dx, visible, cols);
}

// The variants of an instruction set.
#define APEX_TE_SOFTMAX_ROWS(suffix, target)                                              \
  target void fwd_row_##suffix(const RowDType& dtype, const void* x, const uint8_t* mask, \
                               int64_t visible, int64_t cols, const SoftmaxScale& scale,  \
                               float* values, void* y) {                                  \
    fwd_row(dtype, x, mask, visible, cols, scale, values, y);                             \
  }                                                                                       \
  target void bwd_row_##suffix(const RowDType& dtype, const void* dy, const void* y,      \
                               int64_t visible, int64_t cols, float scale, float* values, \
                               void* dx) {                                                \
    bwd_row(dtype, dy, y, visible, cols, scale, values, dx);                              \
  }
APEX_TE_SOFTMAX_ROWS(portable, )
APEX_TE_SOFTMAX_ROWS(avx2, APEX_TE_TARGET_AVX2)
APEX_TE_SOFTMAX_ROWS(avx512, APEX_TE_TARGET_AVX512)

// Calls body(row, query, scratch of one row) for every row.
template <typename Body>
void for_rows(const SoftmaxShape& shape, int64_t scratch, const Body& body) {
  const int64_t per_task = std::max<int64_t>(1, kElementsPerTask / shape.cols);
  parallel_for((shape.rows + per_task - 1) / per_task, [&](int64_t task) {
    const auto values = make_scratch<float>(scratch);
    const int64_t end = std::min(shape.rows, (task + 1) * per_task);
    for (int64_t row = task * per_task; row < end; ++row)
      body(row, row % shape.queries, values.get());
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(scaled_softmax_fwd) {
  using namespace apex_te;
  const SoftmaxFwd p = check_scaled_softmax_fwd(args);
  const SoftmaxShape& shape = p.shape;
  if (shape.rows == 0 || shape.cols == 0) return;
  const SoftmaxScale scale(p.scale);
  const RowDType dtype(p.x.dtype());
  const auto run_row = use_avx512() ? fwd_row_avx512 : use_avx2() ? fwd_row_avx2 : fwd_row_portable;
  for_rows(shape, padded(shape.cols), [&](int64_t row, int64_t query, float* values) {
    const uint8_t* mask = p.mask.data;
    if (mask) {
      const int64_t head = row / shape.queries;
      mask += head / shape.heads * p.mask.batch_stride + head % shape.heads * p.mask.head_stride +
              query * p.mask.query_stride;
    }
    run_row(dtype, dtype.at(p.x.data<const void>(), row * shape.cols), mask,
            shape.causal ? shape.visible(query) : shape.cols, shape.cols, scale, values,
            dtype.at(p.y.data(), row * shape.cols));
  });
}

APEX_TE_DEFINE(scaled_softmax_bwd) {
  using namespace apex_te;
  const SoftmaxBwd p = check_scaled_softmax_bwd(args);
  const SoftmaxShape& shape = p.shape;
  if (shape.rows == 0 || shape.cols == 0) return;
  const RowDType dtype(p.dy.dtype());
  const auto run_row = use_avx512() ? bwd_row_avx512 : use_avx2() ? bwd_row_avx2 : bwd_row_portable;
  for_rows(shape, 2 * kChunk, [&](int64_t row, int64_t query, float* values) {
    const int64_t begin = row * shape.cols;
    run_row(dtype, dtype.at(p.dy.data<const void>(), begin),
            dtype.at(p.y.data<const void>(), begin),
            shape.causal ? shape.visible(query) : shape.cols, shape.cols, p.scale, values,
            dtype.at(p.dx.data(), begin));
  });
}
