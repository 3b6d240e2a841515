// CPU side of fp8_gemm: exact decode of the operands, and the epilogue of the fp32 product.
#include <algorithm>
#include <cmath>

#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"
#include "common/numerics/codec.h"
#include "fp8_gemm/fp8_gemm.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kChunk = 1 << 14;

// GELU, tanh approximation.
float gelu(float x) {
  const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + std::tanh(inner));
}

template <typename Format>
APEX_TE_INLINE void decode_loop(const uint8_t* codes, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = decode_fp8<Format>(codes[i]);
}
template <typename Format>
APEX_TE_TARGET_PORTABLE void decode_portable(const uint8_t* codes, float* out, int64_t n) {
  decode_loop<Format>(codes, out, n);
}
template <typename Format>
APEX_TE_TARGET_AVX2 void decode_avx2(const uint8_t* codes, float* out, int64_t n) {
  decode_loop<Format>(codes, out, n);
}

template <typename Format>
void decode_all(const uint8_t* codes, float* out, int64_t n) {
  const auto decode = use_avx2() ? decode_avx2<Format> : decode_portable<Format>;
  parallel_for((n + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t begin = chunk * kChunk;
    decode(codes + begin, out + begin, std::min(kChunk, n - begin));
  });
}

struct Epilogue : Fp8Epilogue {
  const float* product;
  int64_t rows, cols;
  bool accumulate;
};

template <typename T, typename Bias>
void finish(const Epilogue& e) {
  const float scale = *e.a_scale_inv * *e.b_scale_inv;
  T *out = e.out.data<T>(), *aux = e.aux.data<T>();
  const T* c = e.c.data<const T>();
  const Bias* bias = e.bias.data<Bias>();
  const int64_t rows_per_chunk = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, e.cols));
  parallel_for((e.rows + rows_per_chunk - 1) / rows_per_chunk, [&](int64_t chunk) {
    const int64_t end = std::min(e.rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r) {
      const int64_t offset = r * e.cols;
      for (int64_t i = offset; i < offset + e.cols; ++i) {
        float value = e.product[i] * scale;
        if (bias) value += to_float(bias[i - offset]);
        if (aux) {
          aux[i] = from_float<T>(value);
          value = gelu(value);
        }
        if (c) value += to_float(c[i]);
        if (e.accumulate) value += to_float(out[i]);
        out[i] = from_float<T>(value);
      }
    }
  });
}

struct BlockAccumulate {
  const float* product;
  float* sum;
  int64_t rows, cols;
  const float *a_scale_inv, *b_scale_inv;  // of the slice's first row
  int64_t a_step, b_step;                  // from a row's (128 rows') scale to the next one's
  bool a_is_square, b_is_square;
};

// Products of floats are exact in double, so the sum is rounded as a fused multiply-add's but for
// ties of the double's own rounding.
APEX_TE_INLINE void accumulate_rows(const BlockAccumulate& p, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const float a = p.a_scale_inv[(p.a_is_square ? r / kBlock : r) * p.a_step];
    const float* product = p.product + r * p.cols;
    float* sum = p.sum + r * p.cols;
    for (int64_t c0 = 0; c0 < p.cols; c0 += kBlock) {
      const int64_t c_end = std::min(p.cols, c0 + kBlock);
      const float square = p.b_scale_inv[p.b_is_square ? c0 / kBlock * p.b_step : 0];
      if (p.b_is_square)
        for (int64_t c = c0; c < c_end; ++c)
          sum[c] = static_cast<float>(static_cast<double>(product[c] * a) * square + sum[c]);
      else if (p.a_is_square)
        for (int64_t c = c0; c < c_end; ++c)
          sum[c] =
              static_cast<float>(static_cast<double>(product[c] * p.b_scale_inv[c]) * a + sum[c]);
      else
        for (int64_t c = c0; c < c_end; ++c)
          sum[c] =
              static_cast<float>(static_cast<double>(product[c] * a) * p.b_scale_inv[c] + sum[c]);
    }
  }
}
APEX_TE_TARGET_PORTABLE void accumulate_portable(const BlockAccumulate& p, int64_t begin,
                                                 int64_t end) {
  accumulate_rows(p, begin, end);
}
APEX_TE_TARGET_AVX2 void accumulate_avx2(const BlockAccumulate& p, int64_t begin, int64_t end) {
  accumulate_rows(p, begin, end);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(fp8_block_accumulate) {
  using namespace apex_te;
  BlockAccumulate p;
  const TensorView product = args.tensor();
  product.has_dtype({DType::kFloat32}).has_ndim(2).is_dense();
  p.product = product.data<float>();
  p.rows = product.size(0);
  p.cols = product.size(1);
  const TensorView a_scale_inv = args.tensor(), b_scale_inv = args.tensor();
  p.sum = args.tensor()
              .has_dtype({DType::kFloat32})
              .has_shape({p.rows, p.cols})
              .is_dense()
              .data<float>();
  p.a_is_square = check_block_rows(args) == kBlock;
  p.b_is_square = check_block_rows(args) == kBlock;
  refuse_two_square_blocks(args, p.a_is_square ? kBlock : 1, p.b_is_square ? kBlock : 1);
  const int64_t k = args.integer(), slice = args.integer(), slices = num_blocks(k);
  if (k < 1)
    fail(kApexTeValueError, "%s: k must be at least 1, got %lld", args.name(),
         static_cast<long long>(k));
  if (slice < 0 || slice >= slices)
    fail(kApexTeValueError, "%s: slice must be from 0 to %lld, got %lld", args.name(),
         static_cast<long long>(slices - 1), static_cast<long long>(slice));
  // Scales of 1 x 128 lie [slice, row], of 128 x 128 [row block, slice].
  const auto first = [&](const TensorView& scales, int64_t rows, bool is_square, int64_t* step) {
    check_block_scales(scales, rows, k, is_square ? kBlock : 1);
    *step = is_square ? padded_to_4(slices) : 1;
    return scales.data<const float>() + slice * (is_square ? 1 : padded_to_4(rows));
  };
  p.a_scale_inv = first(a_scale_inv, p.rows, p.a_is_square, &p.a_step);
  p.b_scale_inv = first(b_scale_inv, p.cols, p.b_is_square, &p.b_step);
  const auto accumulate = use_avx2() ? accumulate_avx2 : accumulate_portable;
  const int64_t rows_per_chunk = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, p.cols));
  parallel_for((p.rows + rows_per_chunk - 1) / rows_per_chunk, [&](int64_t chunk) {
    accumulate(p, chunk * rows_per_chunk, std::min(p.rows, (chunk + 1) * rows_per_chunk));
  });
}

APEX_TE_DEFINE(fp8_decode) {
  using namespace apex_te;
  const TensorView codes = args.tensor();
  const TensorView out = args.tensor();
  codes.has_dtype(kFP8DTypes).has_ndim(2).is_dense();
  out.has_dtype({DType::kFloat32}).has_shape({codes.size(0), codes.size(1)}).is_dense();
  with_fp8_format(codes.dtype(), [&](auto format) {
    decode_all<decltype(format)>(codes.data<uint8_t>(), out.data<float>(), codes.numel());
  });
}

APEX_TE_DEFINE(fp8_gemm_epilogue) {
  using namespace apex_te;
  Epilogue e;
  const TensorView product = args.tensor();
  product.has_dtype({DType::kFloat32}).has_ndim(2).is_dense();
  e.product = product.data<float>();
  e.rows = product.size(0);
  e.cols = product.size(1);
  e.a_scale_inv = args.tensor().is_scalar(DType::kFloat32).data<float>();
  e.b_scale_inv = args.tensor().is_scalar(DType::kFloat32).data<float>();
  e.out = args.tensor();
  e.bias = args.optional_tensor();
  e.c = args.optional_tensor();
  e.aux = args.optional_tensor();
  check_epilogue(e, e.rows, e.cols);
  e.accumulate = args.boolean();
  check_accumulate(args, e, e.accumulate);
  switch (e.out.dtype()) {
    case DType::kFloat32:
      return finish<float, BFloat16>(e);
    case DType::kFloat16:
      return finish<Half, Half>(e);
    default:
      return finish<BFloat16, BFloat16>(e);
  }
}
