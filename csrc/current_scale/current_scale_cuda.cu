// CUDA launches of current_scale; the kernels are those of common/gpu/quantize.h.
#include "common/gpu/quantize.h"
#include "common/numerics/with_dtype.h"
#include "current_scale/current_scale.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

template <typename Format>
struct FP8Encoder {
  struct Table {};
  __device__ __forceinline__ void stage(Table&) const {}
  static __device__ __forceinline__ uint2 encode(const float* values, float scale, const Table&) {
    return encode_values<Format>(values, scale);
  }
};

// The partial amaxes folded into one.
__global__ void fold_amaxes_kernel(const uint32_t* amaxes, int num_amaxes, float* amax) {
  wait_for_previous_kernel();
  uint32_t found = 0;
  for (int i = threadIdx.x; i < num_amaxes; i += 32)
    found = max(found, *const_cast<const volatile uint32_t*>(amaxes + i));
  found = warp_max(found);
  if (threadIdx.x == 0) *amax = __uint_as_float(found);
}

template <typename T>
void launch(const CurrentScaleCall& p, cudaStream_t stream) {
  const CurrentScale source = launch_current_scale<T>(p, stream);
  with_fp8_format(p.q.codes, [&](auto format) {
    launch_quantize<T>(p.q, source, FP8Encoder<decltype(format)>{}, stream);
  });
}

void launch_dtype(const CurrentScaleCall& p, Args& args) {
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(p.q.x.dtype(), [&](auto zero) { launch<decltype(zero)>(p, stream); });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(current_scale_fwd) {
  using namespace apex_te;
  launch_dtype(check_current_scale(args, true), args);
}

APEX_TE_DEFINE(current_scale_cast) {
  using namespace apex_te;
  launch_dtype(check_current_scale(args, false), args);
}

APEX_TE_DEFINE(current_scale_amax) {
  using namespace apex_te;
  const CurrentScaleAmax p = check_current_scale_amax(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const int found = with_dtype(
      p.x.dtype(), [&](auto zero) { return launch_amax<decltype(zero)>(p.x, p.amaxes, stream); });
  launch_dependent(fold_amaxes_kernel, 1, 32, stream, static_cast<const uint32_t*>(p.amaxes), found,
                   p.amax);
}
