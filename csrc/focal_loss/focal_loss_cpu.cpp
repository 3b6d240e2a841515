// CPU kernels of focal_loss: a tile of elements for each task.
#include <algorithm>

#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"
#include "focal_loss/focal_loss.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

struct HostMath {
  static APEX_TE_HD float exp(float x) { return exp_fast(x); }
  static APEX_TE_HD float inverse(float u) { return 1.0f / u; }
  static APEX_TE_HD float add_log1p(float e, float base) { return base + log1p_fast(e); }
  static APEX_TE_HD float power(float gamma, float, float minus_log_p) {
    return exp_fast(-gamma * minus_log_p);
  }
};

constexpr int64_t kPiece = 256;  // of a tile: long float32 sums of equal losses drift

struct Tile {
  float values[kFocalTile], losses[kFocalTile];
};

// Losses and gradients, in place of the logits, of n columns from `col` on of a row.
APEX_TE_INLINE void row_terms(const FocalLoss& p, float factor, int64_t row, int64_t col, int64_t n,
                              float* x, float* losses) {
  const int64_t target = p.target[row];
  const int64_t whole =
      target == kFocalIgnored ? 0 : std::clamp(p.num_classes - col, int64_t{0}, n);
  const int64_t at = target >= col && target - col < whole ? target - col : -1;
  const float own = at < 0 ? 0.0f : x[at];
  const float weight = 1.0f - p.alpha;
  for (int64_t i = 0; i < whole; ++i) {
    const FocalTerm term = focal_term<HostMath>(x[i], p.gamma, p.smoothing);
    losses[i] = weight * term.power * term.ce;
    x[i] = weight * term.power * term.slope * factor;
  }
  if (at >= 0) {
    const FocalTerm term = focal_term<HostMath>(-own, p.gamma, p.smoothing);
    losses[at] = p.alpha * term.power * term.ce;
    x[at] = -(p.alpha * term.power * term.slope) * factor;
  }
  std::fill(losses + whole, losses + n, 0.0f);
  std::fill(x + whole, x + n, 0.0f);
}

APEX_TE_INLINE void run_tile(const FocalLoss& p, const RowDType& dtype, int64_t tile) {
  Tile& own = thread_scratch<Tile>();
  const int64_t begin = tile * kFocalTile, n = std::min(kFocalTile, p.numel() - begin);
  const float factor = p.factor();
  dtype.widen(p.logits, begin, n, own.values);
  for (int64_t done = 0; done < n;) {
    const int64_t row = (begin + done) / p.cols, col = (begin + done) % p.cols;
    const int64_t part = std::min(p.cols - col, n - done);
    row_terms(p, factor, row, col, part, own.values + done, own.losses + done);
    done += part;
  }
  double sum = 0.0;
  for (int64_t i = 0; i < n; i += kPiece) sum += sum_of(own.losses + i, std::min(kPiece, n - i));
  if (p.workspace) p.workspace[tile] = static_cast<float>(sum);
  if (p.grad) dtype.narrow(own.values, n, p.grad, begin);
}

APEX_TE_TARGET_PORTABLE void run_portable(const FocalLoss& p, const RowDType& dtype, int64_t tile) {
  run_tile(p, dtype, tile);
}
APEX_TE_TARGET_AVX2 void run_avx2(const FocalLoss& p, const RowDType& dtype, int64_t tile) {
  run_tile(p, dtype, tile);
}
APEX_TE_TARGET_AVX512 void run_avx512(const FocalLoss& p, const RowDType& dtype, int64_t tile) {
  run_tile(p, dtype, tile);
}

void run(const FocalLoss& p) {
  const RowDType dtype(p.dtype);
  const auto run = use_avx512() ? run_avx512 : use_avx2() ? run_avx2 : run_portable;
  parallel_for(p.tiles(), [&](int64_t tile) { run(p, dtype, tile); });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(focal_loss_fwd) {
  using namespace apex_te;
  const FocalLoss p = check_focal_loss_fwd(args);
  run(p);
  double sum = 0.0;
  for (int64_t tile = 0; tile < p.tiles(); ++tile) sum += p.workspace[tile];
  *p.loss = static_cast<float>(sum / *p.num_positives);
}

APEX_TE_DEFINE(focal_loss_bwd) {
  using namespace apex_te;
  run(check_focal_loss_bwd(args));
}

APEX_TE_DEFINE(focal_loss_scale) {
  using namespace apex_te;
  const FocalLoss p = check_focal_loss_scale(args);
  const RowDType dtype(p.dtype);
  const float factor = p.factor();
  parallel_for(p.tiles(), [&](int64_t tile) {
    float* values = thread_scratch<Tile>().values;
    const int64_t begin = tile * kFocalTile, n = std::min(kFocalTile, p.numel() - begin);
    dtype.widen(p.grad, begin, n, values);
    for (int64_t i = 0; i < n; ++i) values[i] *= factor;
    dtype.narrow(values, n, p.grad, begin);
  });
}
