// CPU kernels of batch_norm: tiles of up to 256 columns, one thread each. Sums are fp64.
#include <algorithm>

#include "batch_norm/batch_norm.h"
#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"
#include "common/numerics/with_dtype.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kTile = kBatchNormTile;
constexpr int64_t kRows = 64;        // of a task of elements
constexpr int64_t kShortRow = 16;    // rows of data that are not worth a loop of their own
constexpr int64_t kRowChunk = 1024;  // elements of a row that are one task

struct Tile {
  double sums[2][kTile];
  float x[kTile], dy[kTile], z[kTile], out[kTile];
  float mean[kTile], scale[kTile], shift[kTile], mean_dy[kTile], slope[kTile];

  // The column's values are those of its channel.
  template <typename T>
  void set(const BatchNorm& p, int64_t column, int64_t channel, float inv_total) {
    const BatchNormChannel at = batch_norm_channel<T>(p, channel, inv_total);
    mean[column] = at.mean;
    scale[column] = at.scale;
    shift[column] = at.shift;
    mean_dy[column] = at.mean_dy;
    slope[column] = at.slope;
  }
  BatchNormChannel channel(int64_t column) const {
    return {mean[column], scale[column], shift[column], mean_dy[column], slope[column]};
  }
  // n elements from an index on.
  void load(const BatchNorm& p, const RowDType& dtype, int64_t at, int64_t n) {
    dtype.widen(p.x, at, n, x);
    if (p.dy) dtype.widen(p.dy, at, n, dy);
    if (p.z && p.relu) dtype.widen(p.z, at, n, z);
  }
  void mask(const BatchNorm& p, int64_t n) {
    if (!p.relu) return;
    for (int64_t j = 0; j < n; ++j)
      dy[j] = relu_gradient(channel(j).activation(x[j], p.z ? z[j] : 0.0f), dy[j]);
  }
};

// Columns of a tile that begins at `column` of a matrix [n, c * s].
void set_columns(const BatchNorm& p, int64_t column, int64_t n, float inv_total, Tile& tile) {
  with_dtype(p.dtype, [&](auto zero) {
    for (int64_t j = 0; j < n; ++j) tile.set<decltype(zero)>(p, j, (column + j) / p.s, inv_total);
  });
}
void set_channel(const BatchNorm& p, int64_t channel, float inv_total, Tile& tile) {
  with_dtype(p.dtype, [&](auto zero) {
    for (int64_t j = 0; j < kTile; ++j) tile.set<decltype(zero)>(p, j, channel, inv_total);
  });
}

// Adds the loaded elements to the tile's sums. A column's mean is subtracted, for statistics its
// pivot.
void add(const BatchNorm& p, int64_t n, Tile& tile) {
  if (!p.dy) {
    for (int64_t j = 0; j < n; ++j) {
      const double apart = static_cast<double>(tile.x[j]) - tile.mean[j];
      tile.sums[0][j] += apart;
      tile.sums[1][j] += apart * apart;
    }
    return;
  }
  tile.mask(p, n);
  for (int64_t j = 0; j < n; ++j) {
    tile.sums[0][j] += tile.dy[j];
    tile.sums[1][j] += static_cast<double>(tile.dy[j]) * (tile.x[j] - tile.mean[j]);
  }
}

// What a line leaves of a column: the sums, or the mean's distance from the pivot and the sum of
// squared distances from the mean.
void leave(const BatchNorm& p, int64_t line, int64_t column, double first, double second) {
  if (!p.dy) {
    first /= static_cast<double>(p.split.count(line));
    second = std::max(second - first * first * static_cast<double>(p.split.count(line)), 0.0);
  }
  float* at = p.workspace + line * 2 * p.split.width + column;
  at[0] = static_cast<float>(first);
  at[p.split.width] = static_cast<float>(second);
}

void reduce_columns(const BatchNorm& p) {
  const BatchNormSplit& split = p.split;
  const RowDType dtype(p.dtype);
  const int64_t tiles = (split.width + kTile - 1) / kTile;
  parallel_for(split.lines * tiles, [&](int64_t task) {
    Tile& tile = thread_scratch<Tile>();
    const int64_t line = task / tiles, column = task % tiles * kTile;
    const int64_t n = std::min(kTile, split.width - column);
    std::fill_n(tile.sums[0], 2 * kTile, 0.0);
    if (p.dy)
      set_columns(p, column, n, 0.0f, tile);
    else
      for (int64_t j = 0; j < n; ++j) tile.mean[j] = batch_norm_pivot(p, (column + j) / p.s);
    for (int64_t row = split.begin(line); row < split.begin(line + 1); ++row) {
      tile.load(p, dtype, row * split.width + column, n);
      add(p, n, tile);
    }
    for (int64_t j = 0; j < n; ++j) leave(p, line, column + j, tile.sums[0][j], tile.sums[1][j]);
  });
}

void reduce_rows(const BatchNorm& p) {
  const BatchNormSplit& split = p.split;
  const RowDType dtype(p.dtype);
  parallel_for(p.c * split.lines, [&](int64_t task) {
    Tile& tile = thread_scratch<Tile>();
    const int64_t channel = task / split.lines, line = task % split.lines;
    std::fill_n(tile.sums[0], 2 * kTile, 0.0);
    int64_t at = split.elements(split.begin(line));
    const int64_t end = split.elements(split.begin(line + 1));
    const auto index = [&] { return (at / p.s * p.c + channel) * p.s + at % p.s; };
    if (p.dy) {
      set_channel(p, channel, 0.0f, tile);
    } else {
      std::fill_n(tile.mean, kTile, batch_norm_pivot(p, channel));
    }
    while (at < end) {
      const int64_t n = std::min({kTile, end - at, p.s - at % p.s});
      tile.load(p, dtype, index(), n);
      add(p, n, tile);
      at += n;
    }
    double sums[2] = {};
    for (int i = 0; i < 2; ++i)
      for (int64_t j = 0; j < kTile; ++j) sums[i] += tile.sums[i][j];
    leave(p, line, channel, sums[0], sums[1]);
  });
}

// Calls body(count of a column's elements, first, second) for what the lines left of a channel.
template <typename Body>
void for_parts(const BatchNorm& p, int64_t channel, const Body& body) {
  const BatchNormSplit& split = p.split;
  const int64_t columns = split.by_columns ? p.s : 1;
  for (int64_t line = 0; line < split.lines; ++line) {
    const float* at = p.workspace + line * 2 * split.width + channel * columns;
    for (int64_t j = 0; j < columns; ++j)
      body(static_cast<double>(split.count(line)), at[j], at[split.width + j]);
  }
}

void reduce(const BatchNorm& p) {
  if (p.numel() == 0)
    std::fill_n(p.workspace, p.split.lines * 2 * p.split.width, 0.0f);
  else if (p.split.by_columns)
    reduce_columns(p);
  else
    reduce_rows(p);
}

// Elements of forward or backward from an index on, whose columns are the tile's.
void run_elements(const BatchNorm& p, const RowDType& dtype, int64_t at, int64_t n, Tile& tile) {
  tile.load(p, dtype, at, n);
  if (p.y) {
    if (p.z && !p.relu) dtype.widen(p.z, at, n, tile.z);
    for (int64_t j = 0; j < n; ++j) {
      const float value = tile.channel(j).activation(tile.x[j], p.z ? tile.z[j] : 0.0f);
      tile.out[j] = p.relu ? relu_of(value) : value;
    }
    return dtype.narrow(tile.out, n, p.y, at);
  }
  tile.mask(p, n);
  if (p.dz) dtype.narrow(tile.dy, n, p.dz, at);
  if (!p.dx) return;
  for (int64_t j = 0; j < n; ++j) tile.out[j] = tile.channel(j).gradient(tile.x[j], tile.dy[j]);
  dtype.narrow(tile.out, n, p.dx, at);
}

void run_batch_norm(const BatchNorm& p) {
  if (p.numel() == 0) return;
  const RowDType dtype(p.dtype);
  double total = p.counts ? 0.0 : static_cast<double>(p.n * p.s);
  for (int64_t i = 0; i < p.ranks; ++i) total += p.counts[i];
  const float inv_total = total > 0.0 ? static_cast<float>(1.0 / total) : 0.0f;
  const bool is_short = p.s < kShortRow;
  const int64_t cols = is_short ? p.c * p.s : p.s;
  const int64_t tile_cols = is_short ? kTile : kRowChunk,
                tiles = (cols + tile_cols - 1) / tile_cols;
  const int64_t rows = is_short ? p.n : p.n * p.c, task_rows = is_short ? kRows : 1;
  parallel_for((rows + task_rows - 1) / task_rows * tiles, [&](int64_t task) {
    Tile& tile = thread_scratch<Tile>();
    const int64_t column = task % tiles * tile_cols, n = std::min(tile_cols, cols - column);
    const int64_t row = task / tiles * task_rows;
    if (is_short)
      set_columns(p, column, n, inv_total, tile);
    else
      set_channel(p, row % p.c, inv_total, tile);
    for (int64_t r = row; r < std::min(rows, row + task_rows); ++r)
      for (int64_t j = 0; j < n; j += kTile)
        run_elements(p, dtype, r * cols + column + j, std::min(kTile, n - j), tile);
  });
}

// Mean and biased variance of each channel.
void run_stats(const BatchNorm& p) {
  reduce(p);
  parallel_for(p.c, [&](int64_t channel) {
    double total = 0.0, mean = 0.0, squares = 0.0;
    for_parts(p, channel, [&](double count, float part, float) {
      total += count;
      mean += count * part;
    });
    if (total > 0.0) mean /= total;
    for_parts(p, channel, [&](double count, float part, float of_part) {
      squares += of_part + count * (part - mean) * (part - mean);
    });
    p.results[0][channel] = static_cast<float>(batch_norm_pivot(p, channel) + mean);
    p.results[1][channel] = total > 0.0 ? static_cast<float>(squares / total) : 0.0f;
  });
}

void run_combine(const BatchNormCombine& p) {
  for (int64_t channel = 0; channel < p.channels; ++channel) combine_channel(p, channel);
}

// Sums of each channel, and gradients of weight and bias.
void run_sums(const BatchNorm& p) {
  reduce(p);
  const RowDType params(p.param_grads_fp32 ? DType::kFloat32 : p.dtype);
  parallel_for(p.c, [&](int64_t channel) {
    double sums[2] = {};
    for_parts(p, channel, [&](double, float first, float second) {
      sums[0] += first;
      sums[1] += second;
    });
    const float results[2] = {static_cast<float>(sums[0]), static_cast<float>(sums[1])};
    for (int i = 0; i < 2; ++i) p.results[i][channel] = results[i];
    const float grads[2] = {static_cast<float>(sums[1] * p.inv_std[channel]), results[0]};
    for (int i = 0; i < 2; ++i)
      if (p.param_grads[i]) params.narrow(grads + i, 1, p.param_grads[i], channel);
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(batch_norm_stats) { apex_te::run_stats(apex_te::check_batch_norm_stats(args)); }

APEX_TE_DEFINE(batch_norm_combine) {
  apex_te::run_combine(apex_te::check_batch_norm_combine(args));
}

APEX_TE_DEFINE(batch_norm_fwd) { apex_te::run_batch_norm(apex_te::check_batch_norm_fwd(args)); }

APEX_TE_DEFINE(batch_norm_reduce) { apex_te::run_sums(apex_te::check_batch_norm_reduce(args)); }

APEX_TE_DEFINE(batch_norm_bwd) { apex_te::run_batch_norm(apex_te::check_batch_norm_bwd(args)); }

APEX_TE_DEFINE(batch_norm_train_fwd) {
  using namespace apex_te;
  const BatchNormTrainFwd steps = check_batch_norm_train_fwd(args);
  run_stats(steps.stats);
  run_combine(steps.combine);
  run_batch_norm(steps.fwd);
}

APEX_TE_DEFINE(batch_norm_train_bwd) {
  using namespace apex_te;
  const BatchNormTrainBwd steps = check_batch_norm_train_bwd(args);
  run_sums(steps.reduce);
  run_batch_norm(steps.bwd);
}
