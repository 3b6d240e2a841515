// CUDA kernels of moe_permute and their launches. Maps: moe_permute_route_cuda.h and
// moe_permute_chunks_cuda.h; copies: moe_permute_rows_cuda.h; sums: moe_unpermute_cuda.h.
#include "moe_permute/moe_permute_chunks_cuda.h"
#include "moe_permute/moe_permute_route_cuda.h"
#include "moe_permute/moe_permute_rows_cuda.h"
#include "moe_permute/moe_unpermute_cuda.h"

APEX_TE_LIBRARY()

APEX_TE_DEFINE(moe_permute_map) {
  using namespace apex_te;
  const Routing p = check_moe_permute_map(args);
  const DeviceGuard guard(args.device_id());
  launch_route(p, static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(moe_permute_fwd) {
  using namespace apex_te;
  Routing routing;
  const Permute p = check_moe_permute_fwd(args, &routing);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  launch_route(routing, stream);
  launch_permute(p.rows, p.map, true, stream);
}

APEX_TE_DEFINE(moe_permute_rows) {
  using namespace apex_te;
  const Permute p = check_moe_permute_rows(args);
  const DeviceGuard guard(args.device_id());
  launch_permute(p.rows, p.map, false, static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(moe_tokens_of_rows) {
  using namespace apex_te;
  const TokensOfRows p = check_moe_tokens_of_rows(args);
  const DeviceGuard guard(args.device_id());
  const int64_t blocks = (p.map.tokens + kRowWarps - 1) / kRowWarps;
  moe_tokens_of_rows_kernel<<<static_cast<unsigned>(blocks + kZeroBlocks), kRowThreads, 0,
                              static_cast<cudaStream_t>(args.stream())>>>(p, blocks);
  check_cuda(cudaGetLastError(), "moe_tokens_of_rows");
}

APEX_TE_DEFINE(moe_unpermute_fwd) {
  using namespace apex_te;
  const Unpermute p = check_moe_unpermute_fwd(args);
  const DeviceGuard guard(args.device_id());
  with_dtype(p.dtype, [&](auto zero) {
    launch_unpermute_fwd<decltype(zero)>(p, static_cast<cudaStream_t>(args.stream()));
  });
}

APEX_TE_DEFINE(moe_unpermute_bwd) {
  using namespace apex_te;
  const Unpermute p = check_moe_unpermute_bwd(args);
  const DeviceGuard guard(args.device_id());
  with_dtype(p.dtype, [&](auto zero) {
    launch_unpermute_bwd<decltype(zero)>(p, static_cast<cudaStream_t>(args.stream()));
  });
}

APEX_TE_DEFINE(moe_sort_chunks_map) {
  using namespace apex_te;
  const ChunkMap p = check_moe_sort_chunks_map(args);
  if (!p.rows) return;
  const DeviceGuard guard(args.device_id());
  moe_chunk_map_kernel<<<static_cast<unsigned>((p.rows + kChunkRows - 1) / kChunkRows),
                         kChunkThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(p);
  check_cuda(cudaGetLastError(), "moe_sort_chunks");
}

APEX_TE_DEFINE(moe_sort_chunks) {
  using namespace apex_te;
  const SortChunks p = check_moe_sort_chunks(args);
  const DeviceGuard guard(args.device_id());
  launch_sort_chunks(p, "moe_sort_chunks", static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(moe_gather_rows) {
  using namespace apex_te;
  const SortChunks p = check_moe_gather_rows(args);
  const DeviceGuard guard(args.device_id());
  launch_sort_chunks(p, "moe_gather_rows", static_cast<cudaStream_t>(args.stream()));
}
