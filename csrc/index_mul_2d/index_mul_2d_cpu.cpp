// CPU kernels of index_mul_2d: a chunk of places for each task.
#include <algorithm>

#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"
#include "index_mul_2d/index_mul_2d.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kCols = 256;  // at a time

struct Rows {
  float a[kCols], b[kCols], c[kCols], part[kCols], sum[kCols];
};

void check_index(const char* name, const char* what, int64_t place, int64_t index, int64_t size) {
  if (index < 0 || index >= size)
    fail(kApexTeValueError, "%s: %s[%lld] must be in [0, %lld), got %lld", name, what,
         static_cast<long long>(place), static_cast<long long>(size),
         static_cast<long long>(index));
}

void fwd_row(const IndexMul& p, const RowDType& dtype, int64_t place) {
  Rows& own = thread_scratch<Rows>();
  const int64_t from = p.index[place] * p.cols, to = place * p.cols;
  for (int64_t col = 0; col < p.cols; col += kCols) {
    const int64_t n = std::min(kCols, p.cols - col);
    dtype.widen(p.in1, from + col, n, own.a);
    dtype.widen(p.in2, to + col, n, own.b);
    for (int64_t i = 0; i < n; ++i) own.a[i] *= own.b[i];
    if (p.more1) {
      dtype.widen(p.more1, from + col, n, own.b);
      dtype.widen(p.more2, to + col, n, own.c);
      for (int64_t i = 0; i < n; ++i) own.a[i] += own.b[i] * own.c[i];
    }
    dtype.narrow(own.a, n, p.out, to + col);
  }
}

// The places begin to end, all of one row of in1.
void bwd_row(const IndexMul& p, const RowDType& dtype, int64_t begin, int64_t end) {
  Rows& own = thread_scratch<Rows>();
  const int64_t row = p.keys[begin] * p.cols;
  for (int64_t col = 0; col < p.cols; col += kCols) {
    const int64_t n = std::min(kCols, p.cols - col);
    std::fill_n(own.sum, n, 0.0f);
    std::fill_n(own.part, n, 0.0f);
    for (int64_t k = begin; k < end; ++k) {
      const int64_t at = p.order[k] * p.cols + col;
      dtype.widen(p.dout, at, n, own.a);
      dtype.widen(p.in2, at, n, own.b);
      dtype.widen(p.in1, row + col, n, own.c);
      for (int64_t i = 0; i < n; ++i) {
        own.part[i] += own.a[i] * own.b[i];
        own.c[i] *= own.a[i];
      }
      dtype.narrow(own.c, n, p.din2, at);
      if (k + 1 < end && (k + 1) % kIndexMulChunk != 0) continue;
      for (int64_t i = 0; i < n; ++i) own.sum[i] += own.part[i];
      std::fill_n(own.part, n, 0.0f);
    }
    dtype.widen(p.din1, row + col, n, own.a);
    for (int64_t i = 0; i < n; ++i) own.a[i] += own.sum[i];
    dtype.narrow(own.a, n, p.din1, row + col);
  }
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(index_mul_2d_fwd) {
  using namespace apex_te;
  const IndexMul p = check_index_mul_2d_fwd(args);
  const RowDType dtype(p.dtype);
  for (int64_t place = 0; place < p.places; ++place)
    check_index(args.name(), "index", place, p.index[place], p.rows);
  parallel_for(p.chunks(), [&](int64_t chunk) {
    const int64_t end = std::min(p.places, (chunk + 1) * kIndexMulChunk);
    for (int64_t place = chunk * kIndexMulChunk; place < end; ++place) fwd_row(p, dtype, place);
  });
}

APEX_TE_DEFINE(index_mul_2d_bwd) {
  using namespace apex_te;
  const IndexMul p = check_index_mul_2d_bwd(args);
  const RowDType dtype(p.dtype);
  for (int64_t k = 0; k < p.places; ++k) {
    check_index(args.name(), "keys", k, p.keys[k], p.rows);
    check_index(args.name(), "order", k, p.order[k], p.places);
    if (k > 0 && p.keys[k] < p.keys[k - 1])
      fail(kApexTeValueError, "%s: keys must be sorted, got %d before %d", args.name(),
           p.keys[k - 1], p.keys[k]);
  }
  // A task has the rows whose first place is in its chunk.
  parallel_for(p.chunks(), [&](int64_t chunk) {
    const int64_t limit = std::min(p.places, (chunk + 1) * kIndexMulChunk);
    for (int64_t k = chunk * kIndexMulChunk; k < limit;) {
      const bool begins = k == 0 || p.keys[k] != p.keys[k - 1];
      int64_t end = k + 1;
      while (end < (begins ? p.places : limit) && p.keys[end] == p.keys[k]) ++end;
      if (begins) bwd_row(p, dtype, k, end);
      k = end;
    }
  });
}
