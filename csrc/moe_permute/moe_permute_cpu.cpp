// CPU kernels of moe_permute: the map by counting tiles of tokens, copies and sums token by token.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "common/cpu/parallel.h"
#include "common/cpu/scratch.h"
#include "common/cpu/vec.h"
#include "moe_permute/moe_permute.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kChunkBytes = 1 << 16;  // that a thread takes at a time
constexpr int64_t kCols = 1024;           // summed at a time

// Rows [begin, end) to whichever thread is free, about kChunkBytes of them at once.
template <typename Body>
void for_rows(int64_t rows, int64_t row_bytes, const Body& body) {
  const int64_t each = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, row_bytes));
  parallel_for((rows + each - 1) / each,
               [&](int64_t i) { body(i * each, std::min(rows, (i + 1) * each)); });
}

// The highest bit of each of 8 bytes of a mask that is not zero, the first byte lowest.
uint64_t marks_of(const Routing& p, int64_t at) {
  constexpr uint64_t kLow = 0x7F7F7F7F7F7F7F7Full;
  uint64_t bytes = 0;
  for (int i = 0; i < 8; ++i)
    bytes |= static_cast<uint64_t>(static_cast<const uint8_t*>(p.routes)[at + i]) << 8 * i;
  return (((bytes & kLow) + kLow) | bytes) & ~kLow;
}

// Calls place(token, slot, column, expert) for each copy of tokens [first, last) in their order,
// drop(token, slot, index) for an index that is no expert and finish(token, n) for each token.
template <typename Place, typename Drop, typename Finish>
void walk(const Routing& p, int64_t first, int64_t last, const Place& place, const Drop& drop,
          const Finish& finish) {
  const int width = p.map.width;
  for (int64_t token = first; token < last; ++token) {
    int n = 0;
    for (int i = 0; i < width; ++i) {
      const int64_t at = token * width + i;
      if (p.is_index()) {
        const int32_t expert = p.index(at);
        if (expert >= 0 && expert < p.num_experts)
          place(token, n++, i, expert);
        else
          drop(token, n++, expert);
      } else if (p.bytes == 1 && i + 8 <= width) {
        for (uint64_t marks = marks_of(p, at); marks; marks &= marks - 1) {
          const int expert = i + __builtin_ctzll(marks) / 8;
          place(token, n++, expert, expert);
        }
        i += 7;
      } else if (p.routed(at)) {
        place(token, n++, i, i);
      }
    }
    finish(token, n);
  }
}

void check_indices(const Routing& p) {
  if (!p.is_index()) return;
  for (int64_t i = 0; i < p.map.tokens * p.map.width; ++i)
    if (p.index(i) >= p.num_experts)
      fail(kApexTeValueError, "moe_permute: routing_map must hold experts below %d, got %d",
           p.num_experts, p.index(i));
}

void make_map(const Routing& p) {
  check_indices(p);
  const int experts = p.num_experts, width = p.map.width;
  const auto tile_of = [&](int64_t tile) { return p.counts + tile * experts; };
  const auto end_of = [&](int64_t tile) { return std::min(p.map.tokens, (tile + 1) * p.tile); };
  const auto nothing = [](auto...) {};
  const auto for_tiles = [&](const auto& body) {  // few tokens are not worth a second thread
    for_rows(p.tiles, p.tile * width, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) body(tile);
    });
  };
  for_tiles([&](int64_t tile) {
    int32_t* counts = tile_of(tile);
    std::fill_n(counts, experts, 0);
    walk(
        p, tile * p.tile, end_of(tile), [&](int64_t, int, int, int e) { ++counts[e]; }, nothing,
        nothing);
  });
  // Each tile's counts become the rows of its first copies.
  const auto fit = [&](int64_t rows) { return static_cast<int32_t>(std::min(rows, p.num_rows)); };
  int64_t start = 0, used = 0;
  for (int e = 0; e < experts; ++e) {
    int64_t row = start;
    for (int64_t tile = 0; tile < p.tiles; ++tile) {
      const int32_t count = tile_of(tile)[e];
      tile_of(tile)[e] = static_cast<int32_t>(row);
      row += count;
    }
    const int64_t end = start + (row - start + p.align - 1) / p.align * p.align;
    if (p.tokens_per_expert) p.tokens_per_expert[e] = fit(row) - fit(start);
    if (!p.is_index()) {
      p.map.in_use()[1 + e] = fit(row) - fit(start);
      p.map.in_use()[1 + width + e] = fit(end) - fit(start);
      p.map.starts()[1 + e] = fit(start);
      p.map.starts()[1 + width + e] = static_cast<int32_t>(start - used);
    }
    used += row - start;
    start = end;
  }
  *p.map.in_use() = fit(start);
  *p.map.starts() = p.is_index() ? 0 : experts;
  for_tiles([&](int64_t tile) {
    int32_t* next = tile_of(tile);
    walk(
        p, tile * p.tile, end_of(tile),
        [&](int64_t token, int slot, int column, int e) {
          p.map.put(token, slot, p.place(next[e]++), column);
        },
        [&](int64_t token, int slot, int32_t) { p.map.put(token, slot, kDropped, slot); },
        [&](int64_t token, int n) { *p.map.of(token) = n; });
  });
}

// A token's copies that there are: each(row, column). A map of another matrix is refused.
template <typename Each>
void for_copies(const RowMap& map, int64_t token, int64_t rows, const Each& each) {
  const int32_t* entry = map.of(token);
  const int n = std::max(0, std::min<int>(map.width, entry[0]));
  for (int k = 0; k < n; ++k) {
    const int32_t row = entry[1 + 2 * k], column = entry[2 + 2 * k];
    if (row >= 0 && row < rows && column >= 0 && column < map.width) each(row, column);
  }
}

// row_id_map must hold rows of the matrix: the GPU, which is not waited for, gives NaN.
void check_rows_exist(const RowMap& map, int64_t rows) {
  for (int64_t token = 0; token < map.tokens; ++token) {
    const int32_t* entry = map.of(token);
    const int n = std::max(0, std::min<int>(map.width, entry[0]));
    for (int k = 0; k < n; ++k) {
      const int32_t row = entry[1 + 2 * k];
      if (row != kDropped && (row < 0 || row >= rows))
        fail(kApexTeValueError,
             "moe_unpermute: inp must have a row for each of row_id_map, got %lld rows for row %d",
             static_cast<long long>(rows), row);
    }
  }
}

// Calls each(begin, end) for the runs of rows that no copy takes; the map may be one of more rows.
template <typename Each>
void for_unused(const RowMap& map, int64_t rows, const Each& each) {
  const int experts = std::min<int>(map.width, *map.starts());
  const auto within = [&](int64_t begin, int64_t end) {
    if (begin >= 0 && begin < std::min(end, rows)) each(begin, std::min(end, rows));
  };
  for (int e = 0; e < experts; ++e) {
    const int64_t start = map.starts()[1 + e];
    within(start + map.in_use()[1 + e], start + map.in_use()[1 + map.width + e]);
  }
  within(*map.in_use(), rows);
}

void zero_unused(const RowMap& map, int64_t rows, int64_t row_bytes, uint8_t* out,
                 const Probs& probs) {
  for_unused(map, rows, [&](int64_t begin, int64_t end) {
    for_rows(end - begin, row_bytes, [&](int64_t first, int64_t last) {
      if (row_bytes) memset(out + (begin + first) * row_bytes, 0, (last - first) * row_bytes);
      if (probs.to)
        memset(static_cast<uint8_t*>(probs.to) + (begin + first) * probs.bytes, 0,
               (last - first) * probs.bytes);
    });
  });
}

void copy_prob(const Probs& p, int64_t to, int64_t from) {
  memcpy(static_cast<uint8_t*>(p.to) + to * p.bytes,
         static_cast<const uint8_t*>(p.from) + from * p.bytes, p.bytes);
}

// Not past the caches, where the pages of a new matrix still are.
void copy_row(const RowCopy& p, int64_t to, int64_t from) {
  uint8_t* out = static_cast<uint8_t*>(p.out) + to * p.row_bytes;
  const uint8_t* inp = static_cast<const uint8_t*>(p.inp) + from * p.row_bytes;
  if (p.row_bytes) memcpy(out, inp, p.row_bytes);
}

void permute(const RowCopy& p, const RowMap& map) {
  for_rows(map.tokens, p.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      for_copies(map, token, p.out_rows, [&](int64_t row, int64_t column) {
        copy_row(p, row, token);
        if (p.probs.to) copy_prob(p.probs, row, token * map.width + column);
      });
  });
  zero_unused(map, p.out_rows, p.row_bytes, static_cast<uint8_t*>(p.out), p.probs);
}

void find_tokens(const TokensOfRows& p) {
  zero_unused(p.map, p.rows, 0, nullptr, p.probs);
  for_unused(p.map, p.rows,
             [&](int64_t begin, int64_t end) { std::fill(p.out + begin, p.out + end, -1); });
  for_rows(p.map.tokens, p.map.stride * sizeof(int32_t), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      for_copies(p.map, token, p.rows, [&](int64_t row, int64_t column) {
        p.out[row] = static_cast<int32_t>(token);
        if (p.probs.to) copy_prob(p.probs, row, token * p.map.width + column);
      });
  });
}

// sums += factor * x.
template <typename T>
APEX_TE_INLINE void add_scaled(const T* x, int64_t n, float factor, float* __restrict__ sums) {
  float values[kCols];
  widen(x, n, values);
  for (int64_t i = 0; i < n; ++i) sums[i] += factor * values[i];
}
template <typename T>
APEX_TE_TARGET_PORTABLE void add_scaled_portable(const T* x, int64_t n, float factor, float* sums) {
  add_scaled(x, n, factor, sums);
}
template <typename T>
APEX_TE_TARGET_AVX2 void add_scaled_avx2(const T* x, int64_t n, float factor, float* sums) {
  add_scaled(x, n, factor, sums);
}

// y = factor * grad; returns the sum of grad * x.
template <typename T>
APEX_TE_INLINE float scale_and_dot(const float* __restrict__ grad, const T* x, int64_t n,
                                   float factor, T* y) {
  float values[kCols];
  widen(x, n, values);
  for (int64_t i = 0; i < n; ++i) values[i] *= grad[i];
  const float sum = sum_of(values, n);
  for (int64_t i = 0; i < n; ++i) values[i] = grad[i] * factor;
  narrow(values, n, y);
  return sum;
}
template <typename T>
APEX_TE_TARGET_PORTABLE float scale_and_dot_portable(const float* grad, const T* x, int64_t n,
                                                     float factor, T* y) {
  return scale_and_dot(grad, x, n, factor, y);
}
template <typename T>
APEX_TE_TARGET_AVX2 float scale_and_dot_avx2(const float* grad, const T* x, int64_t n, float factor,
                                             T* y) {
  return scale_and_dot(grad, x, n, factor, y);
}

template <typename T>
float prob_of(const Unpermute& p, int64_t i) {
  if (!p.probs) return 1.0f;
  return p.has_float_probs ? static_cast<const float*>(p.probs)[i]
                           : to_float(static_cast<const T*>(p.probs)[i]);
}

void zero_prob_row(const Unpermute& p, int64_t token) {
  memset(static_cast<uint8_t*>(p.grad_probs.to) + token * p.map.width * p.grad_probs.bytes, 0,
         p.map.width * p.grad_probs.bytes);
}

template <typename T>
void unpermute_fwd(const Unpermute& p) {
  check_rows_exist(p.map, p.num_rows);
  const auto add = use_avx2() ? add_scaled_avx2<T> : add_scaled_portable<T>;
  const T* inp = static_cast<const T*>(p.inp);
  for_rows(p.map.tokens, p.cols * sizeof(T), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t col = 0; col < p.cols; col += kCols) {
        const int64_t n = std::min(kCols, p.cols - col);
        float sums[kCols] = {};
        for_copies(p.map, token, p.num_rows, [&](int64_t row, int64_t column) {
          add(inp + row * p.cols + col, n, prob_of<T>(p, token * p.map.width + column), sums);
        });
        narrow(sums, n, static_cast<T*>(p.out) + token * p.cols + col);
      }
      if (!p.grad_probs.to) continue;
      zero_prob_row(p, token);
      for_copies(p.map, token, p.num_rows, [&](int64_t row, int64_t column) {
        copy_prob(p.grad_probs, token * p.map.width + column, row);
      });
    }
  });
}

template <typename T>
void unpermute_bwd(const Unpermute& p) {
  check_rows_exist(p.map, p.num_rows);
  const auto scale = use_avx2() ? scale_and_dot_avx2<T> : scale_and_dot_portable<T>;
  const T* inp = static_cast<const T*>(p.inp);
  const T* grad_output = static_cast<const T*>(p.grad_output);
  T* grad_inp = static_cast<T*>(p.out);
  for_rows(p.map.tokens, p.cols * sizeof(T), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      zero_prob_row(p, token);
      for_copies(p.map, token, p.num_rows, [&](int64_t row, int64_t column) {
        const int64_t prob = token * p.map.width + column;
        const float factor = prob_of<T>(p, prob);
        float dot = 0.0f;
        for (int64_t col = 0; col < p.cols; col += kCols) {
          const int64_t n = std::min(kCols, p.cols - col);
          float grad[kCols];
          widen(grad_output + token * p.cols + col, n, grad);
          dot += scale(grad, inp + row * p.cols + col, n, factor, grad_inp + row * p.cols + col);
        }
        if (p.has_float_probs)
          static_cast<float*>(p.grad_probs.to)[prob] = dot;
        else
          static_cast<T*>(p.grad_probs.to)[prob] = from_float<T>(dot);
      });
    }
  });
  zero_unused(p.map, p.num_rows, p.cols * sizeof(T), static_cast<uint8_t*>(p.out), Probs{});
}

int64_t element(const void* values, bool is_long, int64_t i) {
  return is_long ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
}

void make_chunk_map(const ChunkMap& p) {
  const auto starts = make_scratch<int64_t>(kMaxChunks);
  int64_t rows = 0;
  bool is_placed[kMaxChunks] = {};
  for (int i = 0; i < p.num_chunks; ++i) {
    const int64_t size = element(p.split_sizes, p.has_long_sizes, i);
    if (size < 0 || size > p.rows - rows)
      fail(kApexTeValueError,
           "moe_sort_chunks: split_sizes must be counts of the %lld rows of inp, got %lld at %d",
           static_cast<long long>(p.rows), static_cast<long long>(size), i);
    starts[i] = rows;
    rows += size;
  }
  int32_t *sources = p.map, *targets = p.map + p.rows;
  int64_t out = 0;
  for (int i = 0; i < p.num_chunks; ++i) {
    const int64_t chunk = element(p.sorted_index, p.has_long_index, i);
    if (chunk < 0 || chunk >= p.num_chunks || is_placed[chunk])
      fail(kApexTeValueError,
           "moe_sort_chunks: sorted_index must hold each chunk once, got %lld at %d",
           static_cast<long long>(chunk), i);
    is_placed[chunk] = true;
    const int64_t size = element(p.split_sizes, p.has_long_sizes, chunk);
    for (int64_t r = 0; r < size; ++r, ++out) {
      sources[out] = static_cast<int32_t>(starts[chunk] + r);
      targets[starts[chunk] + r] = static_cast<int32_t>(out);
    }
  }
  std::fill(sources + out, sources + p.rows, -1);
  std::fill(targets + out, targets + p.rows, -1);
}

void sort_chunks(const SortChunks& p) {
  const RowCopy& rows = p.rows;
  for_rows(rows.out_rows, rows.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t source = p.sources[row];
      if (source >= 0 && source < rows.inp_rows) {
        copy_row(rows, row, source);
        if (rows.probs.to) copy_prob(rows.probs, row, source);
        continue;
      }
      if (rows.row_bytes)
        memset(static_cast<uint8_t*>(rows.out) + row * rows.row_bytes, 0, rows.row_bytes);
      if (rows.probs.to)
        memset(static_cast<uint8_t*>(rows.probs.to) + row * rows.probs.bytes, 0, rows.probs.bytes);
    }
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(moe_permute_map) { apex_te::make_map(apex_te::check_moe_permute_map(args)); }

APEX_TE_DEFINE(moe_permute_fwd) {
  using namespace apex_te;
  Routing routing;
  const Permute p = check_moe_permute_fwd(args, &routing);
  make_map(routing);
  permute(p.rows, p.map);
}

APEX_TE_DEFINE(moe_permute_rows) {
  using namespace apex_te;
  const Permute p = check_moe_permute_rows(args);
  permute(p.rows, p.map);
}

APEX_TE_DEFINE(moe_tokens_of_rows) {
  apex_te::find_tokens(apex_te::check_moe_tokens_of_rows(args));
}

APEX_TE_DEFINE(moe_unpermute_fwd) {
  using namespace apex_te;
  const Unpermute p = check_moe_unpermute_fwd(args);
  with_dtype(p.dtype, [&](auto zero) { unpermute_fwd<decltype(zero)>(p); });
}

APEX_TE_DEFINE(moe_unpermute_bwd) {
  using namespace apex_te;
  const Unpermute p = check_moe_unpermute_bwd(args);
  with_dtype(p.dtype, [&](auto zero) { unpermute_bwd<decltype(zero)>(p); });
}

APEX_TE_DEFINE(moe_sort_chunks_map) {
  apex_te::make_chunk_map(apex_te::check_moe_sort_chunks_map(args));
}

APEX_TE_DEFINE(moe_sort_chunks) { apex_te::sort_chunks(apex_te::check_moe_sort_chunks(args)); }

APEX_TE_DEFINE(moe_gather_rows) { apex_te::sort_chunks(apex_te::check_moe_gather_rows(args)); }
