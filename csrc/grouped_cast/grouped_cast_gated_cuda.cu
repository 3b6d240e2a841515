// CUDA kernels of grouped_cast for gated rows.
#include "grouped_cast/grouped_cast_sources_cuda.h"

void apex_te::launch_gated(const GroupedCast& p, cudaStream_t stream) {
  with_gated(p.from, [&](auto zero, auto kind, auto has_bias, auto interleaved) {
    using Source =
        Gated<decltype(kind)::value, decltype(has_bias)::value, decltype(interleaved)::value>;
    launch_cast<decltype(zero)>(p, Source{p.from.factor, p.from.bias, p.from.clamp}, stream);
  });
}
