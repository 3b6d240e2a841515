// The ops activation and bias_gelu element by element: any dtype, extent and alignment, FP8 results
// and dbias included. One kernel for all of it: a tile's codes pass through shared memory, and a
// thread stays in one column.
#pragma once

#include "common/activation/cuda.h"
#include "common/gpu/amax.h"
#include "common/gpu/column_sums.h"

namespace apex_te {

constexpr int kAnyThreads = 256, kAnyCols = 128;
constexpr int kAnyRows = kActivationTileRows;

// numel <= rows * cols: where neither bias, dbias nor columnwise sets rows, the caller chooses the
// extents and the last row may be shorter.
template <typename Kinds, bool kBwd>
__global__ void __launch_bounds__(kAnyThreads)
    activation_any_kernel(const ActivationOp p, const int64_t numel) {
  constexpr int kGroups = kAnyThreads / kAnyCols, kBatch = 4;
  __shared__ uint8_t tile[kAnyRows][kAnyCols + 4];
  __shared__ uint32_t warp_amaxes[kAnyThreads / 32];
  __shared__ float sums[kGroups][kAnyCols];
  const int64_t col_tiles = p.cols > kAnyCols ? (p.cols + kAnyCols - 1) / kAnyCols : 1;
  const int64_t row_tile = blockIdx.x / col_tiles;
  const int64_t row0 = row_tile * kAnyRows, col0 = (blockIdx.x - row_tile * col_tiles) * kAnyCols;
  const int group = threadIdx.x / kAnyCols, c = threadIdx.x % kAnyCols;
  const int64_t col = col0 + c;
  const float scale = p.scale ? *p.scale : 1.0f;
  const uint32_t seen = amax_so_far(p.amax);
  const float bias = p.bias && col < p.cols ? load_element(p.bias, col, p.dtype) : 0.0f;
  const bool is_fine = p.dtype == DType::kFloat32;
  uint32_t amax = 0;
  float column_sum = 0.0f;
  for (int r0 = group; r0 < kAnyRows; r0 += kGroups * kBatch) {
    float x[kBatch], dy[kBatch], values[kBatch];
    bool inside[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int64_t row = row0 + r0 + k * kGroups, i = row * p.cols + col;
      inside[k] = row < p.rows && col < p.cols && i < numel;
      x[k] = inside[k] ? load_element(p.x, i, p.dtype) : 0.0f;
      dy[k] = kBwd && inside[k] ? load_element(p.dy, i, p.dtype) : 0.0f;
    }
    Kinds::choose(p.kind, [&](auto kind) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
        values[k] = activation_result<decltype(kind)::value, kBwd>(x[k] + bias, dy[k], is_fine);
    });
    float batch_sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!inside[k]) continue;
      const int r = r0 + k * kGroups;
      const int64_t i = (row0 + r) * p.cols + col;
      batch_sum += values[k];
      if (p.out) {
        store_element(p.out, i, p.dtype, values[k]);
        continue;
      }
      amax = max(amax, magnitude_bits(values[k]));
      const float scaled = values[k] * scale;
      const uint8_t code =
          p.fp8 == DType::kE5M2 ? encode_fp8<E5M2>(scaled) : encode_fp8<E4M3>(scaled);
      if (p.rowwise) p.rowwise[i] = code;
      tile[r][c] = code;
    }
    column_sum += batch_sum;
  }
  sums[group][c] = column_sum;
  stage_amax(amax, warp_amaxes);
  __syncthreads();
  if (p.columnwise) {
    for (int k = threadIdx.x; k < kAnyRows * kAnyCols; k += kAnyThreads) {
      const int r = k % kAnyRows, column = k / kAnyRows;
      if (row0 + r < p.columnwise_ld && col0 + column < p.cols)
        p.columnwise[(col0 + column) * p.columnwise_ld + row0 + r] =
            row0 + r < p.rows ? tile[r][column] : uint8_t{0};
    }
  }
  if (p.dbias && row0 < p.rows && group == 0 && col < p.cols) {
    float sum = 0.0f;
    for (int g = 0; g < kGroups; ++g) sum += sums[g][c];
    p.workspace[row_tile * p.cols + col] = sum;
  }
  finish_amax<kAnyThreads>(p.amax, seen, warp_amaxes);
  if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv) *p.scale_inv = 1.0f / scale;
}

template <typename Kinds, bool kBwd>
void launch_activation_any(ActivationOp p, cudaStream_t stream) {
  const int64_t numel = p.rows * p.cols;
  if (!p.bias && !p.dbias && !p.columnwise) {
    p.cols = kAnyCols;
    p.rows = (numel + kAnyCols - 1) / kAnyCols;
  }
  const int64_t tiles = (p.rows + kAnyRows - 1) / kAnyRows * ((p.cols + kAnyCols - 1) / kAnyCols);
  if (tiles > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "activation: x must have fewer than 2^43 elements");
  // An empty x has no tile, but scale_inv is still due: one block writes it.
  activation_any_kernel<Kinds, kBwd>
      <<<static_cast<unsigned>(tiles ? tiles : 1), kAnyThreads, 0, stream>>>(p, numel);
  check_cuda(cudaGetLastError(), "activation");
}

}  // namespace apex_te
