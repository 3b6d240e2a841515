// Rows of bytes copied whole: from tokens to their experts, and between orders of chunks.
//
// A warp takes one piece of one row: kWords words of each lane, all loaded before the first is
// stored.
#pragma once

#include "common/gpu/dependent_launch.h"
#include "moe_permute/moe_permute.h"
#include "moe_permute/moe_shift_cuda.h"

namespace apex_te {
namespace {

constexpr int kRowWarps = 8;
constexpr int kRowThreads = 32 * kRowWarps;
constexpr int kWords = 4;
constexpr int kPermuteBlocks = 4;  // of a multiprocessor, at least
constexpr int kShiftBlocks = 3;    // where rows are no multiples of 16 bytes
constexpr int64_t kZeroBlocks = 128;

// A warp's piece of one row, by words of 16 bytes.
template <bool kAligned>
struct Piece;

template <>
struct Piece<true> {
  static constexpr int kBytes = 32 * 16 * kWords;
  int64_t first, row_bytes;
  uint4 word[kWords];
  __device__ Piece(int64_t index, int64_t bytes)
      : first(index * kBytes + threadIdx.x % 32 * 16), row_bytes(bytes) {}
  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = make_uint4(0u, 0u, 0u, 0u);
  }
  __device__ __forceinline__ void load(const char* row) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (first + 512 * i < row_bytes)
        word[i] = *reinterpret_cast<const uint4*>(row + first + 512 * i);
  }
  __device__ __forceinline__ void store(char* row) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (first + 512 * i < row_bytes) *reinterpret_cast<uint4*>(row + first + 512 * i) = word[i];
  }
};

// A piece's words depend on its destination, so a piece is read when it is stored, from the
// caches after the first time.
template <>
struct Piece<false> {
  static constexpr int kBytes = 32 * 16 * kWords - 16;  // whose words are one more at most
  int64_t first;
  int bytes;
  const char* from;
  __device__ Piece(int64_t index, int64_t row_bytes)
      : first(index * kBytes),
        bytes(static_cast<int>(max(int64_t{0}, min(row_bytes - first, int64_t{kBytes})))),
        from(nullptr) {}
  __device__ __forceinline__ void zero() { from = nullptr; }
  __device__ __forceinline__ void load(const char* row) { from = row + first; }
  __device__ __forceinline__ void store(char* row) const {
    char* to = row + first;
    const int before = misalignment(to);
    to -= before;
    const char* begin = from - before;  // of what goes to the first word
    const int shift = misalignment(begin);
    const char *words = begin - shift, *end = from + bytes;
    uint4 low[kWords], high[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const char* word = words + 16 * (threadIdx.x % 32 + 32 * i);
      low[i] = high[i] = make_uint4(0u, 0u, 0u, 0u);
      if (from && word + 16 > from && word < end) low[i] = *reinterpret_cast<const uint4*>(word);
      if (from && shift && word + 16 < end) high[i] = *reinterpret_cast<const uint4*>(word + 16);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int at = 16 * (threadIdx.x % 32 + 32 * i);
      store_range(to + at, shifted(low[i], high[i], shift), max(0, before - at),
                  min(16, before + bytes - at));
    }
  }
};

__device__ __forceinline__ void copy_prob(const Probs& p, int64_t to, int64_t from) {
  if (p.bytes == 4)
    static_cast<uint32_t*>(p.to)[to] = static_cast<const uint32_t*>(p.from)[from];
  else
    static_cast<uint16_t*>(p.to)[to] = static_cast<const uint16_t*>(p.from)[from];
}
__device__ __forceinline__ void zero_prob(const Probs& p, int64_t to) {
  if (p.bytes == 4)
    static_cast<uint32_t*>(p.to)[to] = 0;
  else
    static_cast<uint16_t*>(p.to)[to] = 0;
}

// Calls zero_row(row) for this warp's share of the rows that no copy takes: an expert's padding and
// what lies behind the last expert. Warps are numbered [0, warps).
template <typename ZeroRow>
__device__ __forceinline__ void for_each_unused_row(const RowMap& map, int64_t rows, int64_t warp,
                                                    int64_t warps, const ZeroRow& zero_row) {
  const int lane = threadIdx.x % 32, experts = min(map.width, *map.starts());
  int64_t next = warp;  // of the rows that are left, counted from the hole's first
  for (int base = 0; base < experts; base += 32) {
    int32_t begin = 0, length = 0;
    if (base + lane < experts) {
      const int32_t used = map.in_use()[1 + base + lane];
      begin = map.starts()[1 + base + lane] + used;
      length = map.in_use()[1 + map.width + base + lane] - used;
      // the map may be one of more rows
      length =
          begin < 0 || begin >= rows ? 0 : static_cast<int32_t>(min(int64_t(length), rows - begin));
    }
    for (int i = 0; i < 32; ++i) {
      const int64_t first = __shfl_sync(0xFFFFFFFFu, begin, i);
      const int64_t count = __shfl_sync(0xFFFFFFFFu, length, i);
      for (; next < count; next += warps) zero_row(first + next);
      next -= count;
    }
  }
  for (int64_t row = max(0, *map.in_use()) + next; row < rows; row += warps) zero_row(row);
}

// A token's entry of the map, read at once by the warp that takes the token.
struct Head {
  const int32_t* entry;
  int32_t word;
  int width;
  __device__ __forceinline__ Head(const RowMap& map, int64_t token)
      : entry(map.of(token < map.tokens ? token : 0)), width(map.width) {
    const int lane = threadIdx.x % 32;
    word = token < map.tokens && lane <= 2 * width ? entry[lane] : 0;
  }
  // By all lanes.
  __device__ __forceinline__ int32_t at(int i) const {
    return i < 32 ? __shfl_sync(0xFFFFFFFFu, word, i) : entry[i];
  }
  __device__ __forceinline__ int copies() const { return max(0, min(width, at(0))); }
  __device__ __forceinline__ int32_t row(int k) const { return at(1 + 2 * k); }
  __device__ __forceinline__ int32_t column(int k) const { return at(2 + 2 * k); }
};

// Division of rows among a block's warps: `across` of them side by side in a row, so that whole
// rows are read and written at about the same time, and `down` rows at once. `groups` blocks stand
// side by side in a longer row.
struct Layout {
  int across, down, groups;
  __host__ __device__ int threads() const { return 32 * across * down; }
};
inline Layout layout_of(int64_t pieces) {
  const int64_t groups = (pieces + kRowWarps - 1) / kRowWarps;
  if (groups > 0x7FFFFFFF) fail(kApexTeUnsupported, "moe_permute: rows are too long");
  const int across = static_cast<int>((pieces + groups - 1) / groups);
  return {across, kRowWarps / across, static_cast<int>(groups)};
}

template <bool kAligned>
__global__ void __launch_bounds__(kRowThreads, kAligned ? kPermuteBlocks : kShiftBlocks)
    moe_permute_kernel(const RowCopy p, const RowMap map, int64_t token_blocks,
                       const Layout layout) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned groups = layout.groups,
                 index = blockIdx.x % groups * layout.across + warp % layout.across;
  const int64_t block = blockIdx.x / groups;
  const int row_of_block = warp / layout.across;
  char* out = static_cast<char*>(p.out);
  Piece<kAligned> piece(index, p.row_bytes);
  if (block >= token_blocks) {
    wait_for_previous_kernel();
    piece.zero();
    for_each_unused_row(map, p.out_rows, (block - token_blocks) * layout.down + row_of_block,
                        kZeroBlocks * layout.down, [&](int64_t row) {
                          piece.store(out + row * p.row_bytes);
                          if (p.probs.to && index == 0 && lane == 0) zero_prob(p.probs, row);
                        });
    return;
  }
  const char* inp = static_cast<const char*>(p.inp);
  const int64_t token = block * layout.down + row_of_block;
  if (token >= map.tokens) return;
  piece.load(inp + token * p.row_bytes);
  wait_for_previous_kernel();
  const Head head(map, token);
  const int n = head.copies();
  for (int k = 0; k < n; ++k) {
    const int32_t row = head.row(k);
    if (row >= 0 && row < p.out_rows) piece.store(out + row * p.row_bytes);
  }
  if (!p.probs.to || index != 0) return;
  for (int k = lane; k < n; k += 32) {
    const int32_t row = head.entry[1 + 2 * k], column = head.entry[2 + 2 * k];
    if (row >= 0 && row < p.out_rows && column >= 0 && column < map.width)
      copy_prob(p.probs, row, token * map.width + column);
  }
}

// A warp takes a token, and in the last kZeroBlocks blocks rows without one.
__global__ void __launch_bounds__(kRowThreads)
    moe_tokens_of_rows_kernel(const TokensOfRows p, int64_t token_blocks) {
  const int lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
  if (blockIdx.x >= token_blocks) {
    for_each_unused_row(p.map, p.rows, warp - token_blocks * kRowWarps, kZeroBlocks * kRowWarps,
                        [&](int64_t row) {
                          if (lane != 0) return;
                          p.out[row] = -1;
                          if (p.probs.to) zero_prob(p.probs, row);
                        });
    return;
  }
  if (warp >= p.map.tokens) return;
  const Head head(p.map, warp);
  const int n = head.copies();
  for (int k = lane; k < n; k += 32) {
    const int32_t row = head.entry[1 + 2 * k];
    if (row < 0 || row >= p.rows) continue;
    p.out[row] = static_cast<int32_t>(warp);
    if (p.probs.to) copy_prob(p.probs, row, warp * p.map.width + head.entry[2 + 2 * k]);
  }
}

// Output row r is input row sources[r], or zeros.
template <bool kAligned>
__global__ void __launch_bounds__(kRowThreads, kAligned ? 6 : kShiftBlocks)
    moe_sort_chunks_kernel(const RowCopy p, const int32_t* sources) {
  const int64_t row = block_row() * kRowWarps + threadIdx.x / 32;
  if (row >= p.out_rows) return;
  const int32_t source = sources[row];
  const bool is_used = source >= 0 && source < p.inp_rows;
  Piece<kAligned> piece(blockIdx.x, p.row_bytes);
  piece.zero();
  if (is_used) piece.load(static_cast<const char*>(p.inp) + source * p.row_bytes);
  if (p.probs.to && blockIdx.x == 0 && threadIdx.x % 32 == 0) {
    if (is_used)
      copy_prob(p.probs, row, source);
    else
      zero_prob(p.probs, row);
  }
  piece.store(static_cast<char*>(p.out) + row * p.row_bytes);
}

// Calls launch(is_aligned, pieces): whether rows consist of whole words, and the pieces of one.
template <typename Launch>
void with_pieces(const RowCopy& p, const Launch& launch) {
  const auto pieces = [&](int64_t bytes) {
    const int64_t count = (p.row_bytes + bytes - 1) / bytes;
    return count ? count : 1;  // probs are to be copied even where rows are empty
  };
  if (p.row_bytes % 16 == 0 && is_aligned(p.inp, 16) && is_aligned(p.out, 16))
    launch(std::true_type{}, pieces(Piece<true>::kBytes));
  else
    launch(std::false_type{}, pieces(Piece<false>::kBytes));
}

inline void launch_sort_chunks(const SortChunks& p, const char* name, cudaStream_t stream) {
  if (!p.rows.out_rows) return;
  with_pieces(p.rows, [&](auto is_aligned_row, int64_t pieces) {
    const dim3 grid = grid_of((p.rows.out_rows + kRowWarps - 1) / kRowWarps, pieces, name);
    moe_sort_chunks_kernel<decltype(is_aligned_row)::value>
        <<<grid, kRowThreads, 0, stream>>>(p.rows, p.sources);
    check_cuda(cudaGetLastError(), name);
  });
}

// With is_dependent the kernel before it in the stream is the one that makes the map.
inline void launch_permute(const RowCopy& p, const RowMap& map, bool is_dependent,
                           cudaStream_t stream) {
  with_pieces(p, [&](auto is_aligned_row, int64_t count) {
    const auto kernel = moe_permute_kernel<decltype(is_aligned_row)::value>;
    const Layout layout = layout_of(count);
    const int64_t token_blocks = (map.tokens + layout.down - 1) / layout.down;
    const int64_t blocks = (token_blocks + kZeroBlocks) * layout.groups;
    if (blocks > 0x7FFFFFFF)
      fail(kApexTeUnsupported, "moe_permute: the matrix is too large for one launch");
    const int threads = layout.threads();
    if (is_dependent)
      return launch_dependent(kernel, blocks, threads, stream, p, map, token_blocks, layout);
    kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(p, map, token_blocks, layout);
    check_cuda(cudaGetLastError(), "moe_permute");
  });
}

}  // namespace
}  // namespace apex_te
