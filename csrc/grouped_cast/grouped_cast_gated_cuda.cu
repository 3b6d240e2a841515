// CUDA kernels of grouped_cast for gated rows with one scale for each group.
#include "grouped_cast/grouped_cast_sources_cuda.h"

void apex_te::launch_gated(const GroupedCast& p, cudaStream_t stream) {
  with_gated_source(
      p, [&](auto zero, const auto& source) { launch_groups<decltype(zero)>(p, source, stream); });
}
