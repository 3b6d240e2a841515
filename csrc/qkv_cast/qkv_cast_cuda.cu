// CUDA kernels of qkv_cast, after those of cast_transpose.
//
// Tiles of 256 x 128 (common/gpu/fp8_tile.h), a thread's 8 loads of 16 bytes all in flight. A
// thread's 8 columns lie in one head where heads are multiples of 8, so that gathering costs a
// division for each thread. The weight's rowwise copy alone needs no tile: a head is a contiguous
// block of both matrices.
#include "common/gpu/column_sums.h"
#include "common/gpu/fp8_tile.h"
#include "common/numerics/with_dtype.h"
#include "qkv_cast/qkv_cast.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

using Tile = FP8Tile<kSumTileRows>;
constexpr int kTileRows = kSumTileRows;
constexpr int kTileCols = Tile::kTileCols;
constexpr int kLanes = Tile::kLanes;
constexpr int kRows = Tile::kRows;
static_assert(kRows == kSumThreadRows, "rows of one partial bias sum");
constexpr int kTileThreads = Tile::kThreads;
// Blocks of an SM: two where a thread's elements leave registers for it.
template <typename T, bool kAligned>
constexpr int kTileBlocks = kAligned && sizeof(T) == 2 ? 2 : 1;
constexpr int kThreads = 256;  // of the kernel of rowwise heads
constexpr int kSteps = 2;      // vectors a thread of it has in flight

struct Outputs {
  uint8_t *rowwise, *columnwise;
  int64_t length;  // of a row of columnwise
  float *amax, *scale_inv;
};

struct GradParams {
  int64_t rows, cols, inner;
  HeadOrder order;
  HeadsView queries, keys, values;
  const float* scale;
  Outputs out;
  float* workspace;
};

struct WeightParams {
  const void* x;
  int64_t rows, cols;
  HeadOrder order;
  const float* scale;
  Outputs out;
  const int32_t* noop;
};

__device__ __forceinline__ HeadsView part_of(const GradParams& p, int part) {
  HeadsView view;
  view.data = part == 0 ? p.queries.data : part == 1 ? p.keys.data : p.values.data;
  view.outer = part == 0 ? p.queries.outer : part == 1 ? p.keys.outer : p.values.outer;
  view.inner = part == 0 ? p.queries.inner : part == 1 ? p.keys.inner : p.values.inner;
  view.head = part == 0 ? p.queries.head : part == 1 ? p.keys.head : p.values.head;
  return view;
}

// The first element of a column of the matrix, in the head that has it.
template <typename T>
__device__ __forceinline__ const T* column_of(const GradParams& p, uint32_t col, HeadsView* view) {
  const auto size = static_cast<uint32_t>(p.order.size);
  const uint32_t place = col / size;
  const HeadOrder::Head head = p.order.head_at(place);
  *view = part_of(p, head.part);
  return static_cast<const T*>(view->data) + head.index * view->head + (col - place * size);
}

// A thread's 8 x 8 elements; zeros past the matrix.
template <typename T>
__device__ __forceinline__ void load_heads(const GradParams& p, const Tile::Place& at,
                                           Vec8<T>* in) {
  HeadsView view = {};
  const T* x = nullptr;
  if (at.col < at.cols) x = column_of<T>(p, static_cast<uint32_t>(at.col), &view);
  int64_t outer = at.row, inner = 0;
  if (p.inner > 1) {
    outer = at.row / p.inner;
    inner = at.row - outer * p.inner;
  }
  x += outer * view.outer + inner * view.inner;
  const int64_t wrap = view.outer - (p.inner - 1) * view.inner;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    in[r] = at.col < at.cols && at.row + r < at.rows ? load_vec(x) : Vec8<T>{};
    const bool is_last = ++inner >= p.inner;
    x += is_last ? wrap : view.inner;
    if (is_last) inner = 0;
  }
}

// The same by element, for heads that vectors would cross or that are not aligned.
template <typename T>
__device__ __forceinline__ void load_heads_by_element(const GradParams& p, const Tile::Place& at,
                                                      Vec8<T>* in) {
  constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
  for (int r = 0; r < kRows; ++r) in[r] = Vec8<T>{};
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    if (at.col + c >= at.cols) break;
    HeadsView view;
    const T* x = column_of<T>(p, static_cast<uint32_t>(at.col + c), &view);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = at.row + r;
      if (row >= at.rows) break;
      const int64_t outer = row / p.inner, inner = row - outer * p.inner;
      const T* element = x + outer * view.outer + inner * view.inner;
      in[r].words[c / kPerWord] |=
          static_cast<uint32_t>(*reinterpret_cast<const BitsOf<T>*>(element))
          << 16 * (c % kPerWord);
    }
  }
}

// kAligned: the heads, the outputs and all extents but the number of rows allow vector accesses.
template <typename T, typename Format, bool kAligned, bool kDbias>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T, kAligned>)
    qkv_cast_grad_kernel(const GradParams p) {
  __shared__ uint32_t warp_amaxes[kTileThreads / 32];
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  __shared__ float sums[kDbias ? kTileThreads / 32 : 1][kDbias ? kTileCols : 1];
  const Tile::Place at(p.rows, p.cols, blockIdx.x);
  Vec8<T> in[kRows];
  if (kAligned)
    load_heads<T>(p, at, in);
  else
    load_heads_by_element<T>(p, at, in);
  const float scale = *p.scale;
  const uint32_t seen = amax_so_far(p.out.amax);
  uint32_t amax = 0;
  uint2 codes[kRows];
  float column_sums[kVec] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    fold_amax(in[r], amax);
    float values[kVec];
    unpack(in[r], values);
    codes[r] = encode_values<Format>(values, scale);
    if (kDbias) {
#pragma unroll
      for (int c = 0; c < kVec; ++c) column_sums[c] += values[c];
    }
  }
  if (p.out.rowwise) Tile::store_rows<kAligned>(p.out.rowwise, p.cols, at, codes);
  if (p.out.columnwise) Tile::stage_columns(codes, tile);
  if (kDbias) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      // The upper half of a warp holds the next rows of the same columns.
      const float sum = column_sums[c] + __shfl_down_sync(0xFFFFFFFFu, column_sums[c], kLanes);
      if (threadIdx.x % 32 < kLanes) sums[threadIdx.x / 32][threadIdx.x % kLanes * kVec + c] = sum;
    }
  }
  stage_amax(amax_bits(T{}, amax), warp_amaxes);
  __syncthreads();
  if (p.out.columnwise) Tile::store_columns<kAligned>(p.out.columnwise, p.out.length, at, tile);
  if (kDbias && at.row0 < p.rows && threadIdx.x < kTileCols && at.col0 + threadIdx.x < p.cols) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kTileThreads / 32; ++w) sum += sums[w][threadIdx.x];
    p.workspace[at.row0 / kTileRows * p.cols + at.col0 + threadIdx.x] = sum;
  }
  finish_amax<kTileThreads>(p.out.amax, seen, warp_amaxes);
  if (blockIdx.x == 0 && threadIdx.x == 0 && p.out.scale_inv) *p.out.scale_inv = 1.0f / scale;
}

// Row of the weight's rowwise copy for one of the weight.
__device__ __forceinline__ int64_t sorted_row(const HeadOrder& order, int64_t row) {
  const auto size = static_cast<uint32_t>(order.size), r = static_cast<uint32_t>(row);
  const uint32_t place = r / size;
  return order.sorted_place(order.head_at(place)) * order.size + (r - place * size);
}

template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T, kAligned>)
    qkv_cast_weight_kernel(const WeightParams p) {
  if (p.noop && *p.noop != 0) return;
  __shared__ uint32_t warp_amaxes[kTileThreads / 32];
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  const Tile::Place at(p.rows, p.cols, blockIdx.x);
  Vec8<T> in[kRows];
  const T* x = static_cast<const T*>(p.x);
  kAligned ? Tile::load<T, true>(x, p.cols, at, in) : Tile::load_any(x, at, in);
  const float scale = *p.scale;
  const uint32_t seen = amax_so_far(p.out.amax);
  uint32_t amax = 0;
  uint2 codes[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    fold_amax(in[r], amax);
    float values[kVec];
    unpack(in[r], values);
    codes[r] = encode_values<Format>(values, scale);
  }
  if (p.out.rowwise && at.row < at.rows) {
    // A thread's rows lie in one head where heads are multiples of 8.
    const bool is_block = p.order.size % kRows == 0;
    int64_t row = sorted_row(p.order, at.row);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (at.row + r >= at.rows) break;
      if (r) row = is_block ? row + 1 : sorted_row(p.order, at.row + r);
      uint8_t* out = p.out.rowwise + row * p.cols + at.col;
      if (!kAligned)
        store_codes_partial(out, codes[r], at.cols - at.col);
      else if (at.col < at.cols)
        *reinterpret_cast<uint2*>(out) = codes[r];
    }
  }
  Tile::stage_columns(codes, tile);
  stage_amax(amax_bits(T{}, amax), warp_amaxes);
  __syncthreads();
  Tile::store_columns<kAligned>(p.out.columnwise, p.out.length, at, tile);
  finish_amax<kTileThreads>(p.out.amax, seen, warp_amaxes);
  if (blockIdx.x == 0 && threadIdx.x == 0 && p.out.scale_inv) *p.out.scale_inv = 1.0f / scale;
}

// The rowwise copy alone: blockIdx.y is a head, all of it contiguous in both matrices.
template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads) qkv_cast_weight_rows_kernel(const WeightParams p) {
  if (p.noop && *p.noop != 0) return;
  __shared__ uint32_t warp_amaxes[kThreads / 32];
  const int64_t numel = p.order.size * p.cols;
  const T* x = static_cast<const T*>(p.x) + blockIdx.y * numel;
  uint8_t* out = p.out.rowwise + p.order.sorted_place(p.order.head_at(blockIdx.y)) * numel;
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * kThreads * kSteps + threadIdx.x) * kVec;
  Vec8<T> in[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t i = begin + k * kThreads * kVec;
    in[k] = kAligned && i + kVec <= numel ? load_vec(x + i) : load_partial(x + i, numel - i);
  }
  const float scale = *p.scale;
  const uint32_t seen = amax_so_far(p.out.amax);
  uint32_t amax = 0;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t i = begin + k * kThreads * kVec;
    fold_amax(in[k], amax);
    float values[kVec];
    unpack(in[k], values);
    const uint2 codes = encode_values<Format>(values, scale);
    if (kAligned && i + kVec <= numel)
      *reinterpret_cast<uint2*>(out + i) = codes;
    else
      store_codes_partial(out + i, codes, numel - i);
  }
  stage_amax(amax_bits(T{}, amax), warp_amaxes);
  __syncthreads();
  finish_amax<kThreads>(p.out.amax, seen, warp_amaxes);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && p.out.scale_inv)
    *p.out.scale_inv = 1.0f / scale;
}

Outputs outputs_of(const QkvOutputs& out) {
  return {out.rowwise, out.columnwise, out.columnwise_length, out.amax, out.scale_inv};
}

// Vector accesses to the outputs of a matrix are allowed.
bool are_aligned(const QkvOutputs& out, int64_t cols) {
  return fp8_tile_aligned(out.columnwise_length, cols, out.rowwise, out.columnwise);
}

bool has_vectors(const HeadsView& view) {
  return is_aligned(view.data, 16) && view.outer % kVec == 0 && view.inner % kVec == 0 &&
         view.head % kVec == 0;
}

unsigned tile_blocks(int64_t rows, int64_t cols, const char* name) {
  const int64_t tiles = Tile::num_tiles(rows, cols);
  if (tiles > 0x7FFFFFFF) fail(kApexTeUnsupported, "%s: a matrix must have fewer rows", name);
  return static_cast<unsigned>(tiles ? tiles : 1);  // of nothing one block writes scale_inv
}

template <typename T, typename Format>
void launch_grad(const QkvCastGrad& c, const GradParams& p, cudaStream_t stream) {
  const bool aligned = c.order.size % kVec == 0 && are_aligned(c.out, p.cols) &&
                       has_vectors(p.queries) && has_vectors(p.keys) && has_vectors(p.values);
  const auto kernel = c.dbias ? (aligned ? qkv_cast_grad_kernel<T, Format, true, true>
                                         : qkv_cast_grad_kernel<T, Format, false, true>)
                              : (aligned ? qkv_cast_grad_kernel<T, Format, true, false>
                                         : qkv_cast_grad_kernel<T, Format, false, false>);
  kernel<<<tile_blocks(p.rows, p.cols, "qkv_cast_grad"), kTileThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "qkv_cast_grad");
  if (c.dbias)
    launch_column_sums<T>(p.workspace, (p.rows + kTileRows - 1) / kTileRows, p.cols,
                          c.dbias.data<T>(), stream);
}

template <typename T, typename Format>
void launch_weight(const QkvCastWeight& c, const WeightParams& p, cudaStream_t stream) {
  if (c.out.columnwise) {
    const bool aligned = is_aligned(p.x, 16) && are_aligned(c.out, p.cols);
    const auto kernel = aligned ? qkv_cast_weight_kernel<T, Format, true>
                                : qkv_cast_weight_kernel<T, Format, false>;
    kernel<<<tile_blocks(p.rows, p.cols, "qkv_cast_weight"), kTileThreads, 0, stream>>>(p);
  } else {
    const int64_t numel = p.order.size * p.cols, heads = p.order.heads();
    constexpr int64_t kPerBlock = kThreads * kSteps * kVec;
    const int64_t blocks = (numel + kPerBlock - 1) / kPerBlock;
    if (blocks > 0x7FFFFFFF || heads > 0xFFFF)
      fail(kApexTeUnsupported, "qkv_cast_weight: weight must have fewer than 65536 heads");
    const bool aligned = is_aligned(p.x, 16) && is_aligned(c.out.rowwise, 8) && numel % kVec == 0;
    const auto kernel = aligned ? qkv_cast_weight_rows_kernel<T, Format, true>
                                : qkv_cast_weight_rows_kernel<T, Format, false>;
    const dim3 grid(static_cast<unsigned>(blocks ? blocks : 1), static_cast<unsigned>(heads));
    kernel<<<grid, kThreads, 0, stream>>>(p);
  }
  check_cuda(cudaGetLastError(), "qkv_cast_weight");
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(qkv_cast_weight) {
  using namespace apex_te;
  const QkvCastWeight c = check_qkv_cast_weight(args);
  const DeviceGuard guard(args.device_id());
  const WeightParams p{c.weight.data<void>(), c.rows, c.cols, c.order, c.scale,
                       outputs_of(c.out),     c.noop};
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(c.weight.dtype(), [&](auto zero) {
    with_fp8_format(c.out.fp8, [&](auto format) {
      launch_weight<decltype(zero), decltype(format)>(c, p, stream);
    });
  });
}

APEX_TE_DEFINE(qkv_cast_grad) {
  using namespace apex_te;
  const QkvCastGrad c = check_qkv_cast_grad(args);
  const DeviceGuard guard(args.device_id());
  const GradParams p{c.rows, c.cols,   c.inner, c.order,           c.queries,
                     c.keys, c.values, c.scale, outputs_of(c.out), c.workspace};
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(c.dtype, [&](auto zero) {
    with_fp8_format(c.out.fp8, [&](auto format) {
      launch_grad<decltype(zero), decltype(format)>(c, p, stream);
    });
  });
}
