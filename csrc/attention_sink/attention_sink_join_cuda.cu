// CUDA kernel of attention_join.
#include "attention_sink/attention_sink_device.h"

namespace apex_te {
namespace {

template <typename T, int kLanes, bool kAligned, int kParts>
__global__ void __launch_bounds__(kThreads) join_kernel(const AttentionJoin p) {
  using Own = Share<T, kLanes>;
  const Place<kLanes> at(p);
  if (at.is_outside(p)) return;
  T* out = reinterpret_cast<T*>(p.out.data) + at.col;
  constexpr int kAtOnce = kParts > 2 && Own::kAtOnce > 2 ? 2 : Own::kAtOnce;
#pragma unroll 1
  for (int first = 0; first < Own::kRows; first += kAtOnce) {
    const int64_t query0 = at.query + first * Own::kApart;
    float lse[kAtOnce][kParts];
    JoinTotal made[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int64_t query = query0 + r * Own::kApart;
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        lse[r][i] = query < p.queries ? p.parts[i].lse_of(at.line, query) : -HUGE_VALF;
      made[r].of(lse[r]);
      if (at.col == 0 && query < p.queries) p.total[at.line * p.queries + query] = made[r].total;
    }
    for (int64_t col = 0; col < p.cols; col += kLanes * kVec) {
      const int64_t left = p.cols - at.col - col;
      Vec8<T> x[kAtOnce][kParts];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int64_t query = query0 + r * Own::kApart;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const AttentionPart& part = p.parts[i];
          const T* in = reinterpret_cast<const T*>(part.rows.data) + at.col + col;
          x[r][i] = load<kAligned>(in + part.rows.at(at.batch, at.head, query - part.first),
                                   lse[r][i] == -HUGE_VALF ? 0 : left);
        }
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int64_t query = query0 + r * Own::kApart;
        if (query >= p.queries || left <= 0) break;
        float sum[kVec] = {};
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          float values[kVec];
          unpack(x[r][i], values);
#pragma unroll
          for (int j = 0; j < kVec; ++j) sum[j] += values[j] * made[r].factors[i];
        }
        Vec8<T> y;
        pack(sum, &y);
        T* row = out + p.out.at(at.batch, at.head, query) + col;
        if (kAligned)
          store_vec(row, y);
        else
          store_partial(row, y, left);
      }
    }
  }
}

void run(const AttentionJoin& p, cudaStream_t stream) {
  if (p.batch == 0 || p.heads == 0 || p.queries == 0) return;
  bool aligned = has_aligned_rows(p.out);
  for (int i = 0; i < p.count; ++i) aligned = aligned && has_aligned_rows(p.parts[i].rows);
  with_dtype(p.dtype, [&](auto zero) {
    with_rows(p.cols, aligned, [&](auto lanes, auto is_aligned) {
      constexpr int kLanes = decltype(lanes)::value;
      constexpr bool kAligned = decltype(is_aligned)::value;
      using T = decltype(zero);
      const auto kernel =
          p.count == 2 ? join_kernel<T, kLanes, kAligned, 2> : join_kernel<T, kLanes, kAligned, 3>;
      kernel<<<Place<kLanes>::grid(p), kThreads, 0, stream>>>(p);
    });
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(attention_join) {
  using namespace apex_te;
  const AttentionJoin p = check_attention_join(args);
  const DeviceGuard guard(args.device_id());
  run(p, static_cast<cudaStream_t>(args.stream()));
}
