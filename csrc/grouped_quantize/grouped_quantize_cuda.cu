// CUDA kernels of grouped_quantize's casts of groups of x and of matrices.
#include "grouped_quantize/grouped_quantize_tile_cuda.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

template <typename T, typename Format>
void launch(const GroupedQuantize& q, Params p, cudaStream_t stream) {
  bool aligned = p.cols % kVec == 0 && is_aligned(p.rowwise, 8) && is_aligned(p.columnwise, 16);
  if (!p.stacked) {
    aligned = aligned && is_aligned(p.x, 16);
  } else {
    aligned = aligned && p.rows * p.cols % 16 == 0 && (!p.columnwise || p.rows % 16 == 0);
  }
  const int count = p.stacked && p.columns > 0 && p.cols > 0 ? p.table.groups : 1;
  const int most = kPointers / p.parts;
  for (int first = 0; first < count; first += most) {
    Pointers matrices;
    const int here = std::min(most, count - first);
    p.first = first;
    if (p.stacked)
      for (int i = 0; i < here * p.parts; ++i) {
        matrices.at[i] = q.matrices.at(first + i / p.parts, i % p.parts);
        aligned = aligned && is_aligned(matrices.at[i], 16);
      }
    const auto run = aligned ? launch_tiles<T, true, OneFormat<Format>, PlainSource>
                             : launch_tiles<T, false, OneFormat<Format>, PlainSource>;
    run(p, matrices, here, {}, {}, stream);
  }
}

void run_quantize(const GroupedQuantize& q, Args& args) {
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const Params p = params_of(q);
  with_dtype(q.dtype, [&](auto zero) {
    using T = decltype(zero);
    q.codes == DType::kE5M2 ? launch<T, E5M2>(q, p, stream) : launch<T, E4M3>(q, p, stream);
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(grouped_quantize) {
  using namespace apex_te;
  run_quantize(check_grouped_quantize(args), args);
}

APEX_TE_DEFINE(grouped_quantize_matrices) {
  using namespace apex_te;
  run_quantize(check_grouped_quantize_matrices(args), args);
}
