// Lanes of a warp for which a predicate holds, one bit each.
#pragma once

#include "common/gpu/device.h"

namespace apex_te {

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t warp_ballot(bool holds) {
#if defined(__HIP_PLATFORM_AMD__)
  // A warp is 32 lanes of a wave, which may have 64.
  return static_cast<uint32_t>(__ballot(holds) >> (__lane_id() & 32));
#else
  return __ballot_sync(0xFFFFFFFFu, holds);
#endif
}

#endif  // __CUDACC__

}  // namespace apex_te
