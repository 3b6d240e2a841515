// CUDA kernels of bias_dropout_add.
//
// A thread has 8 columns of some rows, a warp 256 columns, a block some rows for each warp. The
// loads come first; the mask, a bit for each element, is computed while they are under way. Rows of
// 16-bit elements that do not begin at whole vectors pass through shared memory, those of a
// half-warp (common/gpu/staged_rows.h); rows of others are shifted.
#include "bias_dropout_add/bias_dropout_add.h"
#include "common/gpu/column_sums.h"
#include "common/gpu/staged_rows.h"
#include "common/numerics/with_dtype.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kLanes = 32;        // threads of one row
constexpr int kVecsInFlight = 4;  // of x and of residual, 16 bytes each, of a thread of forward
constexpr int kThreads = 256, kBlocks = 4;                // of forward; blocks of a multiprocessor
constexpr int kShiftedBlocks = 3, kBwdShiftedBlocks = 2;  // where vectors are shifted

constexpr int kBwdBlocks = 3;
constexpr int kBwdRows = kBiasDropoutAddRowsPerThread;
constexpr int kBwdThreads = kBiasDropoutAddTileRows / kBwdRows * kLanes;
constexpr int kBwdCols = kLanes * kVec;
static_assert(kBwdThreads >= kBwdCols, "a thread for each column sum");

// The vector at p, a place in x, of which n elements are left in the row; x has `numel`.
template <bool kAligned, typename T>
__device__ __forceinline__ Vec8<T> load(const T* p, int64_t n, const void* x, int64_t numel) {
  const T* begin = static_cast<const T*>(x);
  if (!kAligned) return load_shifted(p, n, begin, begin + numel);
  if (n > 0) return load_vec(p);
  return {};
}
template <bool kAligned, typename T>
__device__ __forceinline__ void store(T* p, const Vec8<T>& v, int64_t n, bool is_present) {
  if (!kAligned)
    store_shifted(p, v, n, threadIdx.x % kLanes, kLanes, is_present);
  else if (n > 0)
    store_vec_whole(p, v);
}

template <typename T, typename Wide, bool kAligned>
__global__ void __launch_bounds__(kThreads, kAligned ? kBlocks : kShiftedBlocks)
    fwd_kernel(const BiasDropoutAdd p, int64_t col_tiles) {
  constexpr int kRows = sizeof(Wide) == 4 ? kVecsInFlight / 2 : kVecsInFlight;
  const int64_t v = blockIdx.x % static_cast<uint32_t>(col_tiles) * kLanes + threadIdx.x % kLanes;
  const int64_t row0 = (blockIdx.x / static_cast<uint32_t>(col_tiles) * int64_t{kThreads / kLanes} +
                        threadIdx.x / kLanes) *
                       kRows;
  const int64_t n = p.cols - v * kVec;
  if (kAligned && n <= 0) return;
  const int64_t at = row0 * p.cols + v * kVec;
  const int64_t numel = p.rows * p.cols;
  Vec8<T> x[kRows];
  Vec8<Wide> residual[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t left = row0 + r < p.rows ? n : 0;
    x[r] = load<kAligned>(static_cast<const T*>(p.x) + at + r * p.cols, left, p.x, numel);
    residual[r] = load<kAligned>(static_cast<const Wide*>(p.residual) + at + r * p.cols, left,
                                 p.residual, numel);
  }
  float bias[kVec] = {};
  if (p.bias) {
    if (p.bias_dtype == DType::kFloat32)
      unpack(load<kAligned>(static_cast<const float*>(p.bias) + v * kVec, n, p.bias, p.cols), bias);
    else
      unpack(load<kAligned>(static_cast<const T*>(p.bias) + v * kVec, n, p.bias, p.cols), bias);
  }
  uint32_t keep[kRows];
  if (p.dropout.is_random) {
    const uint64_t seed = p.seed();
#pragma unroll
    for (int r = 0; r < kRows; ++r) keep[r] = keep_bits(seed, row0 + r, v, p.dropout.threshold);
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) keep[r] = 0xFFu;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (kAligned && row0 + r >= p.rows) break;
    float values[kVec], added[kVec];
    unpack(x[r], values);
    unpack(residual[r], added);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float factor = keep[r] >> i & 1 ? p.dropout.scale : 0.0f;
      const float sum = p.bias ? values[i] + bias[i] : values[i];
      values[i] = added[i] + sum * factor;
    }
    Vec8<Wide> out;
    pack(values, &out);
    store<kAligned>(static_cast<Wide*>(p.out) + at + r * p.cols, out, n, row0 + r < p.rows);
  }
}

template <typename T, typename Wide, bool kAligned>
__global__ void __launch_bounds__(kBwdThreads, kAligned ? kBwdBlocks : kBwdShiftedBlocks)
    bwd_kernel(const BiasDropoutAdd p, int64_t col_tiles) {
  constexpr int kRows = sizeof(Wide) == 4 ? kBwdRows / 2 : kBwdRows;  // whose loads are in flight
  __shared__ float sums[kBwdThreads / kLanes][kBwdCols];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int64_t tile = blockIdx.x / static_cast<uint32_t>(col_tiles);
  const int64_t col0 = blockIdx.x % static_cast<uint32_t>(col_tiles) * int64_t{kBwdCols};
  const int64_t v = col0 / kVec + lane, n = p.cols - v * kVec;
  int64_t row = tile * kBiasDropoutAddTileRows + group * kBwdRows;
  float column_sums[kVec] = {};
#pragma unroll
  for (int step = 0; step < kBwdRows / kRows; ++step, row += kRows) {
    const int64_t at = row * p.cols + v * kVec;
    Vec8<Wide> dout[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      dout[r] = load<kAligned>(static_cast<const Wide*>(p.dout) + at + r * p.cols,
                               row + r < p.rows ? n : 0, p.dout, p.rows * p.cols);
    uint32_t keep[kRows];
    if (p.dropout.is_random) {
      const uint64_t seed = p.seed();
#pragma unroll
      for (int r = 0; r < kRows; ++r) keep[r] = keep_bits(seed, row + r, v, p.dropout.threshold);
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) keep[r] = 0xFFu;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float values[kVec];
      unpack(dout[r], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        values[i] *= keep[r] >> i & 1 ? p.dropout.scale : 0.0f;
        column_sums[i] += values[i];
      }
      if (!p.dx || (kAligned && row + r >= p.rows)) continue;
      Vec8<T> dx;
      pack(values, &dx);
      store<kAligned>(static_cast<T*>(p.dx) + at + r * p.cols, dx, n, row + r < p.rows);
    }
  }
  if (!p.dbias) return;
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < kVec; ++i) sums[group][lane * kVec + i] = column_sums[i];
  __syncthreads();
  if (threadIdx.x >= kBwdCols || col0 + threadIdx.x >= p.cols) return;
  float sum = 0.0f;
#pragma unroll
  for (int g = 0; g < kBwdThreads / kLanes; ++g) sum += sums[g][threadIdx.x];
  p.workspace[tile * p.cols + col0 + threadIdx.x] = sum;
}

constexpr int kStagedRows = kBiasDropoutAddRowsPerThread;
constexpr int kStagedThreads = kBiasDropoutAddTileRows / kStagedRows * kStagedLanes;
constexpr int kStagedBlocks = 6, kBwdStagedBlocks = 8;
static_assert(kStagedThreads == kStagedCols, "a thread for each column sum");

// What a half-warp has of a tile of kBiasDropoutAddTileRows x kStagedCols.
__device__ __forceinline__ StagedPlace place_of(const BiasDropoutAdd& p, int64_t col_tiles) {
  const int64_t row = blockIdx.x / static_cast<uint32_t>(col_tiles) * kBiasDropoutAddTileRows +
                      threadIdx.x / kStagedLanes * kStagedRows;
  const int64_t col = blockIdx.x % static_cast<uint32_t>(col_tiles) * int64_t{kStagedCols};
  return StagedPlace(row, col, p.rows - row, p.cols - col);
}

template <typename T>
__global__ void __launch_bounds__(kStagedThreads, kStagedBlocks)
    staged_fwd_kernel(const BiasDropoutAdd p, int64_t col_tiles) {
  __shared__ StagedRows<kStagedRows> staged[2][kStagedThreads / kStagedLanes];
  const int group = threadIdx.x / kStagedLanes;
  const StagedPlace place = place_of(p, col_tiles);
  const auto x = place.of_16_bits(p.x, p.cols), residual = place.of_16_bits(p.residual, p.cols);
  const auto out = place.of(static_cast<uint16_t*>(p.out), p.cols);
  place.fetch(x, p.x, staged[0][group]);
  place.fetch(residual, p.residual, staged[1][group]);
  const int64_t col = place.col + place.lane * kVec, n = p.cols - col;
  float bias[kVec] = {};
  if (p.bias) {
    if (p.bias_dtype == DType::kFloat32)
      unpack(load<false>(static_cast<const float*>(p.bias) + col, n, p.bias, p.cols), bias);
    else
      unpack(load<false>(static_cast<const T*>(p.bias) + col, n, p.bias, p.cols), bias);
  }
  const uint64_t seed = p.dropout.is_random ? p.seed() : 0;
  finish_fetches();
#pragma unroll 1
  for (int r = 0; r < kStagedRows; ++r) {
    const uint32_t keep = p.dropout.is_random
                              ? keep_bits(seed, place.row + r, col / kVec, p.dropout.threshold)
                              : 0xFFu;
    float values[kVec], added[kVec];
    unpack(place.read<T>(x, staged[0][group], r), values);
    unpack(place.read<T>(residual, staged[1][group], r), added);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float factor = keep >> i & 1 ? p.dropout.scale : 0.0f;
      const float sum = p.bias ? values[i] + bias[i] : values[i];
      values[i] = added[i] + sum * factor;
    }
    Vec8<T> v;
    pack(values, &v);
    store_staged(out.row(r), v.words, place.length(r), place.lane);
  }
}

template <typename T>
__global__ void __launch_bounds__(kStagedThreads, kBwdStagedBlocks)
    staged_bwd_kernel(const BiasDropoutAdd p, int64_t col_tiles) {
  __shared__ StagedRows<kStagedRows> staged[kStagedThreads / kStagedLanes];
  __shared__ float sums[kStagedThreads / kStagedLanes][kStagedCols];
  const int group = threadIdx.x / kStagedLanes;
  const StagedPlace place = place_of(p, col_tiles);
  const auto dout = place.of_16_bits(p.dout, p.cols);
  const auto dx = place.of(static_cast<uint16_t*>(p.dx), p.cols);
  place.fetch(dout, p.dout, staged[group]);
  const uint64_t seed = p.dropout.is_random ? p.seed() : 0;
  float column_sums[kVec] = {};
  finish_fetches();
#pragma unroll 1
  for (int r = 0; r < kStagedRows; ++r) {
    const uint32_t keep =
        p.dropout.is_random
            ? keep_bits(seed, place.row + r, place.col / kVec + place.lane, p.dropout.threshold)
            : 0xFFu;
    float values[kVec];
    unpack(place.read<T>(dout, staged[group], r), values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      values[i] *= keep >> i & 1 ? p.dropout.scale : 0.0f;
      column_sums[i] += values[i];
    }
    if (!p.dx) continue;
    Vec8<T> v;
    pack(values, &v);
    store_staged(dx.row(r), v.words, place.length(r), place.lane);
  }
  if (!p.dbias) return;
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < kVec; ++i) sums[group][place.lane * kVec + i] = column_sums[i];
  __syncthreads();
  const int64_t col = place.col + threadIdx.x;
  if (col >= p.cols) return;
  float sum = 0.0f;
#pragma unroll
  for (int g = 0; g < kStagedThreads / kStagedLanes; ++g) sum += sums[g][threadIdx.x];
  p.workspace[blockIdx.x / static_cast<uint32_t>(col_tiles) * p.cols + col] = sum;
}

unsigned grid_of(int64_t row_tiles, int64_t col_tiles) {
  if (row_tiles > 0x7FFFFFFF / col_tiles)
    fail(kApexTeUnsupported, "bias_dropout_add: x must need fewer than 2^31 blocks");
  return static_cast<unsigned>(row_tiles * col_tiles);
}

// Either direction for rows of 16-bit elements at any alignment.
template <typename T>
void launch_staged(const BiasDropoutAdd& p, cudaStream_t stream) {
  const int64_t col_tiles = (p.cols + kStagedCols - 1) / kStagedCols;
  const int64_t row_tiles = (p.rows + kBiasDropoutAddTileRows - 1) / kBiasDropoutAddTileRows;
  const auto kernel = p.out ? staged_fwd_kernel<T> : staged_bwd_kernel<T>;
  kernel<<<grid_of(row_tiles, col_tiles), kStagedThreads, 0, stream>>>(p, col_tiles);
  check_cuda(cudaGetLastError(), "bias_dropout_add");
}

template <typename T, typename Wide>
void launch_fwd(const BiasDropoutAdd& p, cudaStream_t stream) {
  constexpr int64_t kRows = sizeof(Wide) == 4 ? kVecsInFlight / 2 : kVecsInFlight;
  constexpr int64_t kTileRows = kThreads / kLanes * kRows, kTileCols = kLanes * kVec;
  const int64_t col_tiles = (p.cols + kTileCols - 1) / kTileCols;
  const bool aligned = p.cols % kVec == 0 && is_aligned(p.x, 16) && is_aligned(p.bias, 16) &&
                       is_aligned(p.residual, 16) && is_aligned(p.out, 16);
  auto kernel = fwd_kernel<T, Wide, true>;
  if constexpr (sizeof(T) == 2 && sizeof(Wide) == 2) {
    if (!aligned) return launch_staged<T>(p, stream);
  } else if (!aligned) {
    kernel = fwd_kernel<T, Wide, false>;
  }
  kernel<<<grid_of((p.rows + kTileRows - 1) / kTileRows, col_tiles), kThreads, 0, stream>>>(
      p, col_tiles);
  check_cuda(cudaGetLastError(), "bias_dropout_add_fwd");
}

template <typename T, typename Wide>
void launch_bwd(const BiasDropoutAdd& p, cudaStream_t stream) {
  const int64_t col_tiles = (p.cols + kBwdCols - 1) / kBwdCols;
  const int64_t row_tiles = (p.rows + kBiasDropoutAddTileRows - 1) / kBiasDropoutAddTileRows;
  const bool aligned = p.cols % kVec == 0 && is_aligned(p.dout, 16) && is_aligned(p.dx, 16);
  auto kernel = bwd_kernel<T, Wide, true>;
  if constexpr (sizeof(T) == 2 && sizeof(Wide) == 2) {
    if (!aligned) return launch_staged<T>(p, stream);
  } else if (!aligned) {
    kernel = bwd_kernel<T, Wide, false>;
  }
  kernel<<<grid_of(row_tiles, col_tiles), kBwdThreads, 0, stream>>>(p, col_tiles);
  check_cuda(cudaGetLastError(), "bias_dropout_add_bwd");
}

template <typename T, typename Wide>
void launch(const BiasDropoutAdd& p, cudaStream_t stream) {
  p.out ? launch_fwd<T, Wide>(p, stream) : launch_bwd<T, Wide>(p, stream);
}

void run_dtypes(const BiasDropoutAdd& p, cudaStream_t stream) {
  if (p.mask || p.kept)
    fail(kApexTeUnsupported, "bias_dropout_add: mask must be None on CUDA, got a tensor");
  if (p.rows == 0 || p.cols == 0) return;
  if (p.dtype == DType::kFloat32) return launch<float, float>(p, stream);
  const bool is_wide = p.wide == DType::kFloat32;
  if (p.dtype == DType::kFloat16)
    return is_wide ? launch<Half, float>(p, stream) : launch<Half, Half>(p, stream);
  return is_wide ? launch<BFloat16, float>(p, stream) : launch<BFloat16, BFloat16>(p, stream);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(bias_dropout_add_fwd) {
  using namespace apex_te;
  const BiasDropoutAdd p = check_bias_dropout_add_fwd(args);
  const DeviceGuard guard(args.device_id());
  run_dtypes(p, static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(bias_dropout_add_bwd) {
  using namespace apex_te;
  const BiasDropoutAdd p = check_bias_dropout_add_bwd(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  run_dtypes(p, stream);
  if (!p.dbias) return;
  const int64_t lines = (p.rows + kBiasDropoutAddTileRows - 1) / kBiasDropoutAddTileRows;
  with_dtype(p.bias_dtype, [&](auto zero) {
    launch_column_sums<decltype(zero)>(p.workspace, lines, p.cols, p.dbias, stream);
  });
}
