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

template <typename Launch>
void with_gather(const GroupedCast& p, const Launch& launch) {
  with_dtype(p.from.dtype, [&](auto zero) {
    launch(zero, Gather{{}, p.from.row_of, p.from.tokens, p.from.factor});
  });
}
void cast_groups(const GroupedCast& p, cudaStream_t stream) {
  if (!p.from.row_of)
    return p.from.grad ? launch_gated_gradient(p, stream) : launch_gated(p, stream);
  with_gather(
      p, [&](auto zero, const Gather& rows) { launch_groups<decltype(zero)>(p, rows, stream); });
}
template <bool kDivides>
void cast_blocks(const GroupedCast& p, cudaStream_t stream) {
  if (!p.from.row_of)
    return p.from.grad ? launch_gated_gradient_blocks<kDivides>(p, stream)
                       : launch_gated_blocks<kDivides>(p, stream);
  with_gather(p, [&](auto zero, const Gather& rows) {
    launch_blocks<decltype(zero), kDivides>(p, rows, stream);
  });
}

void run_cast(Args& args, bool in_blocks) {
  const GroupedCast p = check_grouped_cast(args, in_blocks);
  check_vectors(args, p);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  if (!in_blocks) return cast_groups(p, stream);
  with_divides(p.blocks.rule,
               [&](auto divides) { cast_blocks<decltype(divides)::value>(p, stream); });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(grouped_cast) { apex_te::run_cast(args, false); }
APEX_TE_DEFINE(grouped_block_cast) { apex_te::run_cast(args, true); }
