// CUDA kernels of attention_sink.
//
// Some lanes of a warp have a query's row, 8 elements each; a block has 64 queries of one head. All
// loads of a thread come first.
#include "attention_sink/attention_sink.h"
#include "common/gpu/vec.h"
#include "common/numerics/with_dtype.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 256;
constexpr int kSumThreads = 128;
constexpr int kTile = static_cast<int>(kAttentionSinkTile);

template <bool kAligned, typename T>
__device__ __forceinline__ Vec8<T> load(const T* p, int64_t n) {
  if (!kAligned) return load_partial(p, n);
  if (n > 0) return load_vec(p);
  return {};
}

// A thread's head, first query and place in the row.
template <int kLanes>
struct Place {
  int64_t line, batch, head, query, col;  // line: of all heads of all batches

  __device__ explicit Place(const AttentionSink& p)
      : line(block_row()),
        batch(line / p.heads),
        head(line - batch * p.heads),
        query(int64_t{blockIdx.x} * kTile + threadIdx.x / kLanes),
        col(threadIdx.x % kLanes * kVec) {}
};

// How a block's threads share its queries.
template <typename T, int kLanes>
struct Share {
  static constexpr int kApart = kThreads / kLanes;  // queries between those of a thread
  static constexpr int kRows = kTile / kApart;      // of a thread
  // Rows whose loads come first: at most 4 loads of 16 bytes of each tensor.
  static constexpr int kMost = 8 / sizeof(T);
  static constexpr int kAtOnce = kRows < kMost ? kRows : kMost;
};

template <typename T, int kLanes, bool kAligned>
__global__ void __launch_bounds__(kThreads) fwd_kernel(const AttentionSink p) {
  using Own = Share<T, kLanes>;
  const Place<kLanes> at(p);
  if (at.line >= p.batch * p.heads) return;
  const float sink = p.sink ? p.sink[at.head] : 0.0f;
  const T* in = reinterpret_cast<const T*>(p.in.data) + at.col;
  T* out = reinterpret_cast<T*>(p.out.data) + at.col;
#pragma unroll 1
  for (int first = 0; first < Own::kRows; first += Own::kAtOnce) {
    const int64_t query0 = at.query + first * Own::kApart;
    float lse[Own::kAtOnce];
#pragma unroll
    for (int r = 0; r < Own::kAtOnce; ++r) {
      const int64_t query = query0 + r * Own::kApart;
      lse[r] = query < p.queries ? p.lse[at.line * p.queries + query] : 0.0f;
    }
    for (int64_t col = 0; col < p.cols; col += kLanes * kVec) {
      const int64_t left = p.cols - at.col - col;
      Vec8<T> x[Own::kAtOnce];
#pragma unroll
      for (int r = 0; r < Own::kAtOnce; ++r) {
        const int64_t query = query0 + r * Own::kApart;
        x[r] = load<kAligned>(in + p.in.at(at.batch, at.head, query) + col,
                              query < p.queries ? left : 0);
      }
#pragma unroll
      for (int r = 0; r < Own::kAtOnce; ++r) {
        const int64_t query = query0 + r * Own::kApart;
        if (query >= p.queries || left <= 0) break;
        const float factor = SinkTotal(lse[r], sink).factor;
        float values[kVec];
        unpack(x[r], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = lse[r] == -HUGE_VALF ? 0.0f : values[i] * factor;
        Vec8<T> y;
        pack(values, &y);
        T* row = out + p.out.at(at.batch, at.head, query) + col;
        if (kAligned)
          store_vec(row, y);
        else
          store_partial(row, y, left);
      }
    }
#pragma unroll
    for (int r = 0; r < Own::kAtOnce; ++r) {
      const int64_t query = query0 + r * Own::kApart;
      if (at.col == 0 && query < p.queries)
        p.total[at.line * p.queries + query] = SinkTotal(lse[r], sink).total;
    }
  }
}

template <typename T, int kLanes, bool kAligned>
__global__ void __launch_bounds__(kThreads) bwd_kernel(const AttentionSink p) {
  using Own = Share<T, kLanes>;
  __shared__ float sums[Own::kApart];
  const Place<kLanes> at(p);
  if (at.line >= p.batch * p.heads) return;
  const T* dout = reinterpret_cast<const T*>(p.in.data) + at.col;
  const T* out = reinterpret_cast<const T*>(p.out.data) + at.col;
  const float sink = p.sink[at.head];
  float sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < Own::kRows; first += Own::kAtOnce) {
    const int64_t query0 = at.query + first * Own::kApart;
    float dots[Own::kAtOnce] = {};
    for (int64_t col = 0; col < p.cols; col += kLanes * kVec) {
      Vec8<T> x[Own::kAtOnce], y[Own::kAtOnce];
#pragma unroll
      for (int r = 0; r < Own::kAtOnce; ++r) {
        const int64_t query = query0 + r * Own::kApart;
        const int64_t left = query < p.queries ? p.cols - at.col - col : 0;
        x[r] = load<kAligned>(dout + p.in.at(at.batch, at.head, query) + col, left);
        y[r] = load<kAligned>(out + p.out.at(at.batch, at.head, query) + col, left);
      }
#pragma unroll
      for (int r = 0; r < Own::kAtOnce; ++r) {
        float a[kVec], b[kVec];
        unpack(x[r], a);
        unpack(y[r], b);
#pragma unroll
        for (int i = 0; i < kVec; ++i) dots[r] += a[i] * b[i];
      }
    }
#pragma unroll
    for (int r = 0; r < Own::kAtOnce; ++r) {
      const int64_t query = query0 + r * Own::kApart;
#pragma unroll
      for (int lane = kLanes / 2; lane > 0; lane /= 2)
        dots[r] += __shfl_xor_sync(0xFFFFFFFFu, dots[r], lane);
      if (query < p.queries) sum += sink_weight(sink, p.lse[at.line * p.queries + query]) * dots[r];
    }
  }
  if (at.col == 0) sums[threadIdx.x / kLanes] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < Own::kApart; ++i) total += sums[i];
  p.workspace[at.line * p.tiles() + blockIdx.x] = total;
}

// The sum of a head's tiles, of a block.
__global__ void __launch_bounds__(kSumThreads) sum_kernel(const AttentionSink p) {
  __shared__ float sums[kSumThreads];
  const int64_t tiles = p.tiles();
  float sum = 0.0f;
  for (int64_t batch = 0; batch < p.batch; ++batch)
    for (int64_t tile = threadIdx.x; tile < tiles; tile += kSumThreads)
      sum += p.workspace[(batch * p.heads + blockIdx.x) * tiles + tile];
  sums[threadIdx.x] = sum;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) p.dsink[blockIdx.x] = 0.0f - sums[0];
}

bool has_aligned_rows(const HeadRows& rows) {
  bool aligned = is_aligned(rows.data, 16);
  for (int64_t stride : rows.strides) aligned = aligned && stride % kVec == 0;
  return aligned;
}

template <typename T, int kLanes, bool kAligned>
void launch_rows(const AttentionSink& p, cudaStream_t stream) {
  const auto kernel = p.total ? fwd_kernel<T, kLanes, kAligned> : bwd_kernel<T, kLanes, kAligned>;
  kernel<<<grid_of(p.batch * p.heads, p.tiles(), "attention_sink"), kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "attention_sink");
}

template <typename T>
void launch(const AttentionSink& p, cudaStream_t stream) {
  if (p.cols % kVec != 0 || !has_aligned_rows(p.in) || !has_aligned_rows(p.out))
    return launch_rows<T, 32, false>(p, stream);
  if (p.cols <= 8 * kVec) return launch_rows<T, 8, true>(p, stream);
  if (p.cols <= 16 * kVec) return launch_rows<T, 16, true>(p, stream);
  launch_rows<T, 32, true>(p, stream);
}

void run(const AttentionSink& p, cudaStream_t stream) {
  if (p.batch == 0 || p.heads == 0 || p.queries == 0) return;
  with_dtype(p.dtype, [&](auto zero) { launch<decltype(zero)>(p, stream); });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(attention_sink_fwd) {
  using namespace apex_te;
  const AttentionSink p = check_attention_sink_fwd(args);
  const DeviceGuard guard(args.device_id());
  run(p, static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(attention_sink_bwd) {
  using namespace apex_te;
  const AttentionSink p = check_attention_sink_bwd(args);
  if (p.heads == 0) return;
  if (p.heads > 0x7FFFFFFF) fail(kApexTeUnsupported, "attention_sink_bwd: too many heads");
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  run(p, stream);
  sum_kernel<<<static_cast<unsigned>(p.heads), kSumThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "attention_sink_bwd");
}
