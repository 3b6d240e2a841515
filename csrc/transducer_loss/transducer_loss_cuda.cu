// CUDA kernels of transducer_loss.
//
// Forward: some lanes of a warp read a row of logits for the log of its sum, and the two
// log-probabilities of all cells are gathered, diagonal by diagonal; then a block for each sample's
// alpha and beta goes over the diagonals, a thread for a place. Backward: what the elements of a
// row have in common is made first; then a thread has some vectors of 16 bytes.
#include "common/gpu/ballot.h"
#include "common/gpu/fast_division.h"
#include "common/gpu/vec.h"
#include "common/numerics/with_dtype.h"
#include "transducer_loss/transducer_loss.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 256, kMostThreads = 1024;
constexpr int kSteps = 4;  // vectors of a thread of backward
constexpr int kAhead = 4;  // diagonals whose loads are in flight

template <typename T>
__device__ __forceinline__ float exp_of(float x) {
  return sizeof(T) == 2 ? __expf(x) : expf(x);
}

template <typename T>
__device__ __forceinline__ Vec8<T> load(const T* p, int64_t left, bool aligned) {
  if (left <= 0) return {};
  return aligned && left >= kVec ? load_vec(p) : load_partial(p, left);
}

// The logsumexp of a row, of kLanes threads.
template <typename T, int kLanes>
__device__ __forceinline__ float log_sum_of(const TransducerLoss& p, int64_t row, bool aligned) {
  constexpr int kAtOnce = kLanes < 32 ? 1 : 4 / (sizeof(T) / 2);  // vectors in flight
  const T* x = static_cast<const T*>(p.x) + row * p.cols;
  float high = -HUGE_VALF, sum = 0.0f;
  for (int64_t col = threadIdx.x % kLanes * kVec; col < p.cols; col += kAtOnce * kLanes * kVec) {
    Vec8<T> loaded[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t at = col + k * kLanes * kVec;
      loaded[k] = load(x + at, p.cols - at, aligned);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t left = p.cols - col - k * kLanes * kVec;
      if (left <= 0) break;
      float values[kVec], higher = high;
      unpack(loaded[k], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (i >= left) values[i] = -HUGE_VALF;
        higher = fmaxf(higher, values[i]);
      }
      const float base = higher == -HUGE_VALF ? 0.0f : higher;
      sum *= exp_of<T>(high - base);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum += exp_of<T>(values[i] - base);
      high = higher;
    }
  }
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, high, lane);
    const float other_sum = __shfl_xor_sync(0xFFFFFFFFu, sum, lane);
    const float higher = fmaxf(high, other), base = higher == -HUGE_VALF ? 0.0f : higher;
    // The same order in both lanes, so that they agree to the bit.
    const float mine = sum * expf(high - base), theirs = other_sum * expf(other - base);
    sum = threadIdx.x & lane ? theirs + mine : mine + theirs;
    high = higher;
  }
  return high + logf(sum);
}

// kLanes: 1 where x are log-probabilities.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) gather_kernel(const TransducerLoss p, bool aligned) {
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
  TransducerCells::Cell cell = {0, 0, 0, false};
  if (row < p.cells.rows) cell = p.cells.cell_of(row);
  if (kLanes > 1) {
    // Lanes of a warp stay together: a row that does not count is the first again.
    if (warp_ballot(cell.counts) == 0) return;
    const float log_sum = log_sum_of<T, kLanes>(p, cell.counts ? row : 0, aligned);
    if (!cell.counts || threadIdx.x % kLanes != 0) return;
    p.log_sums[row] = log_sum;
  }
  if (!cell.counts) return;
  *reinterpret_cast<float2*>(p.workspace + p.pair_at(cell.b, cell.t, cell.u)) =
      make_float2(p.log_prob<T>(row, p.blank), p.label_log_prob<T>(row, cell.b, cell.u));
}

// The log-probabilities of a cell, none outside of the sample's.
struct Pairs {
  const TransducerLoss& p;
  int64_t b, frames, places;

  __device__ __forceinline__ float2 operator()(int64_t diagonal, int64_t u) const {
    const int64_t t = diagonal - u;
    if (t < 0 || t >= frames || u >= places) return make_float2(0.0f, 0.0f);
    return *reinterpret_cast<const float2*>(p.workspace + p.pair_at(b, t, u));
  }
};

// Blocks of y = 0 make alpha, of y = 1 beta, whose places and diagonals run backwards.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) lattice_kernel(const TransducerLoss p) {
  extern __shared__ double lines[];
  const int64_t b = blockIdx.x, frames = p.cells.frames_of(b), places = p.cells.places_of(b);
  const bool is_beta = blockIdx.y == 1;
  const int64_t diagonals = frames + places - 1;
  const Pairs pairs{p, b, frames, places};
  // Own: what a place hands to its next frame. lines: what it hands to the next place; two of them.
  double* own = lines + 2 * p.cells.places;
  for (int64_t u = threadIdx.x; u < places; u += blockDim.x)
    own[u] = is_beta && u + 1 == places ? 0.0 : kImpossible;
  const auto diagonal_of = [&](int64_t step) { return is_beta ? diagonals - 1 - step : step; };
  float2 ahead[kAhead];  // of the first place of a thread
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    ahead[i] = i < diagonals ? pairs(diagonal_of(i), threadIdx.x) : make_float2(0.0f, 0.0f);
  for (int64_t base = 0; base < diagonals; base += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t step = base + i;
      if (step >= diagonals) break;
      const int64_t diagonal = diagonal_of(step);
      double* now = lines + step % 2 * p.cells.places;
      const double* before = lines + (step + 1) % 2 * p.cells.places;
      for (int64_t u = threadIdx.x; u < places; u += blockDim.x) {
        const int64_t t = diagonal - u;
        if (t < 0 || t >= frames) continue;
        const float2 pair = u == threadIdx.x ? ahead[i] : pairs(diagonal, u);
        double value;
        if (is_beta) {
          const double by_label = u + 1 < places ? before[u + 1] + pair.y : kImpossible;
          value = log_add(own[u] + pair.x, by_label);
          own[u] = now[u] = value;
        } else {
          const double by_label = u > 0 ? before[u - 1] : kImpossible;
          value = step == 0 ? 0.0 : log_add(own[u], by_label);
          own[u] = value + pair.x;
          now[u] = value + pair.y;
        }
        p.put(is_beta, p.at(b, t, u), value);
        if (is_beta && step + 1 == diagonals)
          static_cast<T*>(p.loss)[b] = from_float<T>(static_cast<float>(-value));
      }
      if (step + kAhead < diagonals) ahead[i] = pairs(diagonal_of(step + kAhead), threadIdx.x);
      __syncthreads();
    }
  }
  if (is_beta && (frames == 0 || places == 0) && threadIdx.x == 0)
    static_cast<T*>(p.loss)[b] = from_float<T>(HUGE_VALF - HUGE_VALF);
}

__device__ __forceinline__ RowGradient load_row(const TransducerLoss& p, int64_t row) {
  const float4 made = reinterpret_cast<const float4*>(p.workspace)[row];
  const int32_t label = reinterpret_cast<const int32_t*>(p.workspace + 4 * p.cells.rows)[row];
  return {made.x, made.y, made.z, made.w, label};
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rows_kernel(const TransducerLoss p) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.cells.rows) return;
  const RowGradient made = row_gradient<T>(p, row);
  reinterpret_cast<float4*>(p.workspace)[row] =
      make_float4(made.shift, made.factor, made.at_blank, made.at_label);
  reinterpret_cast<int32_t*>(p.workspace + 4 * p.cells.rows)[row] = made.label;
}

// kWhole: a vector lies in one row.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    bwd_kernel(const TransducerLoss p, const FastDivision row_of, bool is_small, bool aligned) {
  const int64_t numel = p.cells.rows * p.cols;
  const int64_t first = (int64_t{blockIdx.x} * kSteps * kThreads + threadIdx.x) * kVec;
  const T* x = static_cast<const T*>(p.x);
  T* dx = static_cast<T*>(p.dx);
  Vec8<T> loaded[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t i = first + k * kThreads * kVec;
    loaded[k] = load(x + i, p.fuse_softmax ? numel - i : 0, aligned);
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t i = first + k * kThreads * kVec, left = numel - i;
    if (left <= 0) break;
    int64_t row =
        is_small ? int64_t{row_of(static_cast<uint32_t>(kWhole ? i / kVec : i))} : i / p.cols;
    int64_t col = i - row * p.cols;
    RowGradient made = load_row(p, row);
    float values[kVec];
    unpack(loaded[k], values);
#pragma unroll
    for (int j = 0; j < kVec; ++j, ++col) {
      if (!kWhole && col == p.cols) {
        col = 0;
        if (++row < p.cells.rows) made = load_row(p, row);
      }
      const float shifted = values[j] + made.shift;
      const float exponential = exp_of<T>(shifted);
      const bool is_some = p.fuse_softmax && made.shift != -HUGE_VALF;
      float value = is_some ? made.factor * exponential : 0.0f;
      if (col == p.blank) value += made.at_blank;
      if (col == made.label) value += made.at_label;
      values[j] = value;
    }
    Vec8<T> out;
    pack(values, &out);
    if (aligned && left >= kVec)
      store_vec_whole(dx + i, out);
    else
      store_partial(dx + i, out, left);
  }
}

unsigned blocks_of(int64_t count, int64_t per_block) {
  const int64_t blocks = (count + per_block - 1) / per_block;
  if (blocks > 0x7FFFFFFF) fail(kApexTeUnsupported, "transducer_loss: x must have fewer elements");
  return static_cast<unsigned>(blocks);
}

template <typename T, int kLanes>
void launch_gather(const TransducerLoss& p, cudaStream_t stream) {
  const bool aligned = p.cols % kVec == 0 && is_aligned(p.x, 16);
  const unsigned blocks = blocks_of(p.cells.rows, kThreads / kLanes);
  gather_kernel<T, kLanes><<<blocks, kThreads, 0, stream>>>(p, aligned);
  check_cuda(cudaGetLastError(), "transducer_loss_fwd");
}

template <typename T>
void launch_fwd(const TransducerLoss& p, cudaStream_t stream) {
  const int64_t bytes = 3 * p.cells.places * static_cast<int64_t>(sizeof(double));
  if (bytes > device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))
    fail(kApexTeUnsupported, "transducer_loss_fwd: label must have fewer columns, got %lld",
         static_cast<long long>(p.cells.places - 1));
  if (p.cells.rows > 0) {
    if (!p.log_sums)
      launch_gather<T, 1>(p, stream);
    else if (p.cols <= 8 * kVec)
      launch_gather<T, 8>(p, stream);
    else if (p.cols <= 16 * kVec)
      launch_gather<T, 16>(p, stream);
    else
      launch_gather<T, 32>(p, stream);
  }
  const auto kernel = lattice_kernel<T>;
  allow_shared(reinterpret_cast<const void*>(kernel));
  const int64_t warps = (p.cells.places + 31) / 32;
  const int threads = static_cast<int>(warps > kMostThreads / 32 ? kMostThreads : 32 * warps);
  kernel<<<dim3(blocks_of(p.cells.batch, 1), 2), threads, static_cast<size_t>(bytes), stream>>>(p);
  check_cuda(cudaGetLastError(), "transducer_loss_fwd");
}

template <typename T>
void launch_bwd(const TransducerLoss& p, cudaStream_t stream) {
  if (p.cells.rows == 0) return;
  rows_kernel<T><<<blocks_of(p.cells.rows, kThreads), kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "transducer_loss_bwd");
  const int64_t numel = p.cells.rows * p.cols;
  const bool aligned = is_aligned(p.x, 16) && is_aligned(p.dx, 16);
  const bool is_whole = p.cols % kVec == 0, is_small = numel / (is_whole ? kVec : 1) < 0x7FFFFFFF;
  const int64_t divisor = !is_small ? 1 : is_whole ? p.cols / kVec : p.cols;
  const auto kernel = is_whole ? bwd_kernel<T, true> : bwd_kernel<T, false>;
  kernel<<<blocks_of(numel, kSteps * kThreads * kVec), kThreads, 0, stream>>>(
      p, FastDivision(static_cast<uint32_t>(divisor)), is_small, aligned);
  check_cuda(cudaGetLastError(), "transducer_loss_bwd");
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(transducer_loss_fwd) {
  using namespace apex_te;
  const TransducerLoss p = check_transducer_loss_fwd(args);
  if (p.cells.batch == 0) return;
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(p.dtype, [&](auto zero) { launch_fwd<decltype(zero)>(p, stream); });
}

APEX_TE_DEFINE(transducer_loss_bwd) {
  using namespace apex_te;
  const TransducerLoss p = check_transducer_loss_bwd(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(p.dtype, [&](auto zero) { launch_bwd<decltype(zero)>(p, stream); });
}
