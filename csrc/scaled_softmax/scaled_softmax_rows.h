// Device parts of scaled_softmax: a thread's row, its vectors, and what a row's threads share.
#pragma once

#include "common/activation/functions.h"
#include "common/gpu/vec.h"
#include "scaled_softmax/scaled_softmax.h"

namespace apex_te {

constexpr int kMaxThreads = 1024;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

struct SoftmaxParams {
  const void *in, *y;  // x of the forward, dy of the backward; y of the backward
  void* out;
  SoftmaxShape shape;
  SoftmaxMask mask;
  // Heads that share a mask: their rows of one query follow each other, so that the mask's row is
  // read from memory once. 1: rows in the order of memory.
  int64_t sharing;
  float scale, scale_log2;
  uint32_t flip;  // sign bits of a word of elements, where x enters negated
  int group;      // threads of a row: a power of two up to 32, or the block
  int group_log2;
  // Elements between `in` and the 8-element boundary below it, and whether the other tensors have
  // the same.
  int phase;
  bool y_aligned, out_aligned;
};

// The row of a thread's group; groups beyond the last row have one without columns. Its columns are
// vectors of 8, which start at 8-element boundaries of `in`, and with kHasEdges up to 7 columns
// before the first vector and 7 behind the last.
template <typename Index, bool kHasEdges>
struct SoftmaxRow {
  int64_t begin = 0;  // of the row in its tensor
  Index cols = 0, visible = 0;
  Index vecs_end = 0, seen_end = 0;  // behind the last vector, and the last that is not all hidden
  Index first = 0, step;             // column of the thread's first vector, and on to its next
  const uint8_t* mask = nullptr;
  // Columns whose mask bytes lie between 4-byte boundaries with the row's others, and how far the
  // thread's vectors are behind such a boundary.
  Index mask_begin = 0, mask_end = 0;
  int mask_shift = 0;
  int lane;

  __device__ explicit SoftmaxRow(const SoftmaxParams& p) : step(p.group * kVec) {
    int64_t row = blockIdx.x;
    lane = static_cast<int>(threadIdx.x);
    if (p.group <= 32) {
      row = row * (blockDim.x >> p.group_log2) + (lane >> p.group_log2);
      lane &= p.group - 1;
      if (row >= p.shape.rows) return;
    }
    int64_t head = 0, query = 0;
    if (p.sharing > 1) {
      const int64_t queries = divide(row, p.sharing);  // of all masks
      head = divide(queries, p.shape.queries);
      query = queries - head * p.shape.queries;
      head = head * p.sharing + row - queries * p.sharing;
      row = head * p.shape.queries + query;
    } else if (p.shape.causal || p.mask.data) {
      head = divide(row, p.shape.queries);
      query = row - head * p.shape.queries;
    }
    begin = row * p.shape.cols;
    cols = visible = vecs_end = static_cast<Index>(p.shape.cols);
    first = lane * kVec;
    if (kHasEdges) {
      const int ahead = static_cast<int>(-(begin + p.phase)) & (kVec - 1);
      const Index vecs_begin = ahead < cols ? ahead : cols;
      first += vecs_begin;
      vecs_end = vecs_begin + (cols - vecs_begin) / kVec * kVec;
    }
    if (p.shape.causal) visible = static_cast<Index>(p.shape.visible(query));
    if (p.mask.data) {
      const int64_t batch = divide(head, p.shape.heads);
      mask = p.mask.data + batch * p.mask.batch_stride +
             (head - batch * p.shape.heads) * p.mask.head_stride + query * p.mask.query_stride;
      if (kHasEdges) {
        mask_begin = mask >= p.mask.data + 3 ? -3 : 0;
        mask_end = mask + cols + 4 <= p.mask.end ? cols + 4 : cols;
        mask_shift = static_cast<int>(reinterpret_cast<uintptr_t>(mask + first) & 3);
      }
    }
    seen_end = visible < vecs_end ? visible : vecs_end;
  }

  // The thread's column before the vectors (side 0) or behind them (1), or -1.
  __device__ __forceinline__ Index edge(int side) const {
    if (!kHasEdges) return -1;
    if (side == 0) return lane < first - lane * kVec ? lane : -1;
    return vecs_end + lane < cols ? vecs_end + lane : -1;
  }

  // 64-bit division is a long subroutine.
  static __device__ __forceinline__ int64_t divide(int64_t a, int64_t b) {
    return static_cast<uint64_t>(a | b) >> 32
               ? a / b
               : static_cast<int64_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
  }
};

// ---- 8 values ----

template <typename T>
__device__ __forceinline__ void flip_signs(uint32_t flip, Vec8<T>* v) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(2 * sizeof(T)); ++i) v->words[i] ^= flip;
}

// -Inf where a byte of the mask is set.
__device__ __forceinline__ void hide(uint2 mask, float* values) {
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if ((i < 4 ? mask.x : mask.y) & 0xFFu << 8 * (i % 4)) values[i] = -kInf;
}

// -Inf in the values from the n-th on.
__device__ __forceinline__ void hide_from(int n, float* values) {
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (i >= n) values[i] = -kInf;
}

// Zero in the elements from the n-th on.
template <typename T>
__device__ __forceinline__ void clear_from(int n, Vec8<T>* v) {
  constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (i >= n) v->words[i / kPerWord] &= kPerWord == 1 ? 0u : 0xFFFF0000u >> 16 * (i % kPerWord);
}

__device__ __forceinline__ float max_of_vec(const float* values, float max) {
  float pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = fmaxf(values[i], values[i + 4]);
  return fmaxf(max, fmaxf(fmaxf(pairs[0], pairs[1]), fmaxf(pairs[2], pairs[3])));
}

__device__ __forceinline__ float sum_of_vec(const float* values) {
  float pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = values[i] + values[i + 4];
  return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
}

// Replaces scores by exponentials and returns their sum.
__device__ __forceinline__ float exponentials(float scale_log2, float offset, float* values) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = power_of_two((values[i] - offset) * scale_log2);
  return sum_of_vec(values);
}

template <typename T>
__device__ __forceinline__ Vec8<T> scaled(const float* values, float factor) {
  float results[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) results[i] = values[i] * factor;
  Vec8<T> out;
  pack(results, &out);
  return out;
}

// sum(dy * y) over the elements where y is not 0.
template <typename T>
__device__ __forceinline__ float dot_of_vec(const Vec8<T>& dy, const Vec8<T>& y) {
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 g = pair_of(dy, i), w = pair_of(y, i);
    if (w.x != 0.0f) sums[0] = fmaf(g.x, w.x, sums[0]);
    if (w.y != 0.0f) sums[1] = fmaf(g.y, w.y, sums[1]);
  }
  return sums[0] + sums[1];
}

__device__ __forceinline__ float gradient(float dy, float y, float dot, float scale) {
  return y != 0.0f ? (dy - dot) * (y * scale) : 0.0f;
}
template <typename T>
__device__ __forceinline__ Vec8<T> gradient(const Vec8<T>& dy, const Vec8<T>& y, float dot,
                                            float scale) {
  float values[kVec];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 g = pair_of(dy, i), w = pair_of(y, i);
    values[2 * i] = gradient(g.x, w.x, dot, scale);
    values[2 * i + 1] = gradient(g.y, w.y, dot, scale);
  }
  Vec8<T> out;
  pack(values, &out);
  return out;
}

// ---- rows that are not aligned ----

template <typename T>
__device__ __forceinline__ Vec8<T> load_any(const T* p, bool aligned) {
  return aligned ? load_vec(p) : load_partial(p, kVec);
}
template <typename T>
__device__ __forceinline__ void store_any(T* p, bool aligned, const Vec8<T>& v) {
  aligned ? store_vec(p, v) : store_partial(p, v, kVec);
}

// 12 bytes of the mask, from the 4-byte boundary below the vector at `col` on. Bytes of other rows
// are read too, but none outside the mask.
struct MaskWords {
  uint32_t words[3];
};
template <typename Row, typename Index>
__device__ __forceinline__ MaskWords load_mask(const Row& row, Index col) {
  MaskWords m = {};
  col -= row.mask_shift;
  if (col >= row.mask_begin && col + 12 <= row.mask_end) {
#pragma unroll
    for (int i = 0; i < 3; ++i) m.words[i] = reinterpret_cast<const uint32_t*>(row.mask + col)[i];
    return m;
  }
#pragma unroll
  for (int i = 0; i < 12; ++i)
    if (col + i >= 0 && col + i < row.cols)
      m.words[i / 4] |= static_cast<uint32_t>(row.mask[col + i]) << 8 * (i % 4);
  return m;
}
__device__ __forceinline__ void hide(const MaskWords& m, int shift, float* values) {
  hide(make_uint2(__funnelshift_r(m.words[0], m.words[1], 8 * shift),
                  __funnelshift_r(m.words[1], m.words[2], 8 * shift)),
       values);
}

// An element of one of the row's edges, loaded and not yet used.
template <typename T>
struct Edge {
  T value;
  uint8_t is_hidden;
};
template <typename T, typename Row, typename Index>
__device__ __forceinline__ Edge<T> load_edge(const Row& row, const T* in, Index col) {
  Edge<T> edge = {T{}, 1};
  if (col < 0 || col >= row.visible) return edge;
  edge.value = in[col];
  edge.is_hidden = row.mask ? row.mask[col] : 0;
  return edge;
}
template <typename T>
__device__ __forceinline__ float score_of(const Edge<T>& edge, uint32_t flip) {
  const float value = to_float(edge.value);
  return edge.is_hidden ? -kInf : flip ? -value : value;
}
// Backward: returns dy * y; dy is not used where y is 0, even if dy is NaN.
template <typename T>
__device__ __forceinline__ float product_of(const Edge<T>& dy, const Edge<T>& y) {
  const float w = to_float(y.value);
  return w != 0.0f ? to_float(dy.value) * w : 0.0f;
}
template <typename T>
__device__ __forceinline__ T gradient(const Edge<T>& dy, const Edge<T>& y, float dot, float scale) {
  return from_float<T>(gradient(to_float(dy.value), to_float(y.value), dot, scale));
}

// ---- a row's threads ----

// Over the group, or the part of it in this warp.
__device__ __forceinline__ float group_sum(float value, int group) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2)
    if (offset < group) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}
__device__ __forceinline__ float group_max(float value, int group) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2)
    if (offset < group) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  return value;
}

// The sum over all warps of the row.
__device__ __forceinline__ float row_sum(const SoftmaxParams& p, float warp_sum_of_row) {
  if (p.group <= 32) return warp_sum_of_row;
  __shared__ float warps[kMaxThreads / 32];
  const int lane = threadIdx.x % 32;
  if (lane == 0) warps[threadIdx.x / 32] = warp_sum_of_row;
  __syncthreads();
  return warp_sum(lane * 32 < p.group ? warps[lane] : 0.0f);
}

// Factor from a thread's exponentials to the row's softmax. `max`, to which the exponentials are
// relative, and `sum` belong to the part of the row in this warp. NaN where the row sees NaN.
__device__ __forceinline__ float row_factor(const SoftmaxParams& p, float max, float sum) {
  float share = 1.0f;
  if (p.group > 32) {
    __shared__ float2 warps[kMaxThreads / 32];
    const int lane = threadIdx.x % 32;
    if (lane == 0) warps[threadIdx.x / 32] = make_float2(max, sum);
    __syncthreads();
    const float2 part = lane * 32 < p.group ? warps[lane] : make_float2(-kInf, 0.0f);
    const float row_max = group_max(part.x, 32);
    const float row_offset = row_max == -kInf ? 0.0f : row_max;
    sum = warp_sum(part.y * power_of_two((part.x - row_offset) * p.scale_log2));
    share = power_of_two((max - row_offset) * p.scale_log2);
  }
  return sum == 0.0f ? 0.0f : share / sum;
}

// A row that sees NaN: NaN where it sees, 0 elsewhere.
template <typename T, typename Row>
__device__ __forceinline__ void store_nan_row(const SoftmaxParams& p, const Row& row, T* y) {
  const T nan = from_float<T>(bits_float(0x7FC00000u)), zero = from_float<T>(0.0f);
  for (int64_t col = row.lane; col < row.cols; col += p.group)
    y[col] = col >= row.visible || (row.mask && row.mask[col]) ? zero : nan;
}

}  // namespace apex_te
