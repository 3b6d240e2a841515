// CPU kernels of transducer_joint: a frame of a sample for each task, in backward also a place.
#include <algorithm>

#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"
#include "transducer_joint/transducer_joint.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kCols = 256, kVec = 8;  // columns at a time

struct Rows {
  float f[kCols], g[kCols], sum[kCols];
  double total[kCols];
};

// n elements from `col` on of a row: f + g, ReLU and dropout, and their bytes of the mask.
void make_row(const TransducerJoint& p, const RowDType& dtype, int64_t row, int64_t col, int64_t n,
              Rows& own) {
  uint8_t* mask = p.mask ? p.mask + row * p.cols + col : nullptr;
  for (int64_t begin = 0; begin < n; begin += kVec) {
    const uint32_t keep = p.dropout.is_random
                              ? keep_bits(p.seed(), row, (col + begin) / kVec, p.dropout.threshold)
                              : 0xFFu;
    for (int64_t i = begin; i < std::min(n, begin + kVec); ++i) {
      const float sum = own.f[i] + own.g[i];
      const bool above = !p.relu || !(sum <= 0.0f), kept = keep >> (i - begin) & 1;
      own.sum[i] = (above ? sum : 0.0f) * (kept ? p.dropout.scale : 0.0f);
      if (mask) mask[i] = above && kept && p.dropout.scale != 0.0f;
    }
  }
  dtype.narrow(own.sum, n, p.out, row * p.cols + col);
}

void fwd_frame(const TransducerJoint& p, const RowDType& dtype, int64_t b, int64_t t) {
  const TransducerCells& cells = p.cells;
  const bool exists = t < cells.frames_of(b);
  const int64_t places = exists ? cells.places_of(b) : 0,
                end = cells.offset ? places : cells.places;
  Rows& own = thread_scratch<Rows>();
  for (int64_t col = 0; col < p.cols; col += kCols) {
    const int64_t n = std::min(kCols, p.cols - col);
    dtype.widen(p.f, (b * cells.frames + t) * p.cols + col, n, own.f);
    for (int64_t u = 0; u < end; ++u) {
      const int64_t row = cells.first(b) + t * cells.pitch(b) + u;
      if (u < places) {
        dtype.widen(p.g, (b * cells.places + u) * p.cols + col, n, own.g);
        make_row(p, dtype, row, col, n, own);
        continue;
      }
      std::fill_n(own.sum, n, kTransducerFiller);
      dtype.narrow(own.sum, n, p.out, row * p.cols + col);
      if (p.mask) std::fill_n(p.mask + row * p.cols + col, n, uint8_t{0});
    }
  }
}

// Adds n elements of a row's gradient to the total.
void add_row(const TransducerJoint& p, const RowDType& dtype, int64_t row, int64_t col, int64_t n,
             Rows& own) {
  dtype.widen(p.grad, row * p.cols + col, n, own.f);
  const uint8_t* kept = p.kept ? p.kept + row * p.cols + col : nullptr;
  for (int64_t i = 0; i < n; ++i) own.total[i] += !kept || kept[i] ? own.f[i] * p.scale : 0.0f;
}

// The gradient of frame or place `at` of a sample: a sum over the places or the frames.
void bwd_line(const TransducerJoint& p, const RowDType& dtype, int64_t b, int64_t at,
              bool is_frame) {
  const TransducerCells& cells = p.cells;
  const int64_t frames = cells.frames_of(b), places = cells.places_of(b);
  const bool exists = at < (is_frame ? frames : places);
  const int64_t count = !exists ? 0 : is_frame ? places : frames;
  Rows& own = thread_scratch<Rows>();
  for (int64_t col = 0; col < p.cols; col += kCols) {
    const int64_t n = std::min(kCols, p.cols - col);
    std::fill_n(own.total, n, 0.0);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = is_frame ? at : i, u = is_frame ? i : at;
      add_row(p, dtype, cells.first(b) + t * cells.pitch(b) + u, col, n, own);
    }
    for (int64_t i = 0; i < n; ++i) own.sum[i] = static_cast<float>(own.total[i]);
    if (is_frame)
      dtype.narrow(own.sum, n, p.df, (b * cells.frames + at) * p.cols + col);
    else
      dtype.narrow(own.sum, n, p.dg, (b * cells.places + at) * p.cols + col);
  }
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(transducer_joint_fwd) {
  using namespace apex_te;
  const TransducerJoint p = check_transducer_joint_fwd(args);
  check_lengths(args.name(), p.cells, 0, "g_len");
  const RowDType dtype(p.dtype);
  parallel_for(p.cells.batch * p.cells.frames, [&](int64_t task) {
    fwd_frame(p, dtype, task / p.cells.frames, task % p.cells.frames);
  });
}

APEX_TE_DEFINE(transducer_joint_bwd) {
  using namespace apex_te;
  const TransducerJoint p = check_transducer_joint_bwd(args);
  check_lengths(args.name(), p.cells, 0, "g_len");
  const RowDType dtype(p.dtype);
  const int64_t lines = p.cells.frames + p.cells.places;
  parallel_for(p.cells.batch * lines, [&](int64_t task) {
    const int64_t at = task % lines;
    const bool is_frame = at < p.cells.frames;
    bwd_line(p, dtype, task / lines, is_frame ? at : at - p.cells.frames, is_frame);
  });
}
