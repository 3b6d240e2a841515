// CPU side of fp8_gemm: exact decode of the operands, and the epilogue of the fp32 product.
#include <algorithm>
#include <cmath>

#include "common/codec.h"
#include "common/cpu.h"
#include "common/parallel.h"
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
void decode_portable(const uint8_t* codes, float* out, int64_t n) {
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
  const Bias* bias = e.bias.data<Bias>();
  const int64_t rows_per_chunk = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, e.cols));
  parallel_for((e.rows + rows_per_chunk - 1) / rows_per_chunk, [&](int64_t chunk) {
    const int64_t end = std::min(e.rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r) {
      const int64_t offset = r * e.cols;
      for (int64_t c = 0; c < e.cols; ++c) {
        float value = e.product[offset + c] * scale;
        if (bias) value += to_float(bias[c]);
        if (aux) {
          aux[offset + c] = from_float<T>(value);
          value = gelu(value);
        }
        if (e.accumulate) value += to_float(out[offset + c]);
        out[offset + c] = from_float<T>(value);
      }
    }
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(fp8_decode) {
  using namespace apex_te;
  const TensorView codes = args.tensor();
  const TensorView out = args.tensor();
  codes.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(2).is_dense();
  out.has_dtype({DType::kFloat32}).has_shape({codes.size(0), codes.size(1)}).is_dense();
  if (codes.dtype() == DType::kE5M2)
    decode_all<E5M2>(codes.data<uint8_t>(), out.data<float>(), codes.numel());
  else
    decode_all<E4M3>(codes.data<uint8_t>(), out.data<float>(), codes.numel());
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
  e.aux = args.optional_tensor();
  check_epilogue(e, e.rows, e.cols);
  e.accumulate = args.boolean();
  switch (e.out.dtype()) {
    case DType::kFloat32:
      return finish<float, BFloat16>(e);
    case DType::kFloat16:
      return finish<Half, Half>(e);
    default:
      return finish<BFloat16, BFloat16>(e);
  }
}
