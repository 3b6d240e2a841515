// CUDA kernels of grouped_cast for gated rows in blocks by the rule that divides.
#include "grouped_cast/grouped_cast_sources_cuda.h"

template <>
void apex_te::launch_gated_blocks<true>(const GroupedCast& p, cudaStream_t stream) {
  with_gated_source(p, [&](auto zero, const auto& source) {
    launch_blocks<decltype(zero), true>(p, source, stream);
  });
}
