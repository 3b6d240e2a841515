// CUDA kernels of swiglu with results in FP8 blocks of 1 x 128: tiles of 128 x 128, computed into
// the registers from which they are cast. A block of backward has a tile of either gradient, made
// of the same inputs.
//
// The kernels are compiled for each activation and dtype, those of a direction and of rules that
// divide or multiply in a file of their own. Format, alignment and biases are branches that a whole
// grid takes alike.
#pragma once

#include "common/gpu/block_1x128.h"
#include "common/gpu/staged_rows.h"
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
  unsigned resident;  // blocks that run at once
};

// Rows that do not begin at whole vectors, of a half-warp, on their way through shared memory.
using Staged = StagedRows<kBatch>;
constexpr size_t kStagedBytes = sizeof(Staged) * Tile::kThreads / kStagedLanes;

// A call, so that its code is there once.
static __device__ __noinline__ void fetch_staged(const void* matrix, const uint16_t* first,
                                                 int64_t ld, int rows, int64_t cols, Staged& to) {
  __syncwarp();  // all have read what was there
  StagedPlace(0, 0, rows, cols).fetch({first, ld}, matrix, to);
  finish_fetches();
}

// kBatch rows of a thread from `x` on in `matrix`, `ld` elements apart, of which `rows` exist, with
// n elements left. as_vectors: the rows' 8 elements may be loaded at once, or none exist.
template <typename T>
__device__ __forceinline__ void load_rows(const void* matrix, const T* x, int64_t ld, int rows,
                                          bool as_vectors, int64_t n, Vec8<T>* in) {
  if (as_vectors) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r, x += ld) in[r] = r < rows ? load_vec(x) : Vec8<T>{};
    return;
  }
  extern __shared__ __align__(16) unsigned char shared[];
  Staged& staged = reinterpret_cast<Staged*>(shared)[threadIdx.x / kStagedLanes];
  const int before = threadIdx.x % kStagedLanes * kVec;
  const auto* first = reinterpret_cast<const uint16_t*>(x) - before;
  // The first lane's columns exist if any do.
  rows = __shfl_sync(0xFFFFFFFFu, rows, 0, kStagedLanes);
  fetch_staged(matrix, first, ld, rows, n + before, staged);
#pragma unroll
  for (int r = 0; r < kBatch; ++r)
    in[r] = StagedPlace(0, 0, rows, n + before).read<T>({first, ld}, staged, r);
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
template <typename T, Activation kAct, bool kBwd>
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
    load_rows(op.gate, gates, op.gate_ld, rows - r0, p.loads_vectors, n, gate);
    load_rows(op.up, ups, op.up_ld, rows - r0, p.loads_vectors, n, up);
    if (kBwd) load_rows(op.grad_output, grads, op.cols, rows - r0, p.loads_vectors, n, grad);
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

// Brings the inputs of a block that starts when this one ends to the L2 cache, while this one
// casts.
__device__ __forceinline__ void prefetch_next(const Params& p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(APEX_TE_PORTABLE)
  const Swiglu& op = p.op;
  const unsigned next = blockIdx.x + p.resident;
  const int64_t row_tile = block_row() + next / gridDim.x;
  const int64_t col = int64_t{next % gridDim.x} * kBlock;
  for (int i = threadIdx.x; i < 3 * kBlock; i += Tile::kThreads) {
    const int64_t row = row_tile * kBlock + i % kBlock;
    if (row >= op.rows) continue;
    const int of = i / kBlock;
    const auto* from = static_cast<const uint16_t*>(of == 0   ? op.gate
                                                    : of == 1 ? op.up
                                                              : op.grad_output) +
                       row * (of == 0   ? op.gate_ld
                              : of == 1 ? op.up_ld
                                        : op.cols) +
                       col;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
                 "r"(static_cast<int>(2 * kBlock))
                 : "memory");
  }
#endif
}

template <typename T, Activation kAct, bool kBwd, bool kDivides>
__global__ void __launch_bounds__(Tile::kThreads, kBlocks<kBwd>)
    swiglu_block_kernel(const Params p) {
  __shared__ Block1x128Shared<T> shared;
  const int lane = threadIdx.x % Tile::kLanes, group = threadIdx.x / Tile::kLanes;
  Tile::Place at(p.cast.rows, p.op.cols, lane, group);
  if (at.row0 >= at.rows) return;
  const AnyFormat<kDivides> format{p.cast.fp8 == DType::kE5M2};
  const bool is_whole = p.stores_vectors && at.is_whole();
  Vec8<T> first[kVec], second[kVec];
  compute<T, kAct, kBwd>(p, at, first, second);
  if (kBwd && p.loads_vectors) prefetch_next(p);
  at.cols = p.cast.cols;
  cast_1x128<T, AnyFormat<kDivides>, !kBwd>(p.cast, at, p.stores_vectors, is_whole, format, first,
                                            shared);
  if (!kBwd) return;
  at.col0 += p.op.cols;
  at.col += p.op.cols;
  cast_1x128(p.cast, at, p.stores_vectors, is_whole, format, second, shared);
}

template <bool kBwd, bool kDivides>
void launch(const Params& p, cudaStream_t stream) {
  if (!p.op.rows || !p.op.cols) return;
  const dim3 blocks = Tile::grid(p.op.rows, p.op.cols, "swiglu_block");
  GatedKinds::choose(p.op.activation, [&](auto act) {
    constexpr Activation kAct = decltype(act)::value;
    const auto kernel = p.op.dtype == DType::kFloat16
                            ? swiglu_block_kernel<Half, kAct, kBwd, kDivides>
                            : swiglu_block_kernel<BFloat16, kAct, kBwd, kDivides>;
    kernel<<<blocks, Tile::kThreads, p.loads_vectors ? 0 : kStagedBytes, stream>>>(p);
  });
  check_cuda(cudaGetLastError(), "swiglu_block");
}
// Compiled where a file instantiates them.
extern template void launch<false, false>(const Params&, cudaStream_t);
extern template void launch<false, true>(const Params&, cudaStream_t);
extern template void launch<true, false>(const Params&, cudaStream_t);
extern template void launch<true, true>(const Params&, cudaStream_t);

template <bool kBwd>
void run(Args& args) {
  const SwigluBlock given = check_swiglu_block(args, kBwd);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const BlockCast& cast = given.cast;
  const int resident = kBlocks<kBwd> * device_attribute(cudaDevAttrMultiProcessorCount);
  const Params p{given.op, cast, swiglu_inputs_aligned(given.op),
                 fp8_tile_aligned(cast.columnwise_ld, cast.cols, cast.rowwise, cast.columnwise),
                 static_cast<unsigned>(resident)};
  with_divides(cast.rule, [&](auto divides) { launch<kBwd, decltype(divides)::value>(p, stream); });
}

}  // namespace swiglu_block
}  // namespace apex_te
