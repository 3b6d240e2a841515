// CUDA kernels of attention_sink's sinks.
#include "attention_sink/attention_sink_device.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kSumThreads = 128;

template <typename T, int kLanes, bool kAligned>
__global__ void __launch_bounds__(kThreads) fwd_kernel(const AttentionSink p) {
  using Own = Share<T, kLanes>;
  const Place<kLanes> at(p);
  if (at.is_outside(p)) return;
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
  if (at.is_outside(p)) return;
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

void run(const AttentionSink& p, cudaStream_t stream) {
  if (p.batch == 0 || p.heads == 0 || p.queries == 0) return;
  const bool aligned = has_aligned_rows(p.in) && has_aligned_rows(p.out);
  with_dtype(p.dtype, [&](auto zero) {
    with_rows(p.cols, aligned, [&](auto lanes, auto is_aligned) {
      constexpr int kLanes = decltype(lanes)::value;
      constexpr bool kAligned = decltype(is_aligned)::value;
      using T = decltype(zero);
      const auto kernel =
          p.total ? fwd_kernel<T, kLanes, kAligned> : bwd_kernel<T, kLanes, kAligned>;
      kernel<<<Place<kLanes>::grid(p), kThreads, 0, stream>>>(p);
    });
  });
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
