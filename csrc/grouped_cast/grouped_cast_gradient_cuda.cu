// CUDA kernels of grouped_cast for gradients of gated rows with one scale for each group.
#include "grouped_cast/grouped_cast_sources_cuda.h"

void apex_te::launch_gated_gradient(const GroupedCast& p, cudaStream_t stream) {
  with_gradient_source(
      p, [&](auto zero, const auto& source) { launch_groups<decltype(zero)>(p, source, stream); });
}
