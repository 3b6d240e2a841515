// CPU kernels of multi_tensor: reductions (amax, l2norm) and maps (scale, axpby, quantize).
#include <cmath>
#include <memory>

#include "common/cpu/quantize.h"
#include "multi_tensor/multi_tensor_chunks.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

struct AmaxOp {
  using Result = uint32_t;
  APEX_TE_INLINE uint32_t chunk(const Row& row, int64_t begin, int64_t n) const {
    if (row.dtype(0) == DType::kFloat32)
      return amax_of_range(static_cast<const float*>(row.data[0]) + begin, n);
    if (row.dtype(0) == DType::kFloat16)
      return amax_of_range(static_cast<const Half*>(row.data[0]) + begin, n);
    return amax_of_range(static_cast<const BFloat16*>(row.data[0]) + begin, n);
  }
};

struct SquaresOp {
  using Result = float;
  APEX_TE_INLINE float chunk(const Row& row, int64_t begin, int64_t n) const {
    float lanes[kLanes] = {};
    if (row.dtype(0) == DType::kFloat32) {
      add_squares(static_cast<const float*>(row.data[0]) + begin, n, lanes);
    } else if (row.dtype(0) == DType::kBFloat16) {
      add_squares(static_cast<const BFloat16*>(row.data[0]) + begin, n, lanes);
    } else {
      float buffer[kRun];
      for (int64_t i = 0; i < n; i += kRun) {
        const int64_t size = std::min(kRun, n - i);
        add_squares(read_values(row.data[0], row.dtype(0), begin + i, size, buffer), size, lanes);
      }
    }
    return sum_lanes(lanes);
  }
};

struct ScaleOp {
  using Result = bool;  // whether a stored result is not finite
  float factor;
  // Both in bfloat16: 16 elements at a time, without buffers between.
  APEX_TE_INLINE bool chunk(const BFloat16* x, BFloat16* y, int64_t n) const {
    typedef int16_t Magnitudes __attribute__((vector_size(32)));
    Magnitudes largest = {};
    int64_t i = 0;
    for (; i + kPair <= n; i += kPair) {
      FloatVector v[2];
      load_pair(x + i, v);
      v[0] *= factor;
      v[1] *= factor;
      WordVector low, high;
      round_upper(v[0], &low);
      round_upper(v[1], &high);
      const WordVector words = low >> 16 | high;
      memcpy(y + i, &words, sizeof(words));
      const auto magnitudes = reinterpret_cast<Magnitudes>(words & 0x7FFF7FFFu);
      largest = magnitudes > largest ? magnitudes : largest;
    }
    int16_t lanes[kPair];
    memcpy(lanes, &largest, sizeof(lanes));
    bool found = *std::max_element(lanes, lanes + kPair) >= 0x7F80;
    for (; i < n; ++i) {
      y[i] = from_float<BFloat16>(to_float(x[i]) * factor);
      found = found || (y[i].bits & 0x7FFF) >= 0x7F80;
    }
    return found;
  }
  // from_float<BFloat16> in the upper half of each word.
  static APEX_TE_INLINE void round_upper(const FloatVector& v, WordVector* out) {
    const WordVector bits = reinterpret_cast<WordVector>(v);
    const WordVector words = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
    *out = v != v ? WordVector{} + 0x7FFF0000u : words;
  }
  // Both in float.
  APEX_TE_INLINE bool chunk(const float* x, float* y, int64_t n) const {
    typedef int32_t Magnitudes __attribute__((vector_size(32)));
    constexpr int kVectors = 4;
    constexpr int64_t kWidth = sizeof(FloatVector) / sizeof(float);
    Magnitudes largest[kVectors] = {};
    int64_t i = 0;
    for (; i + kVectors * kWidth <= n; i += kVectors * kWidth)
      for (int k = 0; k < kVectors; ++k) {
        FloatVector v;
        memcpy(&v, x + i + k * kWidth, sizeof(v));
        v *= factor;
        memcpy(y + i + k * kWidth, &v, sizeof(v));
        const auto magnitudes = reinterpret_cast<Magnitudes>(v) & 0x7FFFFFFF;
        largest[k] = magnitudes > largest[k] ? magnitudes : largest[k];
      }
    int32_t lanes[kVectors * kWidth];
    memcpy(lanes, largest, sizeof(lanes));
    bool found = *std::max_element(lanes, lanes + kVectors * kWidth) >= 0x7F800000;
    for (; i < n; ++i) {
      y[i] = x[i] * factor;
      found = found || magnitude_bits(y[i]) >= 0x7F800000u;
    }
    return found;
  }
  APEX_TE_INLINE bool chunk(const Row& row, int64_t begin, int64_t n) const {
    if (row.dtype(0) == DType::kFloat32 && row.dtype(1) == DType::kFloat32)
      return chunk(static_cast<const float*>(row.data[0]) + begin,
                   static_cast<float*>(row.data[1]) + begin, n);
    if (row.dtype(0) == DType::kBFloat16 && row.dtype(1) == DType::kBFloat16)
      return chunk(static_cast<const BFloat16*>(row.data[0]) + begin,
                   static_cast<BFloat16*>(row.data[1]) + begin, n);
    float in[kRun], out[kRun];
    uint32_t amax = 0;
    for (int64_t i = 0; i < n; i += kRun) {
      const int64_t size = std::min(kRun, n - i);
      const float* x = read_values(row.data[0], row.dtype(0), begin + i, size, in);
      float* y = result_values(row.data[1], row.dtype(1), begin + i, out);
#pragma GCC ivdep
      for (int64_t k = 0; k < size; ++k) y[k] = x[k] * factor;
      amax = std::max(amax, amax_of(y, size));
      finish_values(row.data[1], row.dtype(1), begin + i, size, y);
    }
    return amax >= overflow_bits(static_cast<int>(row.dtype(1)));
  }
};

struct AxpbyOp {
  using Result = bool;
  float a, b;
  int check;
  APEX_TE_INLINE bool chunk(const Row& row, int64_t begin, int64_t n) const {
    float xs[kRun], ys[kRun], out[kRun];
    uint32_t amax = 0;
    for (int64_t i = 0; i < n; i += kRun) {
      const int64_t size = std::min(kRun, n - i);
      const float* x = read_values(row.data[0], row.dtype(0), begin + i, size, xs);
      const float* y = read_values(row.data[1], row.dtype(1), begin + i, size, ys);
      // An output in place of an input must not change what is checked.
      if (check != kCheckResult) amax = std::max(amax, amax_of(check == kCheckX ? x : y, size));
      float* z = result_values(row.data[2], row.dtype(2), begin + i, out);
#pragma GCC ivdep
      for (int64_t k = 0; k < size; ++k) z[k] = a * x[k] + b * y[k];
      if (check == kCheckResult) amax = std::max(amax, amax_of(z, size));
      finish_values(row.data[2], row.dtype(2), begin + i, size, z);
    }
    return amax >= overflow_bits(check == kCheckResult ? static_cast<int>(row.dtype(2)) : 0);
  }
};

struct QuantizeOp {
  using Result = uint32_t;
  template <typename T>
  static APEX_TE_ONCE uint32_t encode(const Row& row, int64_t begin, int64_t n) {
    const float scale = *static_cast<const float*>(row.data[2]);
    const DType fp8 = static_cast<int>(row.dtype(1)) == 1 ? DType::kE5M2 : DType::kE4M3;
    return quantize_range(static_cast<const T*>(row.data[0]) + begin, n,
                          static_cast<uint8_t*>(row.data[1]) + begin, row.numel >= kStreamedBytes,
                          fp8_row_encoder<T>(fp8, scale));
  }
  APEX_TE_INLINE uint32_t chunk(const Row& row, int64_t begin, int64_t n) const {
    if (row.dtype(0) == DType::kFloat32) return encode<float>(row, begin, n);
    if (row.dtype(0) == DType::kFloat16) return encode<Half>(row, begin, n);
    return encode<BFloat16>(row, begin, n);
  }
};

// Runs an op that only says whether it met a value that is not finite.
template <typename Op>
void run_flagged(const Rows& rows, const Op& op, const Flag& found_inf) {
  std::atomic<bool> found{false};
  const auto chunk = chunk_function<Op>();
  for_chunks(rows, kMultiTensorChunk, [&](size_t row, int64_t, int64_t begin, int64_t n) {
    if (chunk(op, rows[row], begin, n)) found.store(true, std::memory_order_relaxed);
  });
  if (found && found_inf.bits) *found_inf.bits = found_inf.one;
}

// Runs an op whose chunks give magnitudes; calls finish(row, amax) for each row at the end.
template <typename Op, typename Finish>
void run_amax(const Rows& rows, const Op& op, const Finish& finish) {
  const auto amaxes = std::make_unique<std::atomic<uint32_t>[]>(rows.size());
  const auto chunk = chunk_function<Op>();
  for_chunks(rows, kMultiTensorChunk, [&](size_t row, int64_t, int64_t begin, int64_t n) {
    fold_amax(amaxes[row], chunk(op, rows[row], begin, n));
  });
  for (size_t i = 0; i < rows.size(); ++i) finish(i, amaxes[i].load());
}

void raise_amax(float* amax, uint32_t found) {
  *amax = bits_float(std::max(found, float_bits(*amax)));
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(multi_tensor_amax) {
  using namespace apex_te;
  const Amax p = check_amax(args);
  run_amax(*p.rows, AmaxOp{}, [&](size_t row, uint32_t found) { raise_amax(p.amax + row, found); });
}

APEX_TE_DEFINE(multi_tensor_l2norm) {
  using namespace apex_te;
  const L2Norm p = check_l2norm(args);
  const Rows& rows = *p.rows;
  const auto chunk = chunk_function<SquaresOp>();
  const auto first =
      for_chunks(rows, p.partials.chunk, [&](size_t row, int64_t c, int64_t begin, int64_t n) {
        p.partials.sums[c] = chunk(SquaresOp{}, rows[row], begin, n);
      });
  double total = 0.0;
  for (size_t i = 0; i < rows.size(); ++i) {
    double sum = 0.0;
    for (int64_t c = first[i]; c < first[i + 1]; ++c)
      sum += static_cast<double>(p.partials.sums[c]);
    if (p.norms) p.norms[i] = static_cast<float>(std::sqrt(sum));
    total += sum;
  }
  *p.total = static_cast<float>(std::sqrt(total));
}

APEX_TE_DEFINE(multi_tensor_scale) {
  using namespace apex_te;
  const Scale p = check_scale(args);
  const float factor = p.factor_tensor ? p.factor * *p.factor_tensor : p.factor;
  run_flagged(*p.rows, ScaleOp{factor}, p.found_inf);
}

APEX_TE_DEFINE(multi_tensor_axpby) {
  using namespace apex_te;
  const Axpby p = check_axpby(args);
  run_flagged(*p.rows, AxpbyOp{p.a, p.b, p.check}, p.found_inf);
}

APEX_TE_DEFINE(multi_tensor_quantize) {
  using namespace apex_te;
  const Rows& rows = check_quantize(args);
  run_amax(rows, QuantizeOp{}, [&](size_t i, uint32_t found) {
    const Row& row = rows[i];
    if (row.data[3]) raise_amax(static_cast<float*>(row.data[3]), found);
    if (row.data[4])
      *static_cast<float*>(row.data[4]) = 1.0f / *static_cast<const float*>(row.data[2]);
  });
}
