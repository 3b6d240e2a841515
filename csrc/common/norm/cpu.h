// CPU kernels of the norms: a row at a time in fp32, chunks of rows fixed by the shape.
#pragma once

#include <cmath>

#include "common/cpu/column_sums.h"
#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"
#include "common/norm/arguments.h"

namespace apex_te {
namespace norm {

constexpr int64_t kLanes = 32;         // of a sum, which a row's buffer is padded to with zeros
constexpr int64_t kSumBlock = 512;     // elements that a lane's sum starts anew after
constexpr int64_t kFP8ChunkRows = 64;  // a cache line of a transposed column
constexpr int64_t kLineRows = 16;      // at least, for one line of partial weight gradients
constexpr int64_t kPartRows = 16;      // rows of weight gradients that are added in float

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

using Buffer = std::unique_ptr<float[]>;
inline Buffer make_buffer(int64_t n) {
  Buffer buffer = make_scratch<float>(padded(n) + 1);
  std::fill(buffer.get() + n, buffer.get() + padded(n), 0.0f);
  return buffer;
}

typedef float Lanes8 __attribute__((vector_size(32)));
APEX_TE_INLINE void load8(const float* values, Lanes8* v) { memcpy(v, values, sizeof(*v)); }
APEX_TE_INLINE double total_of(const Lanes8* sums) {
  double total = 0.0;
  for (int k = 0; k < kLanes / 8; ++k)
    for (int i = 0; i < 8; ++i) total += sums[k][i];
  return total;
}

// Sum of a[i] * b[i], or of a[i] without b, over padded buffers: 32 sums of each kSumBlock
// elements, added to 32 totals, so that a long row does not lose the small against the large.
APEX_TE_INLINE double sum_of(const float* a, const float* b, int64_t n) {
  const int64_t size = padded(n);
  Lanes8 totals[4] = {};
  for (int64_t block = 0; block < size; block += kSumBlock) {
    Lanes8 sums[4] = {};
    for (int64_t i = block; i < std::min(size, block + kSumBlock); i += kLanes) {
      for (int k = 0; k < 4; ++k) {
        Lanes8 x, y;
        load8(a + i + 8 * k, &x);
        if (b) load8(b + i + 8 * k, &y), x *= y;
        sums[k] += x;
      }
    }
    for (int k = 0; k < 4; ++k) totals[k] += sums[k];
  }
  return total_of(totals);
}

// sum_of x - mean, or of its squares, for n a multiple of kLanes.
template <bool kSquares>
APEX_TE_INLINE double centred_sum(const float* x, float mean, int64_t n) {
  Lanes8 totals[4] = {};
  for (int64_t block = 0; block < n; block += kSumBlock) {
    Lanes8 sums[4] = {};
    for (int64_t i = block; i < std::min(n, block + kSumBlock); i += kLanes)
      for (int k = 0; k < 4; ++k) {
        Lanes8 v;
        load8(x + i + 8 * k, &v);
        v -= mean;
        sums[k] += kSquares ? v * v : v;
      }
    for (int k = 0; k < 4; ++k) totals[k] += sums[k];
  }
  return total_of(totals);
}

// Weight and bias as floats; empty where there is none.
struct FloatParams {
  Buffer gamma, bias;
};

inline Buffer float_param(const void* param, DType dtype, float offset, int64_t cols) {
  if (!param) return nullptr;
  Buffer buffer = make_buffer(cols);
  RowDType(dtype).widen(param, 0, cols, buffer.get());
  for (int64_t i = 0; i < cols; ++i) buffer[i] += offset;
  return buffer;
}

// Weight, bias and their gradients are in float or in the dtype of x.
inline DType param_dtype(const NormParams& p, DType dtype) {
  return p.is_fp32 ? DType::kFloat32 : dtype;
}

inline FloatParams float_params(const NormParams& p, DType x_dtype, int64_t cols) {
  const DType dtype = param_dtype(p, x_dtype);
  return {float_param(p.weight, dtype, p.gamma_offset, cols),
          float_param(p.bias, dtype, 0.0f, cols)};
}

// y of a row of layer_norm with weight and bias, without a buffer between: the arithmetic of
// fwd_row.
APEX_TE_INLINE void fwd_row_in_place(const NormFwd& p, const FloatParams& params, int64_t row) {
  const int64_t n = p.cols;
  const float* x = static_cast<const float*>(p.x) + row * n;
  float* y = static_cast<float*>(p.y) + row * n;
  const double count = static_cast<double>(n);
  const float mean = static_cast<float>(centred_sum<false>(x, 0.0f, n) / count);
  const float rstd =
      static_cast<float>(1.0 / std::sqrt(centred_sum<true>(x, mean, n) / count + p.eps));
  p.mean[row] = mean;
  p.rstd[row] = rstd;
  const float *gamma = params.gamma.get(), *bias = params.bias.get();
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * rstd * gamma[i] + bias[i];
}

// y of a row, in `out`; `values` and `other` are scratch with room for the padding.
template <bool kLayerNorm>
APEX_TE_INLINE void fwd_row(const NormFwd& p, const FloatParams& params, const RowDType& dtype,
                            int64_t row, float* values, float* other, float* out) {
  const int64_t n = p.cols;
  dtype.widen(p.x, row * n, n, values);
  if (p.residual) {
    dtype.widen(p.residual, row * n, n, other);
    for (int64_t i = 0; i < n; ++i) values[i] += other[i];
    dtype.narrow(values, n, p.residual_sum, row * n);
    dtype.widen(p.residual_sum, row * n, n, values);
  }
  const double count = static_cast<double>(n);
  if (kLayerNorm) {
    if (!p.given) p.mean[row] = static_cast<float>(sum_of(values, nullptr, n) / count);
    const float mean = p.mean[row];
    for (int64_t i = 0; i < n; ++i) values[i] -= mean;
  }
  if (!p.given)
    p.rstd[row] = static_cast<float>(1.0 / std::sqrt(sum_of(values, values, n) / count + p.eps));
  const float rstd = p.rstd[row];
  const float *gamma = params.gamma.get(), *bias = params.bias.get();
  if (gamma && bias)
    for (int64_t i = 0; i < n; ++i) out[i] = values[i] * rstd * gamma[i] + bias[i];
  else if (gamma)
    for (int64_t i = 0; i < n; ++i) out[i] = values[i] * rstd * gamma[i];
  else if (bias)
    for (int64_t i = 0; i < n; ++i) out[i] = values[i] * rstd + bias[i];
  else
    for (int64_t i = 0; i < n; ++i) out[i] = values[i] * rstd;
}

// Rows begin to end, which are at most kFP8ChunkRows for FP8; returns the bits of their amax.
template <bool kLayerNorm>
APEX_TE_INLINE uint32_t fwd_rows(const NormFwd& p, const FloatParams& params, int64_t begin,
                                 int64_t end) {
  const int64_t n = p.cols;
  const RowDType dtype(p.dtype);
  const bool is_float_out = dtype.is_float() && !p.scale;
  const Buffer values = make_buffer(n), other = make_buffer(n);
  std::unique_ptr<uint8_t[]> scratch;
  if (p.scale && !p.rowwise) scratch = make_scratch<uint8_t>(kFP8ChunkRows * n + 1);
  uint8_t* codes = p.rowwise ? p.rowwise + begin * n : scratch.get();
  uint32_t amax = 0;
  const bool in_place = kLayerNorm && is_float_out && n % kLanes == 0 && params.gamma &&
                        params.bias && !p.residual && !p.given;
  for (int64_t row = begin; row < end; ++row) {
    if (in_place) {
      fwd_row_in_place(p, params, row);
      continue;
    }
    float* out = is_float_out ? static_cast<float*>(p.y) + row * n : values.get();
    fwd_row<kLayerNorm>(p, params, dtype, row, values.get(), other.get(), out);
    if (!p.scale) {
      if (!is_float_out) dtype.narrow(out, n, p.y, row * n);
      continue;
    }
    uint8_t* to = codes + (row - begin) * n;
    const uint32_t found = p.fp8 == DType::kE5M2 ? encode_row<E5M2>(values.get(), n, *p.scale, to)
                                                 : encode_row<E4M3>(values.get(), n, *p.scale, to);
    amax = std::max(amax, found);
  }
  if (p.columnwise) {
    transpose_bytes(codes, n, end - begin, n, p.columnwise + begin, p.ld);
    if (end == p.rows) zero_padding(p.columnwise, n, p.rows, p.ld);
  }
  return amax;
}

// dx of a row of floats, its weight gradients to `line`, without buffers between: the arithmetic of
// bwd_rows with all gradients, for n a multiple of kLanes.
template <bool kLayerNorm>
APEX_TE_INLINE void bwd_row_in_place(const float* x, const float* dy, const float* d_residual,
                                     const float* gamma, float mean, float rstd, int64_t n,
                                     float* line, float* dx) {
  Lanes8 totals[2][4] = {};
  for (int64_t block = 0; block < n; block += kSumBlock) {
    Lanes8 sums[2][4] = {};
    for (int64_t i = block; i < std::min(n, block + kSumBlock); i += kLanes)
      for (int k = 0; k < 4; ++k) {
        const int64_t at = i + 8 * k;
        Lanes8 grad, hat, weight, sum;
        load8(dy + at, &grad);
        load8(x + at, &hat);
        load8(gamma + at, &weight);
        if (kLayerNorm) hat -= mean;
        hat *= rstd;
        load8(line + at, &sum);
        sum += grad * hat;
        memcpy(line + at, &sum, sizeof(sum));
        if (kLayerNorm) {
          load8(line + n + at, &sum);
          sum += grad;
          memcpy(line + n + at, &sum, sizeof(sum));
        }
        grad *= weight;
        sums[0][k] += grad * hat;
        sums[1][k] += grad;
      }
    for (int k = 0; k < 4; ++k) {
      totals[0][k] += sums[0][k];
      totals[1][k] += sums[1][k];
    }
  }
  const double sum_gx = total_of(totals[0]), sum_g = total_of(totals[1]);
  const float mean_gx = static_cast<float>(sum_gx / static_cast<double>(n));
  const float mean_g = kLayerNorm ? static_cast<float>(sum_g / static_cast<double>(n)) : 0.0f;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float hat = (kLayerNorm ? x[i] - mean : x[i]) * rstd;
    dx[i] = (dy[i] * gamma[i] - mean_g - hat * mean_gx) * rstd;
  }
  if (d_residual)
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) dx[i] += d_residual[i];
}

// Adds a line's sums to totals and begins them anew.
APEX_TE_INLINE void fold_line(float* line, int64_t width, double* totals) {
  for (int64_t i = 0; i < width; ++i) totals[i] += line[i];
  std::fill_n(line, width, 0.0f);
}

// Rows begin to end; leaves the sums of their weight gradients in a line, if any: of few rows in
// float, of all in double, since the rounding of long sums would show.
template <bool kLayerNorm>
APEX_TE_INLINE void bwd_rows(const NormBwd& p, const FloatParams& params, int64_t begin,
                             int64_t end, float* line) {
  const int64_t n = p.cols;
  const RowDType dtype(p.dtype);
  const Buffer xhat_buffer = make_buffer(n), g_buffer = make_buffer(n), other = make_buffer(n);
  float *xhat = xhat_buffer.get(), *g = g_buffer.get();
  const float* gamma = params.gamma.get();
  const int64_t width = (kLayerNorm ? 2 : 1) * n;
  std::unique_ptr<double[]> totals;
  if (line) {
    totals.reset(new double[width]());
    std::fill_n(line, width, 0.0f);
  }
  const bool is_usual = gamma && line && p.dweight && (!kLayerNorm || p.dbias);
  for (int64_t row = begin; row < end; ++row) {
    if (line && row > begin && (row - begin) % kPartRows == 0) fold_line(line, width, totals.get());
    const float mean = kLayerNorm ? p.mean[row] : 0.0f, rstd = p.rstd[row];
    if (dtype.is_float() && is_usual && n % kLanes == 0) {
      const auto* extra = static_cast<const float*>(p.d_residual);
      bwd_row_in_place<kLayerNorm>(static_cast<const float*>(p.x) + row * n,
                                   static_cast<const float*>(p.dy) + row * n,
                                   extra ? extra + row * n : nullptr, gamma, mean, rstd, n, line,
                                   static_cast<float*>(p.dx) + row * n);
      continue;
    }
    dtype.widen(p.x, row * n, n, xhat);
    dtype.widen(p.dy, row * n, n, g);
    // The usual case in one pass, with the same operations of each element.
    if (is_usual) {
      for (int64_t i = 0; i < n; ++i) {
        const float grad = g[i], hat = (kLayerNorm ? xhat[i] - mean : xhat[i]) * rstd;
        line[i] += grad * hat;
        if (kLayerNorm) line[n + i] += grad;
        g[i] = grad * gamma[i];
        xhat[i] = hat;
      }
    } else {
      for (int64_t i = 0; i < n; ++i) xhat[i] = (kLayerNorm ? xhat[i] - mean : xhat[i]) * rstd;
      if (line && p.dweight)
        for (int64_t i = 0; i < n; ++i) line[i] += g[i] * xhat[i];
      if (line && p.dbias)
        for (int64_t i = 0; i < n; ++i) line[n + i] += g[i];
      if (gamma)
        for (int64_t i = 0; i < n; ++i) g[i] *= gamma[i];
    }
    const float mean_gx = static_cast<float>(sum_of(g, xhat, n) / static_cast<double>(n));
    const float mean_g =
        kLayerNorm ? static_cast<float>(sum_of(g, nullptr, n) / static_cast<double>(n)) : 0.0f;
    for (int64_t i = 0; i < n; ++i) xhat[i] = (g[i] - mean_g - xhat[i] * mean_gx) * rstd;
    if (p.d_residual) {
      dtype.widen(p.d_residual, row * n, n, other.get());
      for (int64_t i = 0; i < n; ++i) xhat[i] += other[i];
    }
    dtype.narrow(xhat, n, p.dx, row * n);
  }
  if (!line) return;
  fold_line(line, width, totals.get());
  for (int64_t i = 0; i < width; ++i) line[i] = static_cast<float>(totals[i]);
}

template <bool kLayerNorm>
APEX_TE_TARGET_PORTABLE uint32_t fwd_rows_portable(const NormFwd& p, const FloatParams& f,
                                                   int64_t begin, int64_t end) {
  return fwd_rows<kLayerNorm>(p, f, begin, end);
}
template <bool kLayerNorm>
APEX_TE_TARGET_AVX2 uint32_t fwd_rows_avx2(const NormFwd& p, const FloatParams& f, int64_t begin,
                                           int64_t end) {
  return fwd_rows<kLayerNorm>(p, f, begin, end);
}
template <bool kLayerNorm>
APEX_TE_TARGET_AVX512 uint32_t fwd_rows_avx512(const NormFwd& p, const FloatParams& f,
                                               int64_t begin, int64_t end) {
  return fwd_rows<kLayerNorm>(p, f, begin, end);
}
template <bool kLayerNorm>
APEX_TE_TARGET_PORTABLE void bwd_rows_portable(const NormBwd& p, const FloatParams& f,
                                               int64_t begin, int64_t end, float* line) {
  bwd_rows<kLayerNorm>(p, f, begin, end, line);
}
template <bool kLayerNorm>
APEX_TE_TARGET_AVX2 void bwd_rows_avx2(const NormBwd& p, const FloatParams& f, int64_t begin,
                                       int64_t end, float* line) {
  bwd_rows<kLayerNorm>(p, f, begin, end, line);
}

template <bool kLayerNorm>
APEX_TE_TARGET_AVX512 void bwd_rows_avx512(const NormBwd& p, const FloatParams& f, int64_t begin,
                                           int64_t end, float* line) {
  bwd_rows<kLayerNorm>(p, f, begin, end, line);
}

template <bool kLayerNorm>
void fwd_all(const NormFwd& p) {
  const FloatParams params = float_params(p.params, p.dtype, p.cols);
  const auto rows_of = use_avx512() ? fwd_rows_avx512<kLayerNorm>
                       : use_avx2() ? fwd_rows_avx2<kLayerNorm>
                                    : fwd_rows_portable<kLayerNorm>;
  const int64_t share =
      p.scale ? kFP8ChunkRows
              : std::max<int64_t>(1, (int64_t{1} << 16) / std::max<int64_t>(p.cols, 1));
  std::atomic<uint32_t> amax{0};
  parallel_for((p.rows + share - 1) / share, [&](int64_t i) {
    fold_amax(amax, rows_of(p, params, i * share, std::min(p.rows, (i + 1) * share)));
  });
  if (p.amax) *p.amax = bits_float(std::max(amax.load(), float_bits(*p.amax)));
  if (p.scale_inv) *p.scale_inv = 1.0f / *p.scale;
}

template <bool kLayerNorm>
void bwd_all(const NormBwd& p) {
  const FloatParams params = float_params(p.params, p.dtype, p.cols);
  const auto rows_of = use_avx512() ? bwd_rows_avx512<kLayerNorm>
                       : use_avx2() ? bwd_rows_avx2<kLayerNorm>
                                    : bwd_rows_portable<kLayerNorm>;
  const int64_t share =
      std::max(kLineRows, (p.rows + 1) / std::max<int64_t>(norm_bwd_lines(p.rows, p.cols), 1) + 1);
  const int64_t lines = (p.rows + share - 1) / share;
  const int64_t width = (kLayerNorm ? 2 : 1) * p.cols;
  const bool with_lines = p.dweight || p.dbias;
  parallel_for(lines, [&](int64_t i) {
    rows_of(p, params, i * share, std::min(p.rows, (i + 1) * share),
            with_lines ? p.workspace + i * width : nullptr);
  });
  if (!with_lines) return;
  const Buffer sums = make_buffer(width);
  add_lines<float>(p.workspace, lines, width, sums.get());
  const RowDType dtype(param_dtype(p.params, p.dtype));
  if (p.dweight) dtype.narrow(sums.get(), p.cols, p.dweight, 0);
  if (p.dbias) dtype.narrow(sums.get() + p.cols, p.cols, p.dbias, 0);
}

}  // namespace norm

template <bool kLayerNorm>
void norm_fwd_cpu(const NormFwd& p) {
  norm::fwd_all<kLayerNorm>(p);
}

template <bool kLayerNorm>
void norm_bwd_cpu(const NormBwd& p) {
  norm::bwd_all<kLayerNorm>(p);
}

}  // namespace apex_te
