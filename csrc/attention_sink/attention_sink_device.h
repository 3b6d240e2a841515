// Places of threads in rows of attention, and launches over them.
//
// Some lanes of a warp have a query's row, 8 elements each; a block has 64 queries of one head. All
// loads of a thread come first: fewer threads a block have more of them in flight.
#pragma once

#include "attention_sink/attention_sink.h"
#include "common/gpu/vec.h"
#include "common/numerics/with_dtype.h"

namespace apex_te {
namespace {

constexpr int kThreads = 128;
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

  template <typename P>
  __device__ explicit Place(const P& p)
      : line(block_row()),
        batch(line / p.heads),
        head(line - batch * p.heads),
        query(int64_t{blockIdx.x} * kTile + threadIdx.x / kLanes),
        col(threadIdx.x % kLanes * kVec) {}

  template <typename P>
  __device__ bool is_outside(const P& p) const {
    return line >= p.batch * p.heads;
  }

  template <typename P>
  static dim3 grid(const P& p) {
    return grid_of(p.batch * p.heads, p.tiles(), "attention_sink");
  }
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

inline bool has_aligned_rows(const HeadRows& rows) {
  bool aligned = is_aligned(rows.data, 16);
  for (int64_t stride : rows.strides) aligned = aligned && stride % kVec == 0;
  return aligned;
}

// Calls launch_rows(lanes of a row, whether its vectors are aligned).
template <typename Launch>
void with_rows(int64_t cols, bool aligned, const Launch& launch_rows) {
  if (cols % kVec != 0 || !aligned)
    launch_rows(std::integral_constant<int, 32>{}, std::false_type{});
  else if (cols <= 8 * kVec)
    launch_rows(std::integral_constant<int, 8>{}, std::true_type{});
  else if (cols <= 16 * kVec)
    launch_rows(std::integral_constant<int, 16>{}, std::true_type{});
  else
    launch_rows(std::integral_constant<int, 32>{}, std::true_type{});
  check_cuda(cudaGetLastError(), "attention_sink");
}

}  // namespace
}  // namespace apex_te
