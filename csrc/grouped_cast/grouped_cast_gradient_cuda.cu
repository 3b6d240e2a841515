// CUDA kernels of grouped_cast for gradients of gated rows.
#include "grouped_cast/grouped_cast_sources_cuda.h"

void apex_te::launch_gated_gradient(const GroupedCast& p, cudaStream_t stream) {
  with_gated(p.from, [&](auto zero, auto kind) {
    const Produced& from = p.from;
    launch_cast<decltype(zero)>(
        p, GatedGradient<decltype(kind)::value>{from.grad, from.factor, from.partials, from.rows},
        stream);
  });
}
