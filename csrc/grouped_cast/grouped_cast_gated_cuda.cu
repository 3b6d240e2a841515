// CUDA kernels of grouped_cast for gated rows.
#include "grouped_cast/grouped_cast_sources_cuda.h"

void apex_te::launch_gated(const GroupedCast& p, cudaStream_t stream) {
  with_gated(p.from, [&](auto zero, auto kind) {
    launch_cast<decltype(zero)>(p, Gated<decltype(kind)::value>{p.from.factor}, stream);
  });
}
