// Cuts a list into work of CPU threads: chunks, and blocks of float values of any dtype.
#pragma once

#include <algorithm>
#include <vector>

#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "multi_tensor/multi_tensor.h"

namespace apex_te {

constexpr int64_t kRun = 512;   // values that a loop has in cache at a time
constexpr int64_t kLanes = 64;  // independent partial sums of a reduction

// Calls run(row, chunk, begin, n) for each chunk of each row, from any thread. A row without
// elements has one empty chunk. Returns each row's first chunk and, last, their number.
template <typename Run>
std::vector<int64_t> for_chunks(const Rows& rows, int64_t chunk, const Run& run) {
  std::vector<int64_t> first(rows.size() + 1, 0);
  // A thread takes a run of chunks with about a chunk's elements: small tensors go together.
  std::vector<int64_t> tasks;
  int64_t gathered = chunk;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t chunks = chunks_of(rows[i].numel, chunk);
    for (int64_t c = 0; c < chunks; ++c) {
      if (gathered >= chunk) {
        tasks.push_back(first[i] + c);
        gathered = 0;
      }
      gathered += std::min(chunk, rows[i].numel - c * chunk);
    }
    first[i + 1] = first[i] + chunks;
  }
  tasks.push_back(first.back());
  parallel_for(static_cast<int64_t>(tasks.size()) - 1, [&](int64_t task) {
    int64_t c = tasks[task];
    size_t row = std::upper_bound(first.begin(), first.end(), c) - first.begin() - 1;
    for (; c < tasks[task + 1]; ++c) {
      if (c == first[row + 1]) ++row;
      const int64_t begin = (c - first[row]) * chunk;
      run(row, c, begin, std::min(chunk, rows[row].numel - begin));
    }
  });
  return first;
}

// Op::chunk compiled for each instruction set; both give the same bits.
template <typename Op>
APEX_TE_TARGET_PORTABLE typename Op::Result chunk_portable(const Op& op, const Row& row,
                                                           int64_t begin, int64_t n) {
  return op.chunk(row, begin, n);
}
template <typename Op>
APEX_TE_TARGET_AVX2 typename Op::Result chunk_avx2(const Op& op, const Row& row, int64_t begin,
                                                   int64_t n) {
  return op.chunk(row, begin, n);
}
template <typename Op>
auto chunk_function() {
  return use_avx2() ? chunk_avx2<Op> : chunk_portable<Op>;
}

// n values from `begin` on as floats: where they lie, or widened into `buffer`.
APEX_TE_INLINE const float* read_values(const void* data, DType dtype, int64_t begin, int64_t n,
                                        float* buffer) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data) + begin;
  RowDType(dtype).widen(data, begin, n, buffer);
  return buffer;
}

// Destination of results: in place, or `buffer`, from which finish_values rounds them.
APEX_TE_INLINE float* result_values(void* data, DType dtype, int64_t begin, float* buffer) {
  return dtype == DType::kFloat32 ? static_cast<float*>(data) + begin : buffer;
}
APEX_TE_INLINE void finish_values(void* data, DType dtype, int64_t begin, int64_t n,
                                  const float* values) {
  if (dtype != DType::kFloat32 || values != static_cast<float*>(data) + begin)
    RowDType(dtype).narrow(values, n, data, begin);
}

// The compiler's own vector types: sums in an array of floats would stay in memory, and words of
// two bfloat16 need no widening.
typedef float FloatVector __attribute__((vector_size(32)));
typedef uint32_t WordVector __attribute__((vector_size(32)));
constexpr int64_t kPair = 2 * sizeof(FloatVector) / sizeof(float);  // elements of two vectors
APEX_TE_INLINE void load_pair(const float* values, FloatVector* v) {
  memcpy(v, values, sizeof(*v));  // one by one: larger copies pass through memory
  memcpy(v + 1, values + kPair / 2, sizeof(*v));
}
APEX_TE_INLINE void load_pair(const BFloat16* values, FloatVector* v) {
  WordVector words;
  memcpy(&words, values, sizeof(words));
  v[0] = reinterpret_cast<FloatVector>(words << 16);
  v[1] = reinterpret_cast<FloatVector>(words & 0xFFFF0000u);
}

// Adds squares to kLanes sums, in an order that n alone decides.
template <typename T>
APEX_TE_INLINE void add_squares(const T* values, int64_t n, float* lanes) {
  FloatVector sums[2 * kLanes / kPair];
  memcpy(sums, lanes, sizeof(sums));
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t k = 0; k < kLanes / kPair; ++k) {
      FloatVector v[2];
      load_pair(values + i + k * kPair, v);
      sums[2 * k] += v[0] * v[0];
      sums[2 * k + 1] += v[1] * v[1];
    }
  memcpy(lanes, sums, sizeof(sums));
  for (int64_t k = 0; i + k < n; ++k) {
    const float value = to_float(values[i + k]);
    lanes[k] += value * value;
  }
}
APEX_TE_INLINE float sum_lanes(const float* lanes) {
  constexpr int64_t kSums = 8;
  double sums[kSums] = {};
  for (int64_t i = 0; i < kLanes; i += kSums)
    for (int64_t k = 0; k < kSums; ++k) sums[k] += static_cast<double>(lanes[i + k]);
  for (int64_t width = kSums / 2; width; width /= 2)
    for (int64_t k = 0; k < width; ++k) sums[k] += sums[k + width];
  return static_cast<float>(sums[0]);
}

}  // namespace apex_te
