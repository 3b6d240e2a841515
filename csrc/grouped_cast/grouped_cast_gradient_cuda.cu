// CUDA kernels of grouped_cast for gradients of gated rows.
#include "grouped_cast/grouped_cast_sources_cuda.h"

void apex_te::launch_gated_gradient(const GroupedCast& p, cudaStream_t stream) {
  with_gated(p.from, [&](auto zero, auto kind, auto has_bias, auto interleaved) {
    const Produced& from = p.from;
    using Source = GatedGradient<decltype(kind)::value, decltype(has_bias)::value,
                                 decltype(interleaved)::value>;
    const Source source{from.grad, from.factor, from.partials,  from.rows,
                        from.bias, from.lines,  from.num_lines, from.clamp};
    launch_cast<decltype(zero)>(p, source, stream);
  });
}
