// CPU kernels of attention_sink: a tile of queries of one head for each task.
#include <algorithm>
#include <cmath>

#include "attention_sink/attention_sink.h"
#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kChunk = 256;
constexpr int64_t kLanes = 8;

// Calls body(batch, head, tile) for all tiles.
template <typename P, typename Body>
void for_tiles(const P& p, const Body& body) {
  const int64_t tiles = p.tiles();
  parallel_for(p.batch * p.heads * tiles, [&](int64_t task) {
    body(task / tiles / p.heads, task / tiles % p.heads, task % tiles);
  });
}

float dot(const RowDType& dtype, const void* a, int64_t a_at, const void* b, int64_t b_at,
          int64_t cols) {
  float x[kChunk], y[kChunk], lanes[kLanes] = {};
  for (int64_t begin = 0; begin < cols; begin += kChunk) {
    const int64_t n = std::min(kChunk, cols - begin);
    dtype.widen(a, a_at + begin, n, x);
    dtype.widen(b, b_at + begin, n, y);
    for (int64_t i = 0; i < n; ++i) lanes[i % kLanes] += x[i] * y[i];
  }
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  return sum;
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(attention_sink_fwd) {
  using namespace apex_te;
  const AttentionSink p = check_attention_sink_fwd(args);
  const RowDType dtype(p.dtype);
  for_tiles(p, [&](int64_t batch, int64_t head, int64_t tile) {
    const float sink = p.sink ? p.sink[head] : 0.0f;
    const int64_t end = std::min(p.queries, (tile + 1) * kAttentionSinkTile);
    float values[kChunk];
    for (int64_t query = tile * kAttentionSinkTile; query < end; ++query) {
      const int64_t row = (batch * p.heads + head) * p.queries + query;
      const float lse = p.lse[row];
      const SinkTotal made(lse, sink);
      const bool sees = lse != -HUGE_VALF;
      for (int64_t begin = 0; begin < p.cols; begin += kChunk) {
        const int64_t n = std::min(kChunk, p.cols - begin);
        dtype.widen(p.in.data, p.in.at(batch, head, query) + begin, n, values);
        for (int64_t i = 0; i < n; ++i) values[i] = sees ? values[i] * made.factor : 0.0f;
        dtype.narrow(values, n, p.out.data, p.out.at(batch, head, query) + begin);
      }
      p.total[row] = made.total;
    }
  });
}

APEX_TE_DEFINE(attention_sink_bwd) {
  using namespace apex_te;
  const AttentionSink p = check_attention_sink_bwd(args);
  const RowDType dtype(p.dtype);
  const int64_t tiles = p.tiles();
  for_tiles(p, [&](int64_t batch, int64_t head, int64_t tile) {
    const int64_t end = std::min(p.queries, (tile + 1) * kAttentionSinkTile);
    const int64_t row = (batch * p.heads + head) * p.queries;
    float sum = 0.0f;
    for (int64_t query = tile * kAttentionSinkTile; query < end; ++query) {
      const float weight = sink_weight(p.sink[head], p.lse[row + query]);
      sum += weight * dot(dtype, p.in.data, p.in.at(batch, head, query), p.out.data,
                          p.out.at(batch, head, query), p.cols);
    }
    p.workspace[(batch * p.heads + head) * tiles + tile] = sum;
  });
  for (int64_t head = 0; head < p.heads; ++head) {
    float sum = 0.0f;
    for (int64_t batch = 0; batch < p.batch; ++batch)
      for (int64_t tile = 0; tile < tiles; ++tile)
        sum += p.workspace[(batch * p.heads + head) * tiles + tile];
    p.dsink[head] = 0.0f - sum;
  }
}

APEX_TE_DEFINE(attention_join) {
  using namespace apex_te;
  const AttentionJoin p = check_attention_join(args);
  const RowDType dtype(p.dtype);
  for_tiles(p, [&](int64_t batch, int64_t head, int64_t tile) {
    const int64_t line = batch * p.heads + head;
    const int64_t end = std::min(p.queries, (tile + 1) * kAttentionSinkTile);
    for (int64_t query = tile * kAttentionSinkTile; query < end; ++query) {
      float lse[kJoinedParts] = {-HUGE_VALF, -HUGE_VALF, -HUGE_VALF};
      for (int i = 0; i < p.count; ++i) lse[i] = p.parts[i].lse_of(line, query);
      JoinTotal made;
      made.of(lse);
      for (int64_t begin = 0; begin < p.cols; begin += kChunk) {
        const int64_t n = std::min(kChunk, p.cols - begin);
        float sum[kChunk] = {}, values[kChunk];
        for (int i = 0; i < p.count; ++i) {
          if (lse[i] == -HUGE_VALF) continue;
          const AttentionPart& part = p.parts[i];
          dtype.widen(part.rows.data, part.rows.at(batch, head, query - part.first) + begin, n,
                      values);
          for (int64_t j = 0; j < n; ++j) sum[j] += values[j] * made.factors[i];
        }
        dtype.narrow(sum, n, p.out.data, p.out.at(batch, head, query) + begin);
      }
      p.total[line * p.queries + query] = made.total;
    }
  });
}
