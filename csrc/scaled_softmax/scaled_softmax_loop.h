// Kernels of scaled_softmax for rows that are too long for a block's registers: read twice.
#pragma once

#include "scaled_softmax/scaled_softmax_rows.h"

namespace apex_te {
namespace {

// Vectors of each input that a thread has in flight; with more, those of a masked row spill.
template <typename T>
constexpr int kBatch = 4 / sizeof(T);

// Scores of a vector of x; hidden ones are -Inf.
template <typename T, typename Row>
__device__ __forceinline__ void to_scores(const SoftmaxParams& p, const Row& row, int64_t col,
                                          Vec8<T> in, const MaskWords& hidden, float* values) {
  flip_signs(p.flip, &in);
  unpack(in, values);
  if (row.mask) hide(hidden, row.mask_shift, values);
  if (col + kVec > row.visible) hide_from(static_cast<int>(row.visible - col), values);
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    scaled_softmax_fwd_loop_kernel(const SoftmaxParams p) {
  const SoftmaxRow<int64_t, true> row(p);
  const T* x = static_cast<const T*>(p.in) + row.begin;
  T* y = static_cast<T*>(p.out) + row.begin;
  Vec8<T> in[kBatch<T>];
  MaskWords hidden[kBatch<T>];
  const auto load = [&](int64_t begin) {
#pragma unroll
    for (int k = 0; k < kBatch<T>; ++k) {
      const int64_t col = begin + k * row.step;
      if (col >= row.seen_end) continue;
      in[k] = load_vec(x + col);
      if (row.mask) hidden[k] = load_mask(row, col);
    }
  };
  float edges[2];
  for (int side = 0; side < 2; ++side)
    edges[side] = score_of(load_edge(row, x, row.edge(side)), p.flip);
  float max = fmaxf(edges[0], edges[1]), offset = max == -kInf ? 0.0f : max, sum = 0.0f;
  for (float edge : edges) sum += power_of_two((edge - offset) * p.scale_log2);
  for (int64_t begin = row.first; begin < row.seen_end; begin += kBatch<T> * row.step) {
    load(begin);
#pragma unroll
    for (int k = 0; k < kBatch<T>; ++k) {
      const int64_t col = begin + k * row.step;
      if (col >= row.seen_end) break;
      float values[kVec];
      to_scores(p, row, col, in[k], hidden[k], values);
      const float largest = max_of_vec(values, max);
      if (largest > max) {
        sum *= power_of_two((max - largest) * p.scale_log2);
        max = offset = largest;
      }
      sum += exponentials(p.scale_log2, offset, values);
    }
  }
  const float warp_max_of_row = group_max(max, p.group);
  offset = warp_max_of_row == -kInf ? 0.0f : warp_max_of_row;
  sum = group_sum(sum * power_of_two((max - offset) * p.scale_log2), p.group);
  const float factor = row_factor(p, warp_max_of_row, sum);
  if (factor != factor) return store_nan_row(p, row, y);
  for (int64_t begin = row.first; begin < row.vecs_end; begin += kBatch<T> * row.step) {
    load(begin);
#pragma unroll
    for (int k = 0; k < kBatch<T>; ++k) {
      const int64_t col = begin + k * row.step;
      if (col >= row.vecs_end) break;
      float values[kVec] = {};
      if (col < row.seen_end) {
        to_scores(p, row, col, in[k], hidden[k], values);
        exponentials(p.scale_log2, offset, values);
      }
      store_any(y + col, p.out_aligned, scaled<T>(values, factor));
    }
  }
  for (int side = 0; side < 2; ++side)
    if (row.edge(side) >= 0)
      y[row.edge(side)] =
          from_float<T>(power_of_two((edges[side] - offset) * p.scale_log2) * factor);
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    scaled_softmax_bwd_loop_kernel(const SoftmaxParams p) {
  const SoftmaxRow<int64_t, true> row(p);
  const T* dy = static_cast<const T*>(p.in) + row.begin;
  const T* y = static_cast<const T*>(p.y) + row.begin;
  T* dx = static_cast<T*>(p.out) + row.begin;
  Vec8<T> dy_in[kBatch<T>], y_in[kBatch<T>];
  // Hidden elements get a y of 0.
  const auto load = [&](int64_t begin) {
#pragma unroll
    for (int k = 0; k < kBatch<T>; ++k) {
      const int64_t col = begin + k * row.step;
      y_in[k] = dy_in[k] = {};
      if (col >= row.seen_end) continue;
      dy_in[k] = load_vec(dy + col);
      y_in[k] = load_any(y + col, p.y_aligned);
    }
#pragma unroll
    for (int k = 0; k < kBatch<T>; ++k) {
      const int64_t col = begin + k * row.step;
      if (col < row.seen_end && col + kVec > row.visible)
        clear_from(static_cast<int>(row.visible - col), &y_in[k]);
    }
  };
  Edge<T> dy_edges[2], y_edges[2];
  float dot = 0.0f;
  for (int side = 0; side < 2; ++side) {
    dy_edges[side] = load_edge(row, dy, row.edge(side));
    y_edges[side] = load_edge(row, y, row.edge(side));
    dot += product_of(dy_edges[side], y_edges[side]);
  }
  for (int64_t begin = row.first; begin < row.seen_end; begin += kBatch<T> * row.step) {
    load(begin);
#pragma unroll
    for (int k = 0; k < kBatch<T>; ++k) dot += dot_of_vec(dy_in[k], y_in[k]);
  }
  dot = row_sum(p, group_sum(dot, p.group));
  for (int64_t begin = row.first; begin < row.vecs_end; begin += kBatch<T> * row.step) {
    load(begin);
#pragma unroll
    for (int k = 0; k < kBatch<T>; ++k)
      if (begin + k * row.step < row.vecs_end)
        store_any(dx + begin + k * row.step, p.out_aligned,
                  gradient(dy_in[k], y_in[k], dot, p.scale));
  }
  for (int side = 0; side < 2; ++side)
    if (row.edge(side) >= 0)
      dx[row.edge(side)] = gradient(dy_edges[side], y_edges[side], dot, p.scale);
}

}  // namespace
}  // namespace apex_te
