// swiglu in FP8 blocks of 1 x 128 on CUDA, and the cast of its input to E4M3: a block's tiles of
// gates and ups are cast from the registers of which the result is made.
#include "swiglu_block/swiglu_block_device.h"

namespace apex_te {
namespace swiglu_block {
namespace {

template <typename T, Activation kAct, bool kDivides>
__global__ void __launch_bounds__(Tile::kThreads, kBlocks<true>)
    swiglu_hold_kernel(const Params p) {
  __shared__ Block1x128Shared<T> shared;
  const Swiglu& op = p.op;
  const int lane = threadIdx.x % Tile::kLanes, group = threadIdx.x / Tile::kLanes;
  Tile::Place at(p.cast.rows, op.cols, lane, group);
  if (at.row0 >= at.rows) return;
  const bool is_whole = p.stores_vectors && at.is_whole();
  const T* gates = static_cast<const T*>(op.gate) + at.row * op.gate_ld + at.col;
  const T* ups = static_cast<const T*>(op.up) + at.row * op.up_ld + at.col;
  const int rows = at.rows_present();
  Vec8<T> gate[kVec], up[kVec];
#pragma unroll
  for (int r = 0; r < kRows; r += kBatch) {
    load_rows(gates + r * op.gate_ld, op.gate_ld, rows - r, p.loads_vectors, kVec, gate + r);
    load_rows(ups + r * op.up_ld, op.up_ld, rows - r, p.loads_vectors, kVec, up + r);
  }
  Tile::Place held = at;
  held.cols = p.hold.cols;
  cast_1x128(p.hold, held, p.stores_vectors, is_whole, OneFormat<E4M3>{}, gate, shared);
  held.col0 += op.cols;
  held.col += op.cols;
  cast_1x128(p.hold, held, p.stores_vectors, is_whole, OneFormat<E4M3>{}, up, shared);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float g[kVec], u[kVec];
    unpack(gate[r], g);
    unpack(up[r], u);
#pragma unroll
    for (int i = 0; i < kVec; ++i) g[i] = gated<kAct, false>(g[i], u[i], op.clamp);
    pack(g, &gate[r]);
    if (r >= rows) gate[r] = Vec8<T>{};
  }
  const AnyFormat<kDivides> format{p.cast.fp8 == DType::kE5M2};
  cast_1x128(p.cast, at, p.stores_vectors, is_whole, format, gate, shared);
}

template <bool kDivides>
void launch_hold(const Params& p, cudaStream_t stream) {
  const dim3 blocks = Tile::grid(p.op.rows, p.op.cols, "swiglu_block");
  GatedKinds::choose(p.op.activation, [&](auto act) {
    constexpr Activation kAct = decltype(act)::value;
    const auto kernel = p.op.dtype == DType::kFloat16
                            ? swiglu_hold_kernel<Half, kAct, kDivides>
                            : swiglu_hold_kernel<BFloat16, kAct, kDivides>;
    kernel<<<blocks, Tile::kThreads, 0, stream>>>(p);
  });
  check_cuda(cudaGetLastError(), "swiglu_block");
}

}  // namespace
}  // namespace swiglu_block
}  // namespace apex_te

APEX_TE_DEFINE(swiglu_hold_block) {
  using namespace apex_te;
  const SwigluBlock given = check_swiglu_block(args, false, Holding::kHolds);
  const DeviceGuard guard(args.device_id());
  if (!given.op.rows || !given.op.cols) return;
  swiglu_block::Params p{given.op, given.cast, given.hold, swiglu_inputs_aligned(given.op)};
  p.stores_vectors = swiglu_block::stores_vectors(p.cast) && swiglu_block::stores_vectors(p.hold);
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_divides(p.cast.rule, [&](auto divides) {
    swiglu_block::launch_hold<decltype(divides)::value>(p, stream);
  });
}
