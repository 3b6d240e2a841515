// CUDA kernels of swiglu for what the vector kernels leave: odd extents, unaligned storage and FP8
// from fp32. By element: results in the inputs' dtype row by row; FP8 and dbias in tiles of 64 x 64
// whose columns a warp's threads share out.
#include "common/gpu/amax.h"
#include "common/gpu/column_sums.h"
#include "common/numerics/with_dtype.h"
#include "swiglu/swiglu_device.h"

namespace apex_te {
namespace {

constexpr int kTile = 64, kThreads = 256, kGroups = kThreads / kTile;
constexpr int kRows = kTile / kGroups;  // of one thread
constexpr int kBatch = 8;               // of them at a time
static_assert(kTile == kSwigluTileRows, "rows of a line of the workspace");

template <typename T>
__device__ __forceinline__ float value_at(const void* p, int64_t i) {
  return to_float(static_cast<const T*>(p)[i]);
}

// `n` elements of a column, from `i` on.
template <typename T>
__device__ __forceinline__ void load_column(const void* matrix, int64_t i, int64_t ld, int n,
                                            T* values) {
  const T* p = static_cast<const T*>(matrix) + i;
#pragma unroll
  for (int k = 0; k < kBatch; ++k, p += ld) values[k] = k < n ? *p : T{};
}

__device__ __forceinline__ uint8_t encode(float value, bool is_e5m2) {
  return static_cast<uint8_t>(is_e5m2 ? encode_fp8x2<E5M2>(value, 0.0f)
                                      : encode_fp8x2<E4M3>(value, 0.0f));
}

template <typename T, bool kBwd>
__global__ void __launch_bounds__(kThreads) swiglu_any_kernel(const Swiglu p) {
  constexpr int kHalves = kBwd ? 2 : 1;
  __shared__ uint32_t warp_amaxes[kThreads / 32];
  __shared__ uint8_t codes[kHalves][kTile][kTile + 4];  // [half][column][row]
  __shared__ float sums[kHalves][kGroups][kTile];
  const int64_t col_tiles = p.cols ? (p.cols + kTile - 1) / kTile : 1;
  const int64_t row_tile = blockIdx.x / col_tiles;
  const int64_t row0 = row_tile * kTile, col0 = (blockIdx.x - row_tile * col_tiles) * kTile;
  const int group = threadIdx.x / kTile, c = threadIdx.x % kTile;
  const int64_t col = col0 + c;
  const bool is_e5m2 = p.fp8 == DType::kE5M2, is_fp8 = p.scale;
  const float scale = is_fp8 ? *p.scale : 1.0f;
  const uint32_t seen = amax_so_far(p.amax);
  uint32_t amax = 0;
  float half_sums[kHalves] = {};
  if (col < p.cols) {
    const float gate_bias = p.gate_bias ? value_at<T>(p.gate_bias, col) : 0.0f;
    const float up_bias = p.up_bias ? value_at<T>(p.up_bias, col) : 0.0f;
#pragma unroll 1
    for (int r0 = group * kRows; r0 < (group + 1) * kRows; r0 += kBatch) {
      const int64_t left = p.rows - row0 - r0;
      if (left <= 0) break;
      const int n = left < kBatch ? static_cast<int>(left) : kBatch;
      const int64_t row = row0 + r0;
      T gate[kBatch], up[kBatch], grad[kBatch];
      load_column(p.gate, row * p.gate_ld + col, p.gate_ld, n, gate);
      load_column(p.up, row * p.up_ld + col, p.up_ld, n, up);
      if (kBwd) load_column(p.grad_output, row * p.cols + col, p.cols, n, grad);
      float results[kHalves][kBatch];
      GatedKinds::choose(p.activation, [&](auto act) {
        constexpr Activation kAct = decltype(act)::value;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          float g = to_float(gate[k]), u = to_float(up[k]);
          if (p.gate_bias) {
            g += gate_bias;
            u += up_bias;
          }
          if (kBwd)
            gated_gradient<kAct, sizeof(T) == 4>(g, u, to_float(grad[k]), p.clamp, &results[0][k],
                                                 &results[kHalves - 1][k]);
          else
            results[0][k] = gated<kAct, sizeof(T) == 4>(g, u, p.clamp);
        }
      });
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        T* out = static_cast<T*>(kBwd ? (h ? p.dup : p.dgate) : p.out);
        const int64_t ld = kBwd ? p.grad_ld : p.cols;
        float part_sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (k >= n) break;
          const float result = results[h][k];
          amax = max(amax, magnitude_bits(result));
          part_sum += result;
          if (is_fp8) {
            const uint8_t code = encode(result * scale, is_e5m2);
            if (p.rowwise) p.rowwise[((row + k) * kHalves + h) * p.cols + col] = code;
            codes[h][c][r0 + k] = code;
          } else {
            out[(row + k) * ld + col] = from_float<T>(result);
          }
        }
        half_sums[h] += part_sum;
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHalves; ++h) sums[h][group][c] = half_sums[h];
  stage_amax(amax, warp_amaxes);
  __syncthreads();
  const int64_t rows = p.rows - row0 < kTile ? p.rows - row0 : kTile;
  if (p.columnwise && row0 + c < p.columnwise_ld)
    for (int i = group; i < kHalves * kTile; i += kGroups) {
      const int h = i / kTile, from = i % kTile;
      if (col0 + from < p.cols)
        p.columnwise[(h * p.cols + col0 + from) * p.columnwise_ld + row0 + c] =
            c < rows ? codes[h][from][c] : uint8_t{0};
    }
  if (p.dbias && rows > 0 && group < kHalves && col < p.cols) {
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) sum += sums[group % kHalves][g][c];
    p.workspace[row_tile * 2 * p.cols + group * p.cols + col] = sum;
  }
  finish_amax<kThreads>(p.amax, seen, warp_amaxes);
  if (blockIdx.x == 0 && threadIdx.x == 0 && p.scale_inv) *p.scale_inv = 1.0f / scale;
}

constexpr int kLineElements = 4, kLineCols = 32 * kLineElements;  // of a thread, of a warp
// Of a multiprocessor: fine gradients need more registers.
template <typename T, bool kBwd>
constexpr int kLineBlocks = kBwd && sizeof(T) == 4 ? 5 : 8;

// Results in the inputs' dtype. A warp has a part of a row, neighbours in neighbouring threads, so
// that no alignment matters; all loads of a thread are in flight at once.
template <typename T, bool kBwd>
__global__ void __launch_bounds__(kThreads, kLineBlocks<T, kBwd>)
    swiglu_line_kernel(const Swiglu p) {
  const int64_t row = block_row();
  const int64_t col =
      (blockIdx.x * static_cast<int64_t>(blockDim.x / 32) + threadIdx.x / 32) * kLineCols +
      threadIdx.x % 32;
  if (row >= p.rows || col >= p.cols) return;
  const int64_t left = p.cols - col;
  const int n = left < kLineCols ? static_cast<int>(left) : kLineCols;  // a 32nd is this thread's
  const auto load = [n](const void* matrix, int64_t i, T* values) {
    const T* p = static_cast<const T*>(matrix) + i;
#pragma unroll
    for (int k = 0; k < kLineElements; ++k) values[k] = k * 32 < n ? p[k * 32] : T{};
  };
  T gate[kLineElements], up[kLineElements], grad[kLineElements];
  load(p.gate, row * p.gate_ld + col, gate);
  load(p.up, row * p.up_ld + col, up);
  if (kBwd) load(p.grad_output, row * p.cols + col, grad);
  float g[kLineElements], u[kLineElements];
#pragma unroll
  for (int k = 0; k < kLineElements; ++k) {
    g[k] = to_float(gate[k]);
    u[k] = to_float(up[k]);
  }
  if (p.gate_bias) {
    load(p.gate_bias, col, gate);
    load(p.up_bias, col, up);
#pragma unroll
    for (int k = 0; k < kLineElements; ++k) {
      g[k] += to_float(gate[k]);
      u[k] += to_float(up[k]);
    }
  }
  GatedKinds::choose(p.activation, [&](auto act) {
    constexpr Activation kAct = decltype(act)::value;
#pragma unroll
    for (int k = 0; k < kLineElements; ++k) {
      if (kBwd)
        gated_gradient<kAct, sizeof(T) == 4>(g[k], u[k], to_float(grad[k]), p.clamp, &g[k], &u[k]);
      else
        g[k] = gated<kAct, sizeof(T) == 4>(g[k], u[k], p.clamp);
    }
  });
  T* first = static_cast<T*>(kBwd ? p.dgate : p.out) + row * (kBwd ? p.grad_ld : p.cols) + col;
#pragma unroll
  for (int k = 0; k < kLineElements; ++k)
    if (k * 32 < n) first[k * 32] = from_float<T>(g[k]);
  if (!kBwd) return;
  T* second = static_cast<T*>(p.dup) + row * p.grad_ld + col;
#pragma unroll
  for (int k = 0; k < kLineElements; ++k)
    if (k * 32 < n) second[k * 32] = from_float<T>(u[k]);
}

template <typename T>
void launch_lines(const Swiglu& p, bool is_bwd, cudaStream_t stream) {
  const int64_t warps = (p.cols + kLineCols - 1) / kLineCols;
  const int64_t block_warps = warps < kThreads / 32 ? warps : kThreads / 32;
  const auto kernel = is_bwd ? swiglu_line_kernel<T, true> : swiglu_line_kernel<T, false>;
  kernel<<<grid_of(p.rows, (warps + block_warps - 1) / block_warps, "swiglu"),
           static_cast<unsigned>(32 * block_warps), 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "swiglu");
}

template <typename T>
void launch(const Swiglu& p, bool is_bwd, cudaStream_t stream) {
  if (p.rows && p.cols >= kTile && p.fp8 == DType::kOther && !p.dbias)
    return launch_lines<T>(p, is_bwd, stream);
  const int64_t row_tiles = (p.rows + kTile - 1) / kTile;
  const int64_t tiles = row_tiles * ((p.cols + kTile - 1) / kTile);
  if (tiles > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "swiglu: input must have fewer than 2^43 elements");
  const auto kernel = is_bwd ? swiglu_any_kernel<T, true> : swiglu_any_kernel<T, false>;
  // Without elements one block is left to write scale_inv.
  kernel<<<static_cast<unsigned>(tiles ? tiles : 1), kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "swiglu");
  if (p.dbias) launch_column_sums<T>(p.workspace, row_tiles, 2 * p.cols, p.dbias, stream);
}

}  // namespace

void launch_swiglu_any(const Swiglu& p, bool is_bwd, cudaStream_t stream) {
  with_dtype(p.dtype, [&](auto zero) { launch<decltype(zero)>(p, is_bwd, stream); });
}

}  // namespace apex_te
