// CPU kernels of transducer_loss: a sample's alpha or beta, or rows of the gradient, for each task.
#include <algorithm>

#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"
#include "common/numerics/exp.h"
#include "common/numerics/with_dtype.h"
#include "transducer_loss/transducer_loss.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kCols = 1024, kRows = 16;

void check_values(const char* name, const TransducerLoss& p) {
  check_lengths(name, p.cells, 1, "y_len");
  for (int64_t b = 0; b < p.cells.batch; ++b)
    for (int64_t u = 0; u < p.cells.g_len[b]; ++u) {
      const int64_t v = p.label_of(b, u);
      if (v < 0 || v >= p.cols)
        fail(kApexTeValueError, "%s: label[%lld, %lld] must be in [0, %lld), got %lld", name,
             static_cast<long long>(b), static_cast<long long>(u), static_cast<long long>(p.cols),
             static_cast<long long>(v));
    }
}

struct Scratch {
  float values[kCols];
};

// The logsumexp of a row of logits.
float log_sum_of(const TransducerLoss& p, const RowDType& dtype, int64_t row) {
  float* values = thread_scratch<Scratch>().values;
  float high = -HUGE_VALF, sum = 0.0f;
  for (int64_t col = 0; col < p.cols; col += kCols) {
    const int64_t n = std::min(kCols, p.cols - col);
    dtype.widen(p.x, row * p.cols + col, n, values);
    const float higher = std::max(high, max_of(values, n));
    const float base = higher == -HUGE_VALF ? 0.0f : higher;
    for (int64_t i = 0; i < n; ++i) values[i] = exp_fast(values[i] - base);
    sum = sum * exp_fast(high - base) + sum_of(values, n);
    high = higher;
  }
  return high + std::log(sum);
}

// A line has the values of a frame, those of the frame before until they are replaced.
template <typename T>
void fill_alpha(const TransducerLoss& p, int64_t b) {
  const int64_t first = p.cells.first(b), pitch = p.cells.pitch(b);
  const auto line = make_scratch<double>(p.cells.places);
  for (int64_t t = 0; t < p.cells.frames_of(b); ++t)
    for (int64_t u = 0; u < p.cells.places_of(b); ++u) {
      const int64_t row = first + t * pitch + u;
      double by_blank = kImpossible, by_label = kImpossible;
      if (t > 0) by_blank = line[u] + p.log_prob<T>(row - pitch, p.blank);
      if (u > 0) by_label = line[u - 1] + p.label_log_prob<T>(row - 1, b, u - 1);
      line[u] = t + u > 0 ? log_add(by_blank, by_label) : 0.0;
      p.put(false, p.at(b, t, u), line[u]);
    }
}

template <typename T>
void fill_beta(const TransducerLoss& p, int64_t b) {
  const int64_t frames = p.cells.frames_of(b), places = p.cells.places_of(b);
  const int64_t first = p.cells.first(b), pitch = p.cells.pitch(b);
  const auto line = make_scratch<double>(places);
  for (int64_t t = frames - 1; t >= 0; --t)
    for (int64_t u = places - 1; u >= 0; --u) {
      const int64_t row = first + t * pitch + u;
      double next = u + 1 == places ? 0.0 : kImpossible, by_label = kImpossible;
      if (t + 1 < frames) next = line[u];
      if (u + 1 < places) by_label = line[u + 1] + p.label_log_prob<T>(row, b, u);
      line[u] = log_add(next + p.log_prob<T>(row, p.blank), by_label);
      p.put(true, p.at(b, t, u), line[u]);
    }
  static_cast<T*>(p.loss)[b] = from_float<T>(static_cast<float>(-line[0]));
}

APEX_TE_INLINE void add_exponentials(const RowGradient& made, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = made.factor * exp_fast(values[i] + made.shift);
}
void add_portable(const RowGradient& made, int64_t n, float* values) {
  add_exponentials(made, n, values);
}
APEX_TE_TARGET_AVX2 void add_avx2(const RowGradient& made, int64_t n, float* values) {
  add_exponentials(made, n, values);
}
APEX_TE_TARGET_AVX512 void add_avx512(const RowGradient& made, int64_t n, float* values) {
  add_exponentials(made, n, values);
}

template <typename T>
void bwd_row(const TransducerLoss& p, const RowDType& dtype, int64_t row) {
  float* values = thread_scratch<Scratch>().values;
  const RowGradient made = row_gradient<T>(p, row);
  const auto add = use_avx512() ? add_avx512 : use_avx2() ? add_avx2 : add_portable;
  for (int64_t col = 0; col < p.cols; col += kCols) {
    const int64_t n = std::min(kCols, p.cols - col);
    if (p.fuse_softmax && made.shift != -HUGE_VALF) {
      dtype.widen(p.x, row * p.cols + col, n, values);
      add(made, n, values);
    } else {
      std::fill_n(values, n, 0.0f);
    }
    if (p.blank >= col && p.blank < col + n) values[p.blank - col] += made.at_blank;
    if (made.label >= col && made.label < col + n) values[made.label - col] += made.at_label;
    dtype.narrow(values, n, p.dx, row * p.cols + col);
  }
}

template <typename Body>
void for_rows(const TransducerLoss& p, const Body& body) {
  parallel_for((p.cells.rows + kRows - 1) / kRows, [&](int64_t chunk) {
    const int64_t end = std::min(p.cells.rows, (chunk + 1) * kRows);
    for (int64_t row = chunk * kRows; row < end; ++row) body(row);
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(transducer_loss_fwd) {
  using namespace apex_te;
  const TransducerLoss p = check_transducer_loss_fwd(args);
  check_values(args.name(), p);
  const RowDType dtype(p.dtype);
  if (p.log_sums)
    for_rows(p, [&](int64_t row) {
      if (p.cells.cell_of(row).counts) p.log_sums[row] = log_sum_of(p, dtype, row);
    });
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(2 * p.cells.batch, [&](int64_t task) {
      task % 2 ? fill_alpha<T>(p, task / 2) : fill_beta<T>(p, task / 2);
    });
  });
}

APEX_TE_DEFINE(transducer_loss_bwd) {
  using namespace apex_te;
  const TransducerLoss p = check_transducer_loss_bwd(args);
  check_values(args.name(), p);
  const RowDType dtype(p.dtype);
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_rows(p, [&](int64_t row) { bwd_row<T>(p, dtype, row); });
  });
}
