// Loops of CPU quantizers with one scale for the tensor: amax, and tiles to both layouts.
#pragma once

#include "common/cpu/blocks.h"
#include "common/cpu/parallel.h"
#include "common/numerics/fp8_formats.h"
#include "common/numerics/quantize.h"
#include "common/numerics/with_dtype.h"

namespace apex_te {

// Tiles of a matrix: threads share them out. Of each, kQuantizePartRows rows of codes lie in the L1
// cache at a time. Measured for bf16, both layouts, one thread of a Xeon: 256 x 128 with plain
// stores 2.7 GB/s, rows prefetched 6.3, lines streamed too 9.7, 128 x 256 at a time 14.5.
constexpr int64_t kQuantizeTileRows = 256;
constexpr int64_t kQuantizeTileCols = 256;
constexpr int64_t kQuantizePartRows = 128;
constexpr int64_t kQuantizeRowsAhead = 8;    // whose elements are prefetched
constexpr int64_t kQuantizeRange = 1 << 14;  // elements of a thread's turn where rows are ignored
constexpr int64_t kEncodedAtOnce = 1024;     // elements that encode_row is called with, at most

// encode_row(x, n, codes) writes the codes of n elements and returns the bits of their largest
// magnitude, as the functions here do.

// Elements that lie one after the other.
template <typename T, typename EncodeRow>
APEX_TE_INLINE uint32_t quantize_range(const T* x, int64_t n, uint8_t* codes, bool streamed,
                                       const EncodeRow& encode_row) {
  alignas(kLineBytes) uint8_t buffer[kEncodedAtOnce];
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; i += kEncodedAtOnce) {
    const int64_t count = std::min(kEncodedAtOnce, n - i);
    amax = std::max(amax, encode_row(x + i, count, streamed ? buffer : codes + i));
    if (streamed) stream_bytes(codes + i, buffer, count);
  }
  if (streamed) finish_stream();
  return amax;
}

// encode_row in a format that is chosen at run time: the loops around it are made once for all.
template <typename T>
struct FP8RowEncoder {
  uint32_t (*encode)(const T* x, int64_t n, float scale, uint8_t* codes);
  float scale;
  uint32_t operator()(const T* x, int64_t n, uint8_t* codes) const {
    return encode(x, n, scale, codes);
  }
};
template <typename T>
FP8RowEncoder<T> fp8_row_encoder(DType fp8, float scale) {
  FP8RowEncoder<T> encoder{nullptr, scale};
  with_fp8_format(fp8, [&](auto format) {
    encoder.encode = [](const T* x, int64_t n, float by, uint8_t* codes) {
      return encode_row<decltype(format)>(x, n, by, codes);
    };
  });
  return encoder;
}

// Codes of a part of a tile.
struct QuantizeScratch {
  alignas(kLineBytes) uint8_t codes[kQuantizePartRows * kQuantizeTileCols];
};

// One tile of a matrix to the outputs that are not null. ld: row length of columnwise.
template <typename T, typename EncodeRow>
APEX_TE_INLINE uint32_t quantize_tile(const T* x, int64_t rows, int64_t cols, int64_t row0,
                                      int64_t col0, uint8_t* rowwise, uint8_t* columnwise,
                                      int64_t ld, bool streamed, const EncodeRow& encode_row) {
  uint8_t* const codes = thread_scratch<QuantizeScratch>().codes;
  const int64_t end = std::min(rows, row0 + kQuantizeTileRows);
  const int64_t tile_cols = std::min(kQuantizeTileCols, cols - col0);
  uint32_t amax = 0;
  for (int64_t part = row0; part < end; part += kQuantizePartRows) {
    const int64_t part_rows = std::min(kQuantizePartRows, end - part);
    for (int64_t r = 0; r < part_rows; ++r) {
      const int64_t at = (part + r) * cols + col0;
      uint8_t* row_codes = codes + r * kQuantizeTileCols;
      if (part + r + kQuantizeRowsAhead < rows)
        prefetch_row(x + at + kQuantizeRowsAhead * cols, tile_cols);
      amax = std::max(amax, encode_row(x + at, tile_cols, row_codes));
      if (rowwise && streamed)
        stream_bytes(rowwise + at, row_codes, tile_cols);
      else if (rowwise)
        std::copy_n(row_codes, tile_cols, rowwise + at);
    }
    if (columnwise)
      transpose_bytes(codes, kQuantizeTileCols, part_rows, tile_cols, columnwise + col0 * ld + part,
                      ld, streamed);
  }
  if (columnwise && end == rows) zero_padding(columnwise + col0 * ld, tile_cols, rows, ld);
  if (streamed) finish_stream();
  return amax;
}

// All tiles of x; calls finish(row0, col0) for each while it is in the cache.
template <typename T, typename EncodeRow, typename Finish>
uint32_t quantize_tiles(const Quantize& q, const EncodeRow& encode_row, const Finish& finish) {
  const T* x = q.x.data<const T>();
  const bool streamed = q.rows * q.cols >= kStreamedBytes;
  std::atomic<uint32_t> amax{0};
  const int64_t row_tiles = (q.rows + kQuantizeTileRows - 1) / kQuantizeTileRows;
  const int64_t col_tiles = (q.cols + kQuantizeTileCols - 1) / kQuantizeTileCols;
  parallel_for(row_tiles * col_tiles, [&](int64_t i) {
    const int64_t row0 = i / col_tiles * kQuantizeTileRows;
    const int64_t col0 = i % col_tiles * kQuantizeTileCols;
    fold_amax(amax, quantize_tile(x, q.rows, q.cols, row0, col0, q.rowwise, q.columnwise, q.ld,
                                  streamed, encode_row));
    finish(row0, col0);
  });
  return amax.load();
}

// All of x to the outputs that are not null, of which there is one.
template <typename T, typename EncodeRow>
uint32_t quantize_all(const Quantize& q, const EncodeRow& encode_row) {
  if (q.columnwise) return quantize_tiles<T>(q, encode_row, [](int64_t, int64_t) {});
  const T* x = q.x.data<const T>();
  const int64_t numel = q.rows * q.cols;
  std::atomic<uint32_t> amax{0};
  parallel_for((numel + kQuantizeRange - 1) / kQuantizeRange, [&](int64_t i) {
    const int64_t begin = i * kQuantizeRange, count = std::min(kQuantizeRange, numel - begin);
    fold_amax(amax, quantize_range(x + begin, count, q.rowwise + begin, numel >= kStreamedBytes,
                                   encode_row));
  });
  return amax.load();
}

// amax_of_row of many elements: in the compiler's own vector type, because it would widen
// magnitudes of 16 bits, and from both halves at once, because a core reads two streams faster than
// one.
template <typename T>
APEX_TE_INLINE uint32_t amax_of_range(const T* x, int64_t n) {
  using Raw = RawMagnitude<T>;
  using Type = typename Raw::Type;
  typedef Type Vector __attribute__((vector_size(32)));
  constexpr int64_t kWidth = sizeof(Vector) / sizeof(Type);
  constexpr int kVectors = 4;  // of each half
  Vector largest[2 * kVectors] = {};
  const int64_t half = n / 2 / (kVectors * kWidth) * (kVectors * kWidth);
  for (int64_t i = 0; i < half; i += kVectors * kWidth)
    for (int k = 0; k < 2 * kVectors; ++k) {
      Vector v;
      memcpy(&v, x + (k < kVectors ? i : half + i) + k % kVectors * kWidth, sizeof(v));
      v &= std::numeric_limits<Type>::max();
      largest[k] = v > largest[k] ? v : largest[k];
    }
  Type lanes[2 * kVectors * kWidth], amax = 0;
  memcpy(lanes, largest, sizeof(lanes));
  for (Type lane : lanes) amax = std::max(amax, lane);
  for (int64_t i = 2 * half; i < n; ++i) amax = std::max(amax, Raw::of(x[i]));
  return Raw::bits(amax);
}
template <typename T>
APEX_TE_TARGET_AVX2 inline uint32_t amax_of_chunk_avx2(const T* x, int64_t n) {
  return amax_of_range(x, n);
}
template <typename T>
inline uint32_t amax_of_chunk(const T* x, int64_t n) {
  return amax_of_range(x, n);
}

// Bits of the largest magnitude of x, NaN above infinity.
template <typename T>
uint32_t amax_of_tensor(const TensorView& x) {
  constexpr int64_t kChunk = 1 << 16;
  const T* data = x.data<const T>();
  const int64_t numel = x.numel();
  const auto chunk_amax = use_avx2() ? amax_of_chunk_avx2<T> : amax_of_chunk<T>;
  std::atomic<uint32_t> amax{0};
  parallel_for((numel + kChunk - 1) / kChunk, [&](int64_t i) {
    fold_amax(amax, chunk_amax(data + i * kChunk, std::min(kChunk, numel - i * kChunk)));
  });
  return amax.load();
}
inline uint32_t amax_of_tensor(const TensorView& x) {
  return with_dtype(x.dtype(), [&](auto zero) { return amax_of_tensor<decltype(zero)>(x); });
}

}  // namespace apex_te
