// CUDA kernels of scaled_softmax.
//
// A row belongs to a group of threads, part of a warp or a block, that holds it in registers
// between the passes: loads of 16 bytes, all in flight. Rows too long for that are read twice
// (scaled_softmax_loop.h). Columns that a causal row does not see are not read; their zeros are
// stored first.
#include "common/numerics/with_dtype.h"
#include "scaled_softmax/scaled_softmax_loop.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

// Alignment that a row kernel may rely on. kAligned and kMasked: every row and every mask row
// starts at a vector's boundary and ends at one. kEdges: all tensors but the mask are aligned
// alike.
enum RowMode { kAligned, kMasked, kEdges };

// kVecs vectors of 8 elements a thread.
template <typename T, int kVecs, RowMode kMode>
__global__ void __launch_bounds__(kMaxThreads) scaled_softmax_fwd_kernel(const SoftmaxParams p) {
  constexpr bool kHasEdges = kMode == kEdges;
  const SoftmaxRow<int, kHasEdges> row(p);
  const T* x = static_cast<const T*>(p.in) + row.begin;
  T* y = static_cast<T*>(p.out) + row.begin;
  Vec8<T> in[kVecs];
  uint2 hidden[kVecs];
  MaskWords hidden_words[kVecs];
  Edge<T> edges_in[2];
#pragma unroll
  for (int s = 0; s < kVecs; ++s) {
    const int col = row.first + s * row.step;
    if (col < row.seen_end) {
      in[s] = load_vec(x + col);
      if (kMode == kMasked) hidden[s] = *reinterpret_cast<const uint2*>(row.mask + col);
      if (kHasEdges && row.mask) hidden_words[s] = load_mask(row, col);
    } else if (col < row.vecs_end) {
      store_vec(y + col, Vec8<T>{});
    }
  }
  if (kHasEdges)
    for (int side = 0; side < 2; ++side) edges_in[side] = load_edge(row, x, row.edge(side));
  float values[kVecs][kVec], edges[2];
  float max = -kInf;
#pragma unroll
  for (int s = 0; s < kVecs; ++s) {
    const int col = row.first + s * row.step;
    if (col >= row.seen_end) continue;
    flip_signs(p.flip, &in[s]);
    unpack(in[s], values[s]);
    if (kMode == kMasked) hide(hidden[s], values[s]);
    if (kHasEdges && row.mask) hide(hidden_words[s], row.mask_shift, values[s]);
    if (col + kVec > row.visible) hide_from(row.visible - col, values[s]);
    max = max_of_vec(values[s], max);
  }
  if (kHasEdges)
    for (int side = 0; side < 2; ++side)
      max = fmaxf(max, edges[side] = score_of(edges_in[side], p.flip));
  max = group_max(max, p.group);
  const float offset = max == -kInf ? 0.0f : max;
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kVecs; ++s)
    if (row.first + s * row.step < row.seen_end)
      sum += exponentials(p.scale_log2, offset, values[s]);
  if (kHasEdges)
    for (float& edge : edges) sum += edge = power_of_two((edge - offset) * p.scale_log2);
  sum = group_sum(sum, p.group);
  const float factor = row_factor(p, max, sum);
  if (factor != factor) return store_nan_row(p, row, y);
#pragma unroll
  for (int s = 0; s < kVecs; ++s) {
    const int col = row.first + s * row.step;
    if (col < row.seen_end) store_vec(y + col, scaled<T>(values[s], factor));
  }
  if (kHasEdges)
    for (int side = 0; side < 2; ++side)
      if (row.edge(side) >= 0) y[row.edge(side)] = from_float<T>(edges[side] * factor);
}

template <typename T, int kVecs, RowMode kMode>
__global__ void __launch_bounds__(kMaxThreads) scaled_softmax_bwd_kernel(const SoftmaxParams p) {
  constexpr bool kHasEdges = kMode == kEdges;
  const SoftmaxRow<int, kHasEdges> row(p);
  const T* dy = static_cast<const T*>(p.in) + row.begin;
  const T* y = static_cast<const T*>(p.y) + row.begin;
  T* dx = static_cast<T*>(p.out) + row.begin;
  Vec8<T> dy_in[kVecs], y_in[kVecs];
  Edge<T> dy_edges[2], y_edges[2];
#pragma unroll
  for (int s = 0; s < kVecs; ++s) {
    const int col = row.first + s * row.step;
    if (col < row.seen_end) {
      dy_in[s] = load_vec(dy + col);
      y_in[s] = load_vec(y + col);
    } else if (col < row.vecs_end) {
      store_vec(dx + col, Vec8<T>{});
    }
  }
  if (kHasEdges)
    for (int side = 0; side < 2; ++side) {
      dy_edges[side] = load_edge(row, dy, row.edge(side));
      y_edges[side] = load_edge(row, y, row.edge(side));
    }
  float dot = 0.0f;
#pragma unroll
  for (int s = 0; s < kVecs; ++s) {
    const int col = row.first + s * row.step;
    if (col >= row.seen_end) continue;
    if (col + kVec > row.visible) clear_from(row.visible - col, &y_in[s]);
    dot += dot_of_vec(dy_in[s], y_in[s]);
  }
  if (kHasEdges)
    for (int side = 0; side < 2; ++side) dot += product_of(dy_edges[side], y_edges[side]);
  dot = row_sum(p, group_sum(dot, p.group));
#pragma unroll
  for (int s = 0; s < kVecs; ++s) {
    const int col = row.first + s * row.step;
    if (col < row.seen_end) store_vec(dx + col, gradient(dy_in[s], y_in[s], dot, p.scale));
  }
  if (kHasEdges)
    for (int side = 0; side < 2; ++side)
      if (row.edge(side) >= 0)
        dx[row.edge(side)] = gradient(dy_edges[side], y_edges[side], dot, p.scale);
}

// Vectors that a thread of a row kernel holds.
template <typename T>
constexpr int kVecsOf = 8 / sizeof(T);

// Sets the group of a row: at most `vecs` vectors for each of its threads, if there are enough, and
// no fewer threads than `min_group`, a power of two.
void set_group(SoftmaxParams* p, int64_t row_vecs, int vecs, int min_group) {
  const int64_t threads = (row_vecs + vecs - 1) / vecs;
  p->group = min_group;
  while (p->group < threads && p->group < 32) p->group *= 2;
  p->group_log2 = 0;
  while (1 << p->group_log2 < p->group) ++p->group_log2;
  if (threads > 32)
    p->group = static_cast<int>(threads < kMaxThreads ? (threads + 31) / 32 * 32 : kMaxThreads);
}

template <typename Kernel>
void launch(Kernel kernel, const SoftmaxParams& p, cudaStream_t stream, const char* what) {
  const int threads = p.group > 32 ? p.group : 128;
  const int64_t rows_per_block = threads / p.group;
  const int64_t blocks = (p.shape.rows + rows_per_block - 1) / rows_per_block;
  if (blocks > 0x7FFFFFFF) fail(kApexTeUnsupported, "%s: too many rows", what);
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream>>>(p);
  check_cuda(cudaGetLastError(), what);
}

// Elements between an address and the 8-element boundary below it.
template <typename T>
int phase_of(const void* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) / sizeof(T) % kVec);
}

// Number of heads that follow each other in the walk over a mask's queries. A mask that stays in
// the L2 cache from one head to the next leaves the rows in the order of memory, which is a little
// faster.
int64_t heads_sharing(const SoftmaxMask& mask, const SoftmaxShape& shape) {
  constexpr int64_t kCachedBytes = 8 << 20;
  if (!mask.data || mask.query_stride == 0 || shape.queries * shape.cols < kCachedBytes) return 1;
  if (mask.head_stride != 0 && shape.heads > 1) return 1;
  return mask.batch_stride == 0 ? shape.rows / shape.queries : shape.heads;
}

// Returns true if half as many vectors suffice for a row of the 8 threads that its edges take.
template <typename T>
bool is_short(int64_t vecs) {
  return vecs <= kVec * kVecsOf<T> / 2;
}

template <typename T>
void fwd(SoftmaxParams p, cudaStream_t stream) {
  constexpr char kName[] = "scaled_softmax_fwd";
  constexpr int kVecs = kVecsOf<T>;
  const SoftmaxMask& m = p.mask;
  p.phase = phase_of<T>(p.in);
  p.out_aligned = phase_of<T>(p.out) == p.phase;
  const int64_t vecs = p.shape.cols / kVec;
  const bool is_aligned_mask =
      is_aligned(m.data, kVec) && (m.batch_stride | m.head_stride | m.query_stride) % kVec == 0;
  const bool has_edges = p.phase || p.shape.cols % kVec || !is_aligned_mask;
  set_group(&p, vecs, kVecs, has_edges ? kVec : 1);
  if (!p.out_aligned || vecs > kMaxThreads * kVecs)
    return launch(scaled_softmax_fwd_loop_kernel<T>, p, stream, kName);
  if (has_edges)
    return launch(is_short<T>(vecs) ? scaled_softmax_fwd_kernel<T, kVecs / 2, kEdges>
                                    : scaled_softmax_fwd_kernel<T, kVecs, kEdges>,
                  p, stream, kName);
  launch(m.data ? scaled_softmax_fwd_kernel<T, kVecs, kMasked>
                : scaled_softmax_fwd_kernel<T, kVecs, kAligned>,
         p, stream, kName);
}

template <typename T>
void bwd(SoftmaxParams p, cudaStream_t stream) {
  constexpr char kName[] = "scaled_softmax_bwd";
  constexpr int kVecs = kVecsOf<T>;
  p.phase = phase_of<T>(p.in);
  p.y_aligned = phase_of<T>(p.y) == p.phase;
  p.out_aligned = phase_of<T>(p.out) == p.phase;
  const int64_t vecs = p.shape.cols / kVec;
  const bool has_edges = p.phase || p.shape.cols % kVec;
  set_group(&p, vecs, kVecs, has_edges ? kVec : 1);
  if (!p.y_aligned || !p.out_aligned || vecs > kMaxThreads * kVecs)
    return launch(scaled_softmax_bwd_loop_kernel<T>, p, stream, kName);
  if (has_edges)
    return launch(is_short<T>(vecs) ? scaled_softmax_bwd_kernel<T, kVecs / 2, kEdges>
                                    : scaled_softmax_bwd_kernel<T, kVecs, kEdges>,
                  p, stream, kName);
  launch(scaled_softmax_bwd_kernel<T, kVecs, kAligned>, p, stream, kName);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(scaled_softmax_fwd) {
  using namespace apex_te;
  const SoftmaxFwd c = check_scaled_softmax_fwd(args);
  if (c.shape.rows == 0 || c.shape.cols == 0) return;
  const DeviceGuard guard(args.device_id());
  const SoftmaxScale scale(c.scale);
  SoftmaxParams p = {};
  p.in = c.x.data<void>();
  p.out = c.y.data<void>();
  p.shape = c.shape;
  p.mask = c.mask;
  p.sharing = heads_sharing(c.mask, c.shape);
  p.scale_log2 = scale.scale_log2;
  p.flip = !scale.negative ? 0u : c.x.dtype() == DType::kFloat32 ? 0x80000000u : 0x80008000u;
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(c.x.dtype(), [&](auto zero) { fwd<decltype(zero)>(p, stream); });
}

APEX_TE_DEFINE(scaled_softmax_bwd) {
  using namespace apex_te;
  const SoftmaxBwd c = check_scaled_softmax_bwd(args);
  if (c.shape.rows == 0 || c.shape.cols == 0) return;
  const DeviceGuard guard(args.device_id());
  SoftmaxParams p = {};
  p.in = c.dy.data<void>();
  p.y = c.y.data<void>();
  p.out = c.dx.data<void>();
  p.shape = c.shape;
  p.scale = c.scale;
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(c.dy.dtype(), [&](auto zero) { bwd<decltype(zero)>(p, stream); });
}
