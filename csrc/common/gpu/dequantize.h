// FP8 codes times the scales of their blocks: the CUDA kernel of every block-scaled format.
#pragma once

#include "common/gpu/shifted.h"
#include "common/numerics/with_dtype.h"

namespace apex_te {

constexpr int kDequantizeThreads = 128;
constexpr int kDequantizeRows = 4;  // of one thread

struct DequantizePlan {
  const uint8_t* codes;
  void* out;
  int64_t rows, cols;
  int log_lanes;  // of the threads that share rows
};

// A thread decodes 8 columns of 4 rows; its loads are all in flight. `Scales` gives the factor
// of a code's block, scales(row, col), and is the same for 8 columns from a multiple of 8 on.
template <typename T, typename Format, bool kAligned, typename Scales>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize_kernel(const DequantizePlan p, const Scales scales) {
  const int lane = threadIdx.x & ((1 << p.log_lanes) - 1), group = threadIdx.x >> p.log_lanes;
  const int64_t row = (block_row() * (kDequantizeThreads >> p.log_lanes) + group) * kDequantizeRows;
  const int64_t col = ((static_cast<int64_t>(blockIdx.x) << p.log_lanes) + lane) * kVec;
  if (kAligned && (row >= p.rows || col >= p.cols)) return;
  uint2 codes[kDequantizeRows];
  float factors[kDequantizeRows];
  const auto from = [&](int r) { return p.codes + (row + r) * p.cols + col; };
  const auto left = [&](int r) { return row + r < p.rows ? p.cols - col : 0; };
  if constexpr (kAligned) {
#pragma unroll
    for (int r = 0; r < kDequantizeRows; ++r)
      codes[r] = left(r) ? *reinterpret_cast<const uint2*>(from(r)) : make_uint2(0u, 0u);
  } else {
    load_all_codes_shifted<kDequantizeRows>(from, left, p.codes, p.codes + p.rows * p.cols, codes);
  }
#pragma unroll
  for (int r = 0; r < kDequantizeRows; ++r)
    factors[r] = row + r < p.rows && col < p.cols ? scales(row + r, col) : 1.0f;
#pragma unroll
  for (int r = 0; r < kDequantizeRows; ++r) {
    if (kAligned && row + r >= p.rows) break;
    float values[kVec];
    decode_values<Format>(codes[r], values);
#pragma unroll
    for (int c = 0; c < kVec; ++c) values[c] *= factors[r];
    Vec8<T> v;
    pack(values, &v);
    T* to = static_cast<T*>(p.out) + (row + r) * p.cols + col;
    if (kAligned)
      store_vec(to, v);
    else
      store_shifted(to, v, p.cols - col, lane & 31, min(32, 1 << p.log_lanes), row + r < p.rows);
  }
}

template <typename T, typename Format, typename Scales>
void launch_dequantize(const char* name, DequantizePlan p, const Scales& scales,
                       cudaStream_t stream) {
  const bool aligned = p.cols % kVec == 0 && is_aligned(p.codes, 8) && is_aligned(p.out, 16);
  while ((1 << p.log_lanes) < kDequantizeThreads && (kVec << p.log_lanes) < p.cols) ++p.log_lanes;
  if (p.rows == 0 || p.cols == 0) return;
  const int64_t cols_per_block = kVec << p.log_lanes;
  const int64_t rows_per_block = (kDequantizeThreads >> p.log_lanes) * kDequantizeRows;
  const dim3 grid = grid_of((p.rows + rows_per_block - 1) / rows_per_block,
                            (p.cols + cols_per_block - 1) / cols_per_block, name);
  const auto kernel = aligned ? dequantize_kernel<T, Format, true, Scales>
                              : dequantize_kernel<T, Format, false, Scales>;
  kernel<<<grid, kDequantizeThreads, 0, stream>>>(p, scales);
  check_cuda(cudaGetLastError(), name);
}

// out[rows, cols] = codes * scales in out's dtype.
template <typename Scales>
void dequantize(const char* name, const TensorView& codes, const TensorView& out,
                const Scales& scales, cudaStream_t stream) {
  const DequantizePlan p{codes.data<uint8_t>(), out.data<void>(), codes.size(0), codes.size(1), 0};
  with_dtype(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    codes.dtype() == DType::kE5M2 ? launch_dequantize<T, E5M2>(name, p, scales, stream)
                                  : launch_dequantize<T, E4M3>(name, p, scales, stream);
  });
}

}  // namespace apex_te
