// CPU kernels of row_quantize: whole rows, and strips of columns, which are read twice.
#include <algorithm>

#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"
#include "common/numerics/with_dtype.h"
#include "row_quantize/row_quantize.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kRowsAtOnce = 4;
constexpr int64_t kStrip = 64;  // columns of a strip, and rows that are transposed at a time

template <typename T>
APEX_TE_INLINE float value_of(const RowQuantize& p, const T* x, int64_t c) {
  const float value = to_float(x[c]);
  return p.column_scale ? value * p.column_scale[c] : value;
}

struct Scale {
  float by, inverse;
  bool divides;
  Scale() = default;
  APEX_TE_INLINE Scale(const BlockRule& rule, uint32_t amax) : divides(rule.divides) {
    by = divides ? rule.scale_of<true>(amax) : rule.scale_of<false>(amax);
    inverse = divides ? rule.inverse_of<true>(amax, by) : rule.inverse_of<false>(amax, by);
  }
  APEX_TE_INLINE float operator()(float x) const { return divides ? x / by : x * by; }
};

template <typename T, typename Format>
APEX_TE_INLINE void quantize_row(const RowQuantize& p, int64_t r) {
  const T* x = static_cast<const T*>(p.x) + r * p.cols;
  uint32_t amax = 0;
  for (int64_t c = 0; c < p.cols; ++c) amax = std::max(amax, magnitude_bits(value_of(p, x, c)));
  const Scale scale(p.rule, amax);
  p.rowwise_scale_inv[r] = scale.inverse;
  uint8_t* codes = p.rowwise + r * p.cols;
  for (int64_t c = 0; c < p.cols; ++c) codes[c] = encode_fp8<Format>(scale(value_of(p, x, c)));
}

template <typename T, typename Format>
APEX_TE_INLINE void quantize_strip(const RowQuantize& p, int64_t first) {
  const T* x = static_cast<const T*>(p.x);
  const int64_t width = std::min(kStrip, p.cols - first);
  uint32_t amaxes[kStrip] = {};
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t c = 0; c < width; ++c)
      amaxes[c] = std::max(amaxes[c], magnitude_bits(value_of(p, x + r * p.cols, first + c)));
  Scale scales[kStrip];
  for (int64_t c = 0; c < width; ++c) {
    scales[c] = Scale(p.rule, amaxes[c]);
    p.columnwise_scale_inv[first + c] = scales[c].inverse;
  }
  uint8_t codes[kStrip][kStrip];  // a column of the matrix in each row
  for (int64_t row0 = 0; row0 < p.ld; row0 += kStrip) {
    const int64_t stored = std::min(kStrip, p.ld - row0);
    const int64_t present = std::min(stored, std::max<int64_t>(0, p.rows - row0));
    for (int64_t r = 0; r < present; ++r)
      for (int64_t c = 0; c < width; ++c)
        codes[c][r] =
            encode_fp8<Format>(scales[c](value_of(p, x + (row0 + r) * p.cols, first + c)));
    for (int64_t c = 0; c < width; ++c) {
      uint8_t* out = p.columnwise + (first + c) * p.ld + row0;
      std::copy_n(codes[c], present, out);
      std::fill(out + present, out + stored, uint8_t{0});
    }
  }
}

// A turn of the loop: rows first, then strips.
template <typename T, typename Format>
APEX_TE_INLINE void quantize_turn(const RowQuantize& p, int64_t turn, int64_t row_turns) {
  if (turn >= row_turns) return quantize_strip<T, Format>(p, (turn - row_turns) * kStrip);
  const int64_t end = std::min(p.rows, (turn + 1) * kRowsAtOnce);
  for (int64_t r = turn * kRowsAtOnce; r < end; ++r) quantize_row<T, Format>(p, r);
}
template <typename T, typename Format>
APEX_TE_TARGET_PORTABLE void quantize_portable(const RowQuantize& p, int64_t turn, int64_t rows) {
  quantize_turn<T, Format>(p, turn, rows);
}
template <typename T, typename Format>
APEX_TE_TARGET_AVX2 void quantize_avx2(const RowQuantize& p, int64_t turn, int64_t rows) {
  quantize_turn<T, Format>(p, turn, rows);
}

template <typename T, typename Format>
void quantize_all(const RowQuantize& p) {
  const auto quantize = use_avx2() ? quantize_avx2<T, Format> : quantize_portable<T, Format>;
  const int64_t row_turns = p.rowwise_scale_inv ? (p.rows + kRowsAtOnce - 1) / kRowsAtOnce : 0;
  const int64_t strips = p.columnwise_scale_inv ? (p.cols + kStrip - 1) / kStrip : 0;
  parallel_for(row_turns + strips, [&](int64_t turn) { quantize(p, turn, row_turns); });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(row_quantize) {
  using namespace apex_te;
  const RowQuantize p = check_row_quantize(args);
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    p.fp8 == DType::kE5M2 ? quantize_all<T, E5M2>(p) : quantize_all<T, E4M3>(p);
  });
}
