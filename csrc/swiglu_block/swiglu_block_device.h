// CUDA kernels of swiglu with results in FP8 blocks of 1 x 128: tiles of 128 x 128, computed into
// the registers from which they are cast. A block of backward has a tile of either gradient, made
// of the same inputs.
//
// The kernels are compiled for each activation and dtype, those of a direction and of rules that
// divide or multiply in a file of their own, and those of held inputs, which multiply. Format,
// alignment and biases are branches that a whole grid takes alike. Forward of rows at any alignment
// has a kernel of its own (swiglu_block_fwd_staged_cuda.cu).
#pragma once

#include "common/gpu/block_1x128.h"
#include "swiglu/swiglu_device.h"
#include "swiglu_block/swiglu_block.h"

namespace apex_te {
namespace swiglu_block {

using Tile = BlockTile;
constexpr int kRows = Tile::kRows;

// Blocks of an SM, and a thread's rows whose loads are in flight at once: what its registers hold
// beside the results, a patch of forward and two of backward.
template <bool kBwd>
constexpr int kBlocks = kBwd ? 2 : 3;
constexpr int kBatch = 4;

struct Params {
  Swiglu op;
  BlockCast cast;
  bool loads_vectors, stores_vectors;
};

// kBatch rows of a thread from `x` on, `ld` elements apart, of which `rows` exist. as_vectors: the
// rows' 8 elements may be loaded at once; otherwise n of them exist.
template <typename T>
__device__ __forceinline__ void load_rows(const T* x, int64_t ld, int rows, bool as_vectors,
                                          int64_t n, Vec8<T>* in) {
  if (as_vectors && rows >= kBatch) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r, x += ld) in[r] = load_vec(x);
    return;
  }
#pragma unroll
  for (int r = 0; r < kBatch; ++r, x += ld) in[r] = load_partial(x, r < rows ? n : 0);
}
template <typename T>
__device__ __forceinline__ void add_bias(const void* bias, int64_t col, int64_t n, float* values) {
  float addends[kVec];
  unpack(load_partial(static_cast<const T*>(bias) + col, n), addends);
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] += addends[i];
}

// A thread's part of a tile at `at`: results of forward into `first`; of backward dgate into
// `first` and dup into `second`. Zeros where the matrix has no element: a bias would make
// something of none, and a gradient -0.
template <typename T, Activation kAct, bool kBwd, bool kHeld>
__device__ __forceinline__ void compute(const Params& p, const Tile::Place& at, Vec8<T>* first,
                                        Vec8<T>* second) {
  const Swiglu& op = p.op;
  const T* gates = static_cast<const T*>(op.gate) + at.row * op.gate_ld + at.col;
  const T* ups = static_cast<const T*>(op.up) + at.row * op.up_ld + at.col;
  const T* grads = static_cast<const T*>(op.grad_output) + at.row * op.cols + at.col;
  const int rows = at.rows_present();
  const int64_t n = op.cols - at.col;
#pragma unroll
  for (int r0 = 0; r0 < kRows; r0 += kBatch) {
    Vec8<T> gate[kBatch], up[kBatch], grad[kBatch];
    if constexpr (kHeld) {
      load_held<kBatch>(op, at.row + r0, at.col, rows - r0, n > 0, gate);
      load_held<kBatch>(op, at.row + r0, op.cols + at.col, rows - r0, n > 0, up);
    } else {
      load_rows(gates, op.gate_ld, rows - r0, p.loads_vectors, n, gate);
      load_rows(ups, op.up_ld, rows - r0, p.loads_vectors, n, up);
    }
    if (kBwd) load_rows(grads, op.cols, rows - r0, p.loads_vectors, n, grad);
    gates += kBatch * op.gate_ld;
    ups += kBatch * op.up_ld;
    grads += kBatch * op.cols;
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      first[r0 + r] = second[r0 + r] = Vec8<T>{};
      if (r0 + r >= rows) continue;
      float g[kVec], u[kVec], d[kVec];
      unpack(gate[r], g);
      unpack(up[r], u);
      if (op.gate_bias) {
        add_bias<T>(op.gate_bias, at.col, n, g);
        add_bias<T>(op.up_bias, at.col, n, u);
      }
      if (kBwd) unpack(grad[r], d);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (kBwd)
          gated_gradient<kAct, false>(g[i], u[i], d[i], op.clamp, &g[i], &u[i]);
        else
          g[i] = gated<kAct, false>(g[i], u[i], op.clamp);
      }
      pack(g, &first[r0 + r]);
      if (kBwd) pack(u, &second[r0 + r]);
    }
  }
}

template <typename T, Activation kAct, bool kBwd, bool kDivides, bool kHeld>
__global__ void __launch_bounds__(Tile::kThreads, kBlocks<kBwd>)
    swiglu_block_kernel(const Params p) {
  __shared__ Block1x128Shared<T> shared;
  const int lane = threadIdx.x % Tile::kLanes, group = threadIdx.x / Tile::kLanes;
  Tile::Place at(p.cast.rows, p.op.cols, lane, group);
  if (at.row0 >= at.rows) return;
  const AnyFormat<kDivides> format{p.cast.fp8 == DType::kE5M2};
  const bool is_whole = p.stores_vectors && at.is_whole();
  Vec8<T> first[kVec], second[kVec];
  compute<T, kAct, kBwd, kHeld>(p, at, first, second);
  at.cols = p.cast.cols;
  cast_1x128(p.cast, at, p.stores_vectors, is_whole, format, first, shared);
  if (!kBwd) return;
  at.col0 += p.op.cols;
  at.col += p.op.cols;
  cast_1x128(p.cast, at, p.stores_vectors, is_whole, format, second, shared);
}

template <bool kBwd, bool kDivides, bool kHeld>
void launch(const Params& p, cudaStream_t stream) {
  if (!p.op.rows || !p.op.cols) return;
  const dim3 blocks = Tile::grid(p.op.rows, p.op.cols, "swiglu_block");
  GatedKinds::choose(p.op.activation, [&](auto act) {
    constexpr Activation kAct = decltype(act)::value;
    auto kernel = swiglu_block_kernel<BFloat16, kAct, kBwd, kDivides, kHeld>;
    if constexpr (!kHeld)
      if (p.op.dtype == DType::kFloat16)
        kernel = swiglu_block_kernel<Half, kAct, kBwd, kDivides, kHeld>;
    kernel<<<blocks, Tile::kThreads, 0, stream>>>(p);
  });
  check_cuda(cudaGetLastError(), "swiglu_block");
}
// Compiled where a file instantiates them.
extern template void launch<false, false, false>(const Params&, cudaStream_t);
extern template void launch<false, true, false>(const Params&, cudaStream_t);
extern template void launch<true, false, false>(const Params&, cudaStream_t);
extern template void launch<true, true, false>(const Params&, cudaStream_t);
extern template void launch<false, false, true>(const Params&, cudaStream_t);
extern template void launch<true, false, true>(const Params&, cudaStream_t);

// Forward of inputs that do not allow vector accesses.
void launch_staged(const Params& p, cudaStream_t stream);

template <bool kBwd, bool kHeld = false>
void run(Args& args) {
  const SwigluBlock given = check_swiglu_block(args, kBwd, kHeld);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const BlockCast& cast = given.cast;
  if (kHeld) check_held_vectors(args, given.op);
  const Params p{given.op, cast, kHeld || swiglu_inputs_aligned(given.op),
                 fp8_tile_aligned(cast.columnwise_ld, cast.cols, cast.rowwise, cast.columnwise)};
  if (!kBwd && !p.loads_vectors) return launch_staged(p, stream);
  if constexpr (kHeld)
    launch<kBwd, false, true>(p, stream);
  else
    with_divides(cast.rule,
                 [&](auto divides) { launch<kBwd, decltype(divides)::value, false>(p, stream); });
}

}  // namespace swiglu_block
}  // namespace apex_te
