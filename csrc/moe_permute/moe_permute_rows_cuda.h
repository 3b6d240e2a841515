// Rows of bytes copied whole: from tokens to their experts, and between orders of chunks.
//
// A warp takes one piece of one row: kWords words of each lane, all loaded before the first is
// stored. Words are of 16 bytes, or smaller where rows or addresses are not multiples of that.
#pragma once

#include "common/dependent_launch.h"
#include "moe_permute/moe_permute.h"

namespace apex_te {
namespace {

constexpr int kRowWarps = 8;
constexpr int kRowThreads = 32 * kRowWarps;
constexpr int kWords = 4;
constexpr int kPieceWords = 32 * kWords;
constexpr int kPermuteBlocks = 4;  // of a multiprocessor, at least
constexpr int kMaxRun = 8;
constexpr int64_t kZeroBlocks = 128;

// A warp's words of one row.
template <typename Word>
struct Piece {
  int64_t first, words;  // of the row
  Word word[kWords];
  __device__ Piece(unsigned index, int64_t row_words)
      : first(static_cast<int64_t>(index) * kPieceWords + threadIdx.x % 32), words(row_words) {}
  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = Word{};
  }
  __device__ __forceinline__ void load(const Word* row) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (first + 32 * i < words) word[i] = row[first + 32 * i];
  }
  __device__ __forceinline__ void store(Word* row) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (first + 32 * i < words) row[first + 32 * i] = word[i];
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

// What the map has of a token, for the warp that takes it: read at once, so that it can be asked
// for before the token before is done.
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

// How a block's warps share rows: `across` of them side by side in a row, so that whole rows are
// read and written at about the same time, and `down` rows at once; `run` times, all but the first
// with the map already there. `groups` blocks stand side by side in a longer row.
struct Layout {
  int across, down, run, groups;
  __host__ __device__ int threads() const { return 32 * across * down; }
};
inline Layout layout_of(int64_t rows, int64_t pieces) {
  constexpr int64_t kWarps = 16384;  // that a GPU takes in a few waves
  const int64_t run = rows * pieces / kWarps, groups = (pieces + kRowWarps - 1) / kRowWarps;
  if (groups > 0x7FFFFFFF) fail(kApexTeUnsupported, "moe_permute: rows are too long");
  const int across = static_cast<int>((pieces + groups - 1) / groups);
  return {across, kRowWarps / across,
          run < 1         ? 1
          : run < kMaxRun ? static_cast<int>(run)
                          : kMaxRun,
          static_cast<int>(groups)};
}
inline int64_t row_blocks(int64_t rows, const Layout& layout) {
  const int64_t each = layout.down * layout.run;
  return (rows + each - 1) / each;
}

template <typename Word>
__global__ void __launch_bounds__(kRowThreads, kPermuteBlocks)
    moe_permute_kernel(const RowCopy p, const RowMap map, int64_t token_blocks,
                       const Layout layout) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row_words = p.row_bytes / sizeof(Word);
  const unsigned groups = layout.groups,
                 index = blockIdx.x % groups * layout.across + warp % layout.across;
  const int64_t block = blockIdx.x / groups;
  const int row_of_block = warp / layout.across;
  Word* out = static_cast<Word*>(p.out);
  Piece<Word> piece(index, row_words);
  if (block >= token_blocks) {
    wait_for_previous_kernel();
    piece.zero();
    for_each_unused_row(map, p.out_rows, (block - token_blocks) * layout.down + row_of_block,
                        kZeroBlocks * layout.down, [&](int64_t row) {
                          piece.store(out + row * row_words);
                          if (p.probs.to && index == 0 && lane == 0) zero_prob(p.probs, row);
                        });
    return;
  }
  const Word* inp = static_cast<const Word*>(p.inp);
  int64_t token = block * layout.down * layout.run + row_of_block;
  if (token < map.tokens) piece.load(inp + token * row_words);
  wait_for_previous_kernel();
  Head head(map, token);
  for (int i = 0; i < layout.run && token < map.tokens; ++i) {
    const Head ahead(map, i + 1 < layout.run ? token + layout.down : map.tokens);
    const int n = head.copies();
    for (int k = 0; k < n; ++k) {
      const int32_t row = head.row(k);
      if (row >= 0 && row < p.out_rows) piece.store(out + row * row_words);
    }
    if (p.probs.to && index == 0)
      for (int k = lane; k < n; k += 32) {
        const int32_t row = head.entry[1 + 2 * k], column = head.entry[2 + 2 * k];
        if (row >= 0 && row < p.out_rows && column >= 0 && column < map.width)
          copy_prob(p.probs, row, token * map.width + column);
      }
    token += layout.down;
    head = ahead;
    if (i + 1 < layout.run && token < map.tokens) piece.load(inp + token * row_words);
  }
}

// Output row r is input row sources[r], or zeros.
template <typename Word>
__global__ void __launch_bounds__(kRowThreads, 6)
    moe_sort_chunks_kernel(const RowCopy p, const int32_t* sources) {
  const int64_t row_words = p.row_bytes / sizeof(Word);
  const int64_t row = block_row() * kRowWarps + threadIdx.x / 32;
  if (row >= p.out_rows) return;
  const int32_t source = sources[row];
  const bool is_used = source >= 0 && source < p.inp_rows;
  Piece<Word> piece(blockIdx.x, row_words);
  piece.zero();
  if (is_used) piece.load(static_cast<const Word*>(p.inp) + source * row_words);
  if (p.probs.to && blockIdx.x == 0 && threadIdx.x % 32 == 0) {
    if (is_used)
      copy_prob(p.probs, row, source);
    else
      zero_prob(p.probs, row);
  }
  piece.store(static_cast<Word*>(p.out) + row * row_words);
}

// Calls launch(Word{}, pieces) with the widest word that rows and addresses are multiples of.
template <typename Launch>
void with_word(const RowCopy& p, const Launch& launch) {
  const auto fits = [&](int64_t bytes) {
    return p.row_bytes % bytes == 0 && is_aligned(p.inp, bytes) && is_aligned(p.out, bytes);
  };
  const auto pieces = [&](int64_t bytes) {
    const int64_t count = (p.row_bytes / bytes + kPieceWords - 1) / kPieceWords;
    return count ? count : 1;  // probs are to be copied even where rows are empty
  };
  if (fits(16))
    launch(uint4{}, pieces(16));
  else if (fits(4))
    launch(uint32_t{}, pieces(4));
  else if (fits(2))
    launch(uint16_t{}, pieces(2));
  else
    launch(uint8_t{}, pieces(1));
}

// With is_dependent the kernel before it in the stream is the one that makes the map.
inline void launch_permute(const RowCopy& p, const RowMap& map, bool is_dependent,
                           cudaStream_t stream) {
  with_word(p, [&](auto word, int64_t count) {
    const auto kernel = moe_permute_kernel<decltype(word)>;
    const Layout layout = layout_of(map.tokens, count);
    const int64_t token_blocks = row_blocks(map.tokens, layout);
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
