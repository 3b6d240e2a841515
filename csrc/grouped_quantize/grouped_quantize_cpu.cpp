// CPU kernels of grouped_quantize: the reference of the CUDA kernels, tiles shared out over
// threads.
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/cpu/quantize.h"
#include "grouped_quantize/grouped_quantize.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kTileRows = kQuantizePartRows;
constexpr int64_t kTileCols = kQuantizeTileCols;

// One tile's rows of x, of which `rows` exist and `columns` go to the columnwise copy.
struct Part {
  int64_t row, rows, column, columns;
};

template <typename T>
uint32_t quantize_part(const GroupedQuantize& p, const T* x, uint8_t* rowwise, uint8_t* columnwise,
                       const Part& part, int64_t col0, bool streamed,
                       const FP8RowEncoder<T>& encode) {
  uint8_t* const codes = thread_scratch<QuantizeScratch>().codes;
  const int64_t cols = std::min(kTileCols, p.cols - col0);
  uint32_t amax = 0;
  for (int64_t r = 0; r < part.rows; ++r) {
    const int64_t at = (part.row + r) * p.cols + col0;
    uint8_t* row_codes = codes + r * kTileCols;
    if (r + kQuantizeRowsAhead < part.rows)
      prefetch_row(x + at + kQuantizeRowsAhead * p.cols, cols);
    amax = std::max(amax, encode(x + at, cols, row_codes));
    if (rowwise && streamed)
      stream_bytes(rowwise + at, row_codes, cols);
    else if (rowwise)
      std::copy_n(row_codes, cols, rowwise + at);
  }
  if (columnwise) {
    std::fill(codes + part.rows * kTileCols, codes + part.columns * kTileCols, uint8_t{0});
    transpose_bytes(codes, kTileCols, part.columns, cols,
                    columnwise + col0 * p.columns + part.column, p.columns, streamed);
  }
  if (streamed) finish_stream();
  return amax;
}

template <typename T>
uint32_t amax_of_part(const GroupedQuantize& p, const T* x, const Part& part) {
  uint32_t amax = 0;
  for (int64_t r = 0; r < part.rows; ++r)
    amax = std::max(amax, amax_of_chunk<T>(x + (part.row + r) * p.cols, p.cols));
  return amax;
}

// Group g: rows begin to end of x, to columns from `column` on, at least as many.
template <typename T>
void quantize_group(const GroupedQuantize& p, int g, const T* x, uint8_t* rowwise,
                    uint8_t* columnwise, int64_t begin, int64_t end, int64_t column,
                    int64_t column_end) {
  const bool writes = rowwise || columnwise;
  const bool streamed = p.rows * p.cols >= kStreamedBytes;
  const auto encode = fp8_row_encoder<T>(p.codes, writes ? p.scale[g] : 1.0f);
  const int64_t row_tiles = (column_end - column + kTileRows - 1) / kTileRows;
  const int64_t col_tiles = (p.cols + kTileCols - 1) / kTileCols;
  std::atomic<uint32_t> amax{0};
  parallel_for(row_tiles * (writes ? col_tiles : 1), [&](int64_t i) {
    const int64_t done = (writes ? i / col_tiles : i) * kTileRows;
    const Part part{begin + done, std::clamp<int64_t>(end - begin - done, 0, kTileRows),
                    column + done, std::min(kTileRows, column_end - column - done)};
    fold_amax(amax, writes ? quantize_part(p, x, rowwise, columnwise, part,
                                           i % col_tiles * kTileCols, streamed, encode)
                           : amax_of_part(p, x, part));
  });
  if (p.amax) p.amax[g] = bits_float(std::max(amax.load(), float_bits(p.amax[g])));
}

template <typename T>
void quantize_all_groups(const GroupedQuantize& p) {
  const bool bad = p.table.data && p.table.bad();
  for (int g = 0; g < p.table.groups; ++g) {
    if (p.due && !p.due[g]) continue;
    if (p.casts && bad) p.scale_inv[g] = std::numeric_limits<float>::quiet_NaN();
    if (p.casts && !bad && !p.inverse_given) p.scale_inv[g] = 1.0f / p.scale[g];
    if (p.matrices) {
      if (p.table.data && !p.table.used(g)) continue;
      const int64_t offset = g * p.rows * p.cols, rows = p.matrices.rows;
      for (int part = 0; part < p.matrices.parts; ++part) {
        const int64_t begin = part * rows, end = begin + rows;
        quantize_group<T>(p, g, static_cast<const T*>(p.matrices.at(g, part)),
                          p.rowwise ? p.rowwise + offset : nullptr,
                          p.columnwise ? p.columnwise + offset : nullptr, begin, end, begin, end);
      }
      continue;
    }
    quantize_group<T>(p, g, p.x.data<const T>(), p.rowwise, p.columnwise, p.table.begin(g),
                      p.table.end(g), p.table.column_begin(g), p.table.column_end(g));
    if (p.row_scale_inv)
      std::fill(p.row_scale_inv + p.table.begin(g), p.row_scale_inv + p.table.end(g),
                p.scale_inv[g]);
  }
}

constexpr int64_t kLoopCols = 256;  // columns of a row that are widened at once
constexpr int64_t kRowsApart = 8;   // sums of a column, added at last: the CUDA kernel's order
constexpr int64_t kPartRows = 32;   // whose sums are floats; those of more are doubles
constexpr int64_t kRowsAtOnce = 64;

// Adds a bias to rows.
template <typename T>
APEX_TE_INLINE void add_rows(const T* bias, int64_t rows, int64_t cols, T* out) {
  float values[kLoopCols], addends[kLoopCols];
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; c += kLoopCols) {
      const int64_t n = std::min(kLoopCols, cols - c);
      widen(bias + c, n, addends);
      widen(out + r * cols + c, n, values);
      for (int64_t i = 0; i < n; ++i) values[i] += addends[i];
      narrow(values, n, out + r * cols + c);
    }
}
template <typename T>
APEX_TE_TARGET_PORTABLE void add_rows_portable(const T* bias, int64_t rows, int64_t cols, T* out) {
  add_rows(bias, rows, cols, out);
}
template <typename T>
APEX_TE_TARGET_AVX2 void add_rows_avx2(const T* bias, int64_t rows, int64_t cols, T* out) {
  add_rows(bias, rows, cols, out);
}

// Sums of n columns at most kLoopCols of rows that are `cols` long.
template <typename T>
APEX_TE_INLINE void sum_rows(const T* x, int64_t rows, int64_t cols, int64_t n, float start,
                             float* totals) {
  struct Scratch {
    float sums[kRowsApart][kLoopCols], values[kLoopCols];
    double parts[kRowsApart][kLoopCols];
  };
  Scratch& scratch = thread_scratch<Scratch>();
  auto& sums = scratch.sums;
  auto& parts = scratch.parts;
  float* const values = scratch.values;
  memset(sums, 0, sizeof(sums));
  memset(parts, 0, sizeof(parts));
  for (int64_t r = 0; r < rows; ++r) {
    if (r + kQuantizeRowsAhead < rows) prefetch_row(x + (r + kQuantizeRowsAhead) * cols, n);
    widen(x + r * cols, n, values);
    float* sum = sums[r % kRowsApart];
    for (int64_t c = 0; c < n; ++c) sum[c] += values[c];
    if (r % kPartRows != kPartRows - 1 && r != rows - 1) continue;
    for (int64_t i = 0; i < kRowsApart; ++i) {
      for (int64_t c = 0; c < n; ++c) parts[i][c] += sums[i][c];
      std::fill_n(sums[i], n, 0.0f);
    }
  }
  for (int64_t c = 0; c < n; ++c) {
    double total = start;
    for (int64_t i = 0; i < kRowsApart; ++i) total += parts[i][c];
    totals[c] = static_cast<float>(total);
  }
}
template <typename T>
APEX_TE_TARGET_PORTABLE void sum_rows_portable(const T* x, int64_t rows, int64_t cols, int64_t n,
                                               float start, float* totals) {
  sum_rows(x, rows, cols, n, start, totals);
}
template <typename T>
APEX_TE_TARGET_AVX2 void sum_rows_avx2(const T* x, int64_t rows, int64_t cols, int64_t n,
                                       float start, float* totals) {
  sum_rows(x, rows, cols, n, start, totals);
}

template <typename Call>
void with_type(DType dtype, const Call& call) {
  if (dtype == DType::kFloat32) return call(float{});
  if (dtype == DType::kFloat16) return call(Half{});
  call(BFloat16{});
}

template <typename Int>
void make_table(const GroupedOffsets& p) {
  const Int* splits = p.splits.data<const Int>();
  bool bad = false;
  int64_t total = 0;
  for (int g = 0; g < p.groups && !bad; ++g) {
    bad = splits[g] < 0 || splits[g] > p.rows;
    total += bad ? 0 : splits[g];
  }
  bad = bad || total > p.rows;
  int64_t row = 0, column = 0;
  for (int g = 0; g < p.groups; ++g) {
    const int64_t own = bad ? 0 : static_cast<int64_t>(splits[g]);
    row += own;
    column += columns_of(own);
    p.table[g] = static_cast<int32_t>(row);
    p.table[p.groups + g] = static_cast<int32_t>(column);
    p.table[2 * p.groups + g] = own > 0;
  }
  p.table[3 * p.groups] = bad;
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(grouped_offsets) {
  using namespace apex_te;
  const GroupedOffsets p = check_grouped_offsets(args);
  p.splits.dtype() == DType::kInt64 ? make_table<int64_t>(p) : make_table<int32_t>(p);
}

APEX_TE_DEFINE(grouped_quantize) {
  using namespace apex_te;
  const GroupedQuantize p = check_grouped_quantize(args);
  check_partition(args, p.table);
  with_type(p.dtype, [&](auto zero) { quantize_all_groups<decltype(zero)>(p); });
}

APEX_TE_DEFINE(grouped_quantize_matrices) {
  using namespace apex_te;
  const GroupedQuantize p = check_grouped_quantize_matrices(args);
  with_type(p.dtype, [&](auto zero) { quantize_all_groups<decltype(zero)>(p); });
}

APEX_TE_DEFINE(grouped_scales) {
  using namespace apex_te;
  const GroupedScales p = check_grouped_scales(args);
  for (int g = 0; g < p.table.groups; ++g) set_scale(p, g);
}

APEX_TE_DEFINE(grouped_first_scales) {
  using namespace apex_te;
  const GroupedScales p = check_grouped_first_scales(args);
  for (int g = 0; g < p.table.groups; ++g) set_first_scale(p, g);
}

APEX_TE_DEFINE(grouped_finish) {
  using namespace apex_te;
  const GroupedRows p = check_grouped_rows(args, true);
  check_partition(args, p.table);
  const float rest = p.table.bad() ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  with_type(p.x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* out = p.x.data<T>();
    const T* bias = p.other.data<const T>();
    const auto add = use_avx2() ? add_rows_avx2<T> : add_rows_portable<T>;
    for (int g = 0; g < p.table.groups && bias; ++g) {
      const int64_t begin = p.table.begin(g), rows = p.table.end(g) - begin;
      parallel_for((rows + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t i) {
        const int64_t first = i * kRowsAtOnce;
        add(bias + g * p.cols, std::min(kRowsAtOnce, rows - first), p.cols,
            out + (begin + first) * p.cols);
      });
    }
    std::fill(out + p.table.end(p.table.groups - 1) * p.cols, out + p.rows * p.cols,
              from_float<T>(rest));
  });
}

APEX_TE_DEFINE(grouped_clear) {
  using namespace apex_te;
  const GroupedRows p = check_grouped_clear(args);
  const float rest = p.table.bad() ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  with_type(p.x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    for (int g = 0; g < p.table.groups; ++g)
      if (!p.table.used(g)) std::fill_n(p.x.data<T>() + g * p.cols, p.cols, from_float<T>(rest));
  });
}

APEX_TE_DEFINE(grouped_sum) {
  using namespace apex_te;
  const GroupedRows p = check_grouped_rows(args, false);
  check_partition(args, p.table);
  const float start = p.table.bad() ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  const int64_t tiles = (p.cols + kLoopCols - 1) / kLoopCols;
  with_type(p.x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto sum = use_avx2() ? sum_rows_avx2<T> : sum_rows_portable<T>;
    parallel_for(p.table.groups * tiles, [&](int64_t i) {
      const int g = static_cast<int>(i / tiles);
      const int64_t col0 = i % tiles * kLoopCols, n = std::min(kLoopCols, p.cols - col0);
      const int64_t begin = p.table.begin(g);
      float totals[kLoopCols];
      sum(p.x.data<const T>() + begin * p.cols + col0, p.table.end(g) - begin, p.cols, n, start,
          totals);
      narrow(totals, n, p.other.data<T>() + g * p.cols + col0);
    });
  });
}

APEX_TE_DEFINE(grouped_decode) {
  using namespace apex_te;
  const GroupedDecode p = check_grouped_decode(args);
  BFloat16 values[256];
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    const bool e5m2 = p.format == DType::kE5M2;
    values[code] = from_float<BFloat16>(e5m2 ? decode_fp8<E5M2>(byte) : decode_fp8<E4M3>(byte));
  }
  parallel_for((p.numel + kQuantizeRange - 1) / kQuantizeRange, [&](int64_t chunk) {
    const int64_t end = std::min(p.numel, (chunk + 1) * kQuantizeRange);
    for (int64_t i = chunk * kQuantizeRange; i < end; ++i) p.out[i] = values[p.codes[i]];
  });
}

APEX_TE_DEFINE(grouped_scale_rows) {
  using namespace apex_te;
  const GroupedRows p = check_grouped_scale_rows(args);
  const float* factors = p.other.data<const float>();
  with_type(p.x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    parallel_for(p.rows, [&](int64_t r) {
      T* row = p.x.data<T>() + r * p.cols;
      float values[kLoopCols];
      for (int64_t c = 0; c < p.cols; c += kLoopCols) {
        const int64_t n = std::min(kLoopCols, p.cols - c);
        widen(row + c, n, values);
        for (int64_t i = 0; i < n; ++i) values[i] *= factors[r];
        narrow(values, n, row + c);
      }
    });
  });
}
