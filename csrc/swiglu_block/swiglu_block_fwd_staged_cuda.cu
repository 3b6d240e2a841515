// swiglu in FP8 blocks of 1 x 128 on CUDA, of inputs whose rows do not begin at whole vectors: they
// pass through shared memory (common/gpu/staged_rows.h). The activation is a branch.
#include "common/gpu/staged_rows.h"
#include "swiglu_block/swiglu_block_device.h"

namespace apex_te {
namespace swiglu_block {
namespace {

struct Memory {
  StagedRows<kBatch> gate[Tile::kThreads / kStagedLanes], up[Tile::kThreads / kStagedLanes];
};

template <typename T, bool kDivides>
__global__ void __launch_bounds__(Tile::kThreads, kBlocks<false>)
    swiglu_block_staged_kernel(const Params p) {
  __shared__ Block1x128Shared<T> shared;
  extern __shared__ __align__(16) unsigned char staged[];
  const Swiglu& op = p.op;
  const int lane = threadIdx.x % Tile::kLanes, group = threadIdx.x / Tile::kLanes;
  Tile::Place at(p.cast.rows, op.cols, lane, group);
  if (at.row0 >= at.rows) return;
  auto& gates = reinterpret_cast<Memory*>(staged)->gate[group];
  auto& ups = reinterpret_cast<Memory*>(staged)->up[group];
  const int64_t n = op.cols - at.col;
  float biases[2][kVec] = {};
  if (op.gate_bias) {
    add_bias<T>(op.gate_bias, at.col, n, biases[0]);
    add_bias<T>(op.up_bias, at.col, n, biases[1]);
  }
  Vec8<T> results[kRows];
#pragma unroll
  for (int r0 = 0; r0 < kRows; r0 += kBatch) {
    const StagedPlace place(at.row + r0, at.col0, at.rows - at.row - r0, at.cols - at.col0);
    const auto gate = place.of_16_bits(op.gate, op.gate_ld);
    const auto up = place.of_16_bits(op.up, op.up_ld);
    place.fetch(gate, op.gate, gates);
    place.fetch(up, op.up, ups);
    finish_fetches();
#pragma unroll 1
    for (int r = 0; r < kBatch; ++r) {
      float g[kVec], u[kVec];
      unpack(place.read<T>(gate, gates, r), g);
      unpack(place.read<T>(up, ups, r), u);
      if (op.gate_bias) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          g[i] += biases[0][i];
          u[i] += biases[1][i];
        }
      }
      GatedKinds::choose(op.activation, [&](auto act) {
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          g[i] = gated<decltype(act)::value, false>(g[i], u[i], op.clamp);
      });
#pragma unroll
      for (int i = 0; i < kVec; ++i) g[i] = r < place.rows && i < n ? g[i] : 0.0f;
      Vec8<T> result;
      pack(g, &result);
      __syncwarp();  // all have read the row that the result replaces
      gates.words[r][lane] =
          make_uint4(result.words[0], result.words[1], result.words[2], result.words[3]);
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r)
      results[r0 + r] = load_vec(reinterpret_cast<const T*>(&gates.words[r][lane]));
    __syncwarp();
  }
  at.cols = p.cast.cols;
  const AnyFormat<kDivides> format{p.cast.fp8 == DType::kE5M2};
  cast_1x128<T, AnyFormat<kDivides>, true>(
      p.cast, at, p.stores_vectors, p.stores_vectors && at.is_whole(), format, results, shared);
}

}  // namespace

void launch_staged(const Params& p, cudaStream_t stream) {
  if (!p.op.rows || !p.op.cols) return;
  const dim3 blocks = Tile::grid(p.op.rows, p.op.cols, "swiglu_block");
  with_divides(p.cast.rule, [&](auto divides) {
    constexpr bool kDivides = decltype(divides)::value;
    const auto kernel = p.op.dtype == DType::kFloat16
                            ? swiglu_block_staged_kernel<Half, kDivides>
                            : swiglu_block_staged_kernel<BFloat16, kDivides>;
    allow_shared(reinterpret_cast<const void*>(kernel));
    kernel<<<blocks, Tile::kThreads, sizeof(Memory), stream>>>(p);
  });
  check_cuda(cudaGetLastError(), "swiglu_block");
}

}  // namespace swiglu_block
}  // namespace apex_te
