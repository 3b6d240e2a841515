// CUDA kernels of hif8. Encoding: the kernels of common/gpu/quantize.h with the table in shared
// memory, so that an element takes a product, a shift and a look-up. Decoding: a table too.
#include "common/gpu/quantize.h"
#include "common/numerics/with_dtype.h"
#include "hif8/hif8.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

__device__ const Hif8EncodeTable kSaturating = hif8_encode_table(true);
__device__ const Hif8EncodeTable kToInfinity = hif8_encode_table(false);
__device__ const Hif8DecodeTable kDecode = hif8_decode_table();

constexpr int kDecodeThreads = 256;
constexpr int kDecodeSteps = 4;  // 8 codes each

struct Hif8Encoder {
  using Table = Hif8EncodeTable;
  bool saturate;

  // A barrier must follow.
  __device__ __forceinline__ void stage(Table& table) const {
    const Table& source = saturate ? kSaturating : kToInfinity;
    for (int i = threadIdx.x; i < kHif8Entries / 16; i += blockDim.x)
      reinterpret_cast<uint4*>(table.codes)[i] =
          __ldg(reinterpret_cast<const uint4*>(source.codes) + i);
  }
  static __device__ __forceinline__ uint2 encode(const float* values, float scale,
                                                 const Table& table) {
    uint32_t codes[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      codes[i] = table.codes[__float_as_uint(values[i] * scale) >> kHif8Shift];
    const uint32_t a = __byte_perm(codes[0], codes[1], 0x0040);
    const uint32_t b = __byte_perm(codes[2], codes[3], 0x0040);
    const uint32_t c = __byte_perm(codes[4], codes[5], 0x0040);
    const uint32_t d = __byte_perm(codes[6], codes[7], 0x0040);
    return make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
  }
};

template <typename T>
void launch(const Hif8Quantize& p, cudaStream_t stream) {
  const Hif8Encoder encoder{p.saturate};
  if (!p.scale)
    return launch_quantize<T>(p.q, GivenScale{p.given_scale, p.amax, p.scale_inv}, encoder, stream);
  launch_quantize<T>(p.q, launch_current_scale<T>(p, stream), encoder, stream);
}

void launch_dtype(const Hif8Quantize& p, Args& args) {
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(p.q.x.dtype(), [&](auto zero) { launch<decltype(zero)>(p, stream); });
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kDecodeThreads)
    hif8_decode_kernel(const uint8_t* codes, const float* scale_inv, T* out, int64_t numel) {
  __shared__ float table[256];
  constexpr int64_t kStride = kDecodeThreads * kVec;
  const int64_t begin = blockIdx.x * kStride * kDecodeSteps + threadIdx.x * kVec;
  uint2 in[kDecodeSteps];
#pragma unroll
  for (int k = 0; k < kDecodeSteps; ++k) {
    const int64_t i = begin + k * kStride;
    in[k] = kAligned && i + kVec <= numel ? *reinterpret_cast<const uint2*>(codes + i)
                                          : load_codes_partial(codes + i, numel - i);
  }
  const float scale = scale_inv ? *scale_inv : 1.0f;
  table[threadIdx.x] = __uint_as_float(kDecode.bits[threadIdx.x]) * scale;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kDecodeSteps; ++k) {
    const int64_t i = begin + k * kStride;
    float values[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c)
      values[c] = table[(c < 4 ? in[k].x : in[k].y) >> 8 * (c % 4) & 0xFF];
    Vec8<T> v;
    pack(values, &v);
    if (kAligned && i + kVec <= numel)
      store_vec(out + i, v);
    else
      store_partial(out + i, v, numel - i);
  }
}

template <typename T>
void launch_decode(const Hif8Decode& p, cudaStream_t stream) {
  constexpr int64_t kPerBlock = kDecodeThreads * kVec * kDecodeSteps;
  const int64_t numel = p.codes.numel(), blocks = (numel + kPerBlock - 1) / kPerBlock;
  if (numel == 0) return;
  if (blocks > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "hif8_decode: codes must have fewer than 2^44 elements");
  const uint8_t* codes = p.codes.data<const uint8_t>();
  T* out = p.out.data<T>();
  const auto kernel = is_aligned(codes, 8) && is_aligned(out, 16) ? hif8_decode_kernel<T, true>
                                                                  : hif8_decode_kernel<T, false>;
  kernel<<<static_cast<unsigned>(blocks), kDecodeThreads, 0, stream>>>(codes, p.scale_inv, out,
                                                                       numel);
  check_cuda(cudaGetLastError(), "hif8_decode");
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(hif8_quantize) {
  using namespace apex_te;
  launch_dtype(check_hif8_quantize(args), args);
}

APEX_TE_DEFINE(hif8_current) {
  using namespace apex_te;
  launch_dtype(check_hif8_current(args, true), args);
}

APEX_TE_DEFINE(hif8_cast) {
  using namespace apex_te;
  launch_dtype(check_hif8_current(args, false), args);
}

APEX_TE_DEFINE(hif8_decode) {
  using namespace apex_te;
  const Hif8Decode p = check_hif8_decode(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(p.out.dtype(), [&](auto zero) { launch_decode<decltype(zero)>(p, stream); });
}
