// CUDA launches of grouped_cast, and its kernels for gathered rows.
#include "grouped_cast/grouped_cast_sources_cuda.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

void check_vectors(const Args& args, const GroupedCast& p) {
  const Produced& from = p.from;
  const int64_t cols = from.grad ? from.cols / 2 : from.cols;
  const uint8_t* rowwise = p.in_blocks ? p.blocks.rowwise : p.groups.rowwise;
  const uint8_t* columnwise = p.in_blocks ? p.blocks.columnwise : p.groups.columnwise;
  if (cols % kVec == 0 && is_aligned(from.x, 16) && is_aligned(from.grad, 16) &&
      is_aligned(from.bias, 16) && is_aligned(from.lines, 16) && is_aligned(rowwise, 8) &&
      is_aligned(columnwise, 16))
    return;
  fail(kApexTeUnsupported,
       "%s: rows must have a multiple of 8 elements and tensors be aligned to 16 bytes, got %lld "
       "elements",
       args.name(), static_cast<long long>(cols));
}

void run_cast(Args& args, bool in_blocks) {
  const GroupedCast p = check_grouped_cast(args, in_blocks);
  check_vectors(args, p);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  if (!p.from.row_of)
    return p.from.grad ? launch_gated_gradient(p, stream) : launch_gated(p, stream);
  with_dtype(p.from.dtype, [&](auto zero) {
    launch_cast<decltype(zero)>(p, Gather{{}, p.from.row_of, p.from.tokens, p.from.factor}, stream);
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(grouped_cast) { apex_te::run_cast(args, false); }
APEX_TE_DEFINE(grouped_block_cast) { apex_te::run_cast(args, true); }
