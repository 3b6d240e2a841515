// CUDA of the ops activation and bias_gelu: the arithmetic, and the kernel over vectors.
//
// cuda.h         vectors of 16 bytes in memory order; results in the input's dtype
// tile_cuda.h    tiles of 16-bit elements: FP8 results in both layouts, and dbias
// staged_cuda.h  the same of rows at any alignment
// any_cuda.h     by element: any dtype, extent and alignment
//
// A kernel is compiled for each function and direction only. Dtype, FP8 format and outputs are
// branches that a whole grid takes alike, once for 8 elements, which memory speed does not notice.
#pragma once

#include "common/activation/arguments.h"
#include "common/gpu/shifted.h"

namespace apex_te {

// The functions an op is compiled for, and whether it adds a bias.
template <bool kWithBias, Activation... kKinds>
struct ActivationKinds {
  static constexpr bool kBias = kWithBias;
  // Calls body with the kind as a compile-time constant.
#pragma nv_exec_check_disable
  template <typename Body>
  static __host__ __device__ __forceinline__ void choose(Activation kind, const Body& body) {
    ((kind == kKinds ? body(std::integral_constant<Activation, kKinds>{}) : void()), ...);
  }
};

// f(x), or dy f'(x); kFine: for a result in float32.
template <Activation kKind, bool kBwd, bool kFine>
__device__ __forceinline__ float activation_result(float x, float dy) {
  return kBwd ? activation_gradient<kKind, kFine>(x, dy) : activate<kKind, kFine>(x);
}
template <Activation kKind, bool kBwd>
__device__ __forceinline__ float activation_result(float x, float dy, bool is_fine) {
  return is_fine ? activation_result<kKind, kBwd, true>(x, dy)
                 : activation_result<kKind, kBwd, false>(x, dy);
}

using Words4 = Vec8<BFloat16>;  // 16 bytes: 8 elements of 16 bits, of either type, or 4 floats

__device__ __forceinline__ void unpack16(const Words4& v, bool is_half, float* values) {
  if (is_half)
    unpack(reinterpret_cast<const Vec8<Half>&>(v), values);
  else
    unpack(v, values);
}
__device__ __forceinline__ Words4 pack16(const float* values, bool is_half) {
  Words4 v;
  if (is_half)
    pack(values, reinterpret_cast<Vec8<Half>*>(&v));
  else
    pack(values, &v);
  return v;
}

__device__ __forceinline__ float load_element(const void* p, int64_t i, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(p)[i];
  if (dtype == DType::kFloat16) return to_float(static_cast<const Half*>(p)[i]);
  return to_float(static_cast<const BFloat16*>(p)[i]);
}
__device__ __forceinline__ void store_element(void* p, int64_t i, DType dtype, float value) {
  if (dtype == DType::kFloat32)
    static_cast<float*>(p)[i] = value;
  else if (dtype == DType::kFloat16)
    static_cast<Half*>(p)[i] = from_float<Half>(value);
  else
    static_cast<BFloat16*>(p)[i] = from_float<BFloat16>(value);
}

// n mod divisor for n < 2^31, without a division.
struct Modulo {
  uint32_t divisor, factor, shift;
  explicit Modulo(uint32_t d) : divisor(d), factor(0), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t n) const {
    return n - ((__umulhi(n, factor) + n) >> shift) * divisor;
  }
};

constexpr int kFlatThreads = 128;
constexpr int kFlatSteps = 2;  // vectors of a thread in flight

// Where the vectors of x lie in its rows, in units of 16 bits; a vector has 8.
struct FlatRows {
  uint32_t units;          // of a row
  bool is_aligned;         // the bias may be loaded in vectors, of which each lies in one row
  Modulo vectors, of_row;  // by the number after which vectors lie alike, by units

  FlatRows(uint32_t row_units, bool aligned)
      : units(row_units),
        is_aligned(aligned && row_units % kVec == 0),
        vectors(is_aligned ? row_units / kVec : row_units),
        of_row(row_units) {}
};

// The bias of vector v. One that is not aligned is shifted, one over several rows gathered.
__device__ __forceinline__ Words4 load_flat_bias(const void* bias, uint32_t v, const FlatRows& n) {
  const BFloat16* from = static_cast<const BFloat16*>(bias);
  uint32_t at = n.vectors(v) * kVec;
  if (n.is_aligned) return load_vec(from + at);
  at = n.of_row(at);
  if (at + kVec <= n.units) return load_shifted(from + at, kVec, from, from + n.units);
  Words4 words = {};
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    words.words[i / 2] |= static_cast<uint32_t>(from[at].bits) << 16 * (i % 2);
    at = at + 1 == n.units ? 0 : at + 1;
  }
  return words;
}

// All 16-byte vectors of x, and at the end the elements that fill none.
template <Activation kKind, bool kBwd, bool kBias>
__global__ void __launch_bounds__(kFlatThreads)
    activation_flat_kernel(const ActivationOp p, const FlatRows flat) {
  constexpr int kSteps = kFlatSteps;
  const bool is_half = p.dtype == DType::kFloat16, is_float = p.dtype == DType::kFloat32;
  const int64_t numel = p.rows * p.cols, vectors = is_float ? numel / 4 : numel / 8;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kFlatThreads * kSteps + threadIdx.x;
  Words4 in[kSteps], grad[kSteps], bias[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t v = begin + k * kFlatThreads;
    in[k] = grad[k] = bias[k] = Words4{};
    if (v >= vectors) continue;
    in[k] = load_vec(static_cast<const BFloat16*>(p.x) + v * kVec);
    if (kBwd) grad[k] = load_vec(static_cast<const BFloat16*>(p.dy) + v * kVec);
    if (kBias && p.bias) bias[k] = load_flat_bias(p.bias, static_cast<uint32_t>(v), flat);
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t v = begin + k * kFlatThreads;
    Words4 out;
    if (is_float) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = __uint_as_float(in[k].words[i]);
        out.words[i] = __float_as_uint(activation_result<kKind, kBwd, true>(
            kBias ? x + __uint_as_float(bias[k].words[i]) : x, __uint_as_float(grad[k].words[i])));
      }
    } else {
      float values[kVec], grads[kVec];
      unpack16(in[k], is_half, values);
      if (kBwd) unpack16(grad[k], is_half, grads);
      if (kBias) {
        float biases[kVec];
        unpack16(bias[k], is_half, biases);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] += biases[i];
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        values[i] = activation_result<kKind, kBwd, false>(values[i], kBwd ? grads[i] : 0.0f);
      out = pack16(values, is_half);
    }
    if (v < vectors) store_vec(static_cast<BFloat16*>(p.out) + v * kVec, out);
  }
  const int64_t rest = (is_float ? vectors * 4 : vectors * 8) + threadIdx.x;
  if (blockIdx.x != 0 || rest >= numel) return;
  const float added = kBias && p.bias ? load_element(p.bias, rest % p.cols, p.dtype) : 0.0f;
  const float x = load_element(p.x, rest, p.dtype);
  store_element(
      p.out, rest, p.dtype,
      activation_result<kKind, kBwd>(kBias ? x + added : x,
                                     kBwd ? load_element(p.dy, rest, p.dtype) : 0.0f, is_float));
}

// 16-byte accesses fit, and where there is a bias, the numbers of vectors and of a row's units.
inline bool activation_flat_fits(const ActivationOp& p) {
  const int64_t per_vector = p.dtype == DType::kFloat32 ? 4 : 8;
  return is_aligned(p.x, 16) && is_aligned(p.dy, 16) && is_aligned(p.out, 16) &&
         (!p.bias || (p.cols < 1LL << 27 && p.rows * p.cols / per_vector < 1LL << 31));
}

template <typename Kinds, bool kBwd>
void launch_activation_flat(const ActivationOp& p, cudaStream_t stream) {
  const int64_t per_vector = p.dtype == DType::kFloat32 ? 4 : 8;
  constexpr int64_t kPerBlock = int64_t{kFlatThreads} * kFlatSteps;
  const int64_t blocks = (p.rows * p.cols / per_vector + kPerBlock - 1) / kPerBlock;
  if (blocks > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "activation: x must have fewer than 2^43 elements");
  const int64_t units = p.bias && p.cols ? p.cols * (kVec / per_vector) : 1;
  const FlatRows flat(static_cast<uint32_t>(units), is_aligned(p.bias, 16));
  Kinds::choose(p.kind, [&](auto kind) {
    activation_flat_kernel<decltype(kind)::value, kBwd, Kinds::kBias>
        <<<static_cast<unsigned>(blocks ? blocks : 1), kFlatThreads, 0, stream>>>(p, flat);
  });
  check_cuda(cudaGetLastError(), "activation");
}

}  // namespace apex_te
