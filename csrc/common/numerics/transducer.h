// Cells of a transducer: each sample has one for each pair of a frame t and a place u among its
// labels. A tensor has a row for each cell, of all B x T x U, or packed, of those that count.
#pragma once

#include "common/abi/op.h"
#include "common/numerics/codec.h"

namespace apex_te {

struct TransducerCells {
  int64_t batch, frames, places;  // the extents B, T, U
  int64_t rows;                   // of the tensor
  int64_t more;                   // places of a sample beside its length
  const int32_t *f_len, *g_len;
  const int64_t* offset;  // packed: the rows up to the end of each sample

  APEX_TE_HD static int64_t within(int64_t n, int64_t most) {
    return n < 0 ? 0 : n < most ? n : most;
  }
  APEX_TE_HD int64_t frames_of(int64_t b) const { return within(f_len[b], frames); }
  APEX_TE_HD int64_t places_of(int64_t b) const { return within(g_len[b] + more, places); }
  APEX_TE_HD int64_t first(int64_t b) const {
    return !offset ? b * frames * places : b == 0 ? 0 : offset[b - 1];
  }
  APEX_TE_HD int64_t pitch(int64_t b) const { return offset ? places_of(b) : places; }
  // The cell of a row.
  struct Cell {
    int64_t b, t, u;
    bool counts;
  };
  APEX_TE_HD Cell cell_of(int64_t row) const {
    int64_t b = 0, end = batch;
    if (!offset) {
      b = row / (frames * places);
    } else {
      while (b < end) {  // the first sample that ends behind the row
        const int64_t middle = (b + end) / 2;
        (offset[middle] > row ? end : b) = offset[middle] > row ? middle : middle + 1;
      }
      if (b == batch) return {0, 0, 0, false};
    }
    const int64_t width = pitch(b), at = row - first(b);
    if (width == 0 || at < 0) return {0, 0, 0, false};
    const int64_t t = at / width, u = at - t * width;
    return {b, t, u, t < frames_of(b) && u < places_of(b)};
  }
  APEX_TE_HD bool has_row(int64_t row) const { return row >= 0 && row < rows; }
};

// Lengths and offsets of a batch; `rows` and the extents are those of other tensors.
inline TransducerCells check_cells(const TensorView& f_len, const TensorView& g_len,
                                   const TensorView& offset, TransducerCells cells) {
  f_len.has_dtype({DType::kInt32}).has_shape({cells.batch}).is_dense();
  g_len.has_dtype({DType::kInt32}).has_shape({cells.batch}).is_dense();
  if (offset) offset.has_dtype({DType::kInt64}).has_shape({cells.batch}).is_dense();
  cells.f_len = f_len.data<int32_t>();
  cells.g_len = g_len.data<int32_t>();
  cells.offset = offset.data<int64_t>();
  return cells;
}

// On the CPU the values are known: `names` are those of the two lengths.
inline void check_lengths(const char* name, const TransducerCells& cells, int64_t least,
                          const char* g_name) {
  int64_t end = 0;
  for (int64_t b = 0; b < cells.batch; ++b) {
    if (cells.f_len[b] < least || cells.f_len[b] > cells.frames)
      fail(kApexTeValueError, "%s: f_len[%lld] must be from %lld to %lld, got %d", name,
           static_cast<long long>(b), static_cast<long long>(least),
           static_cast<long long>(cells.frames), cells.f_len[b]);
    if (cells.g_len[b] < 0 || cells.g_len[b] + cells.more > cells.places)
      fail(kApexTeValueError, "%s: %s[%lld] must be from 0 to %lld, got %d", name, g_name,
           static_cast<long long>(b), static_cast<long long>(cells.places - cells.more),
           cells.g_len[b]);
    end += cells.f_len[b] * (cells.g_len[b] + cells.more);
    if (cells.offset && cells.offset[b] != end)
      fail(kApexTeValueError,
           "%s: batch_offset[%lld] must be %lld, the sum of the samples' cells, "
           "got %lld",
           name, static_cast<long long>(b), static_cast<long long>(end),
           static_cast<long long>(cells.offset[b]));
  }
  if (cells.offset && end > cells.rows)
    fail(kApexTeValueError, "%s: batch_offset must end at most at the %lld packed rows, got %lld",
         name, static_cast<long long>(cells.rows), static_cast<long long>(end));
}

}  // namespace apex_te
