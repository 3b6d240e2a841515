// Sources of grouped_cast's elements (grouped_quantize/grouped_quantize_source_cuda.h), all with
// vector accesses, and the launch of a cast of one.
#pragma once

#include "common/activation/cuda.h"
#include "grouped_cast/grouped_cast.h"
#include "grouped_quantize/grouped_quantize_1x128_cuda.h"
#include "grouped_quantize/grouped_quantize_tile_cuda.h"

namespace apex_te {

void launch_gated(const GroupedCast& p, cudaStream_t stream);
void launch_gated_gradient(const GroupedCast& p, cudaStream_t stream);

namespace {

struct Gather : PlainSource {
  const int32_t* row_of;
  int64_t tokens;
  const float* factor;
  static constexpr bool kByColumns = true;
  template <typename Tile, bool kAligned, typename T>
  __device__ __forceinline__ void load(const T* x, int64_t begin, const typename Tile::Place& at,
                                       bool, Vec8<T>* in) const {
    constexpr uint32_t kNaNs = 0x7FFF7FFFu;  // in any dtype
    const int rows = at.rows_present();
    int32_t from[kVec];
#pragma unroll
    for (int r = 0; r < kVec; ++r) from[r] = r < rows ? row_of[begin + at.row + r] : -1;
#pragma unroll
    for (int r = 0; r < kVec; ++r) {
      if (from[r] >= 0 && from[r] < tokens) {
        in[r] = load_vec(x + from[r] * at.cols + at.col);
      } else {
#pragma unroll
        for (uint32_t& word : in[r].words) word = from[r] == -1 ? 0u : kNaNs;
      }
    }
    if (!factor) return;
#pragma unroll
    for (int r = 0; r < kVec; ++r) {
      if (from[r] == -1) continue;
      const float by = factor[begin + at.row + r];
      float values[kVec];
      unpack(in[r], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] *= by;
      pack(values, &in[r]);
    }
  }
};

// A thread's rows whose loads of a gated source are in flight at once.
constexpr int kGatedBatch = 4;

template <typename T>
__device__ __forceinline__ void load_batch(const T* x, int64_t ld, int rows, Vec8<T>* in) {
#pragma unroll
  for (int r = 0; r < kGatedBatch; ++r, x += ld) in[r] = r < rows ? load_vec(x) : Vec8<T>{};
}

template <Activation kAct>
struct Gated {
  const float* factor;
  static constexpr int kTileRows = 128, kParts = 1;
  static constexpr bool kByColumns = false;
  static constexpr int blocks(size_t) { return 3; }
  static constexpr int blocks_1x128(size_t) { return 3; }
  template <typename Tile, bool kAligned, typename T>
  __device__ __forceinline__ void load(const T* x, int64_t begin, const typename Tile::Place& at,
                                       bool, Vec8<T>* in) const {
    const int rows = at.rows_present();
    const T* gates = x + (begin + at.row) * 2 * at.cols + at.col;
#pragma unroll
    for (int r0 = 0; r0 < kVec; r0 += kGatedBatch, gates += kGatedBatch * 2 * at.cols) {
      Vec8<T> gate[kGatedBatch], up[kGatedBatch];
      load_batch(gates, 2 * at.cols, rows - r0, gate);
      load_batch(gates + at.cols, 2 * at.cols, rows - r0, up);
#pragma unroll
      for (int r = 0; r < kGatedBatch; ++r) {
        in[r0 + r] = Vec8<T>{};
        if (r0 + r >= rows) continue;
        float g[kVec], u[kVec];
        unpack(gate[r], g);
        unpack(up[r], u);
        const float by = factor ? factor[begin + at.row + r0 + r] : 1.0f;
#pragma unroll
        for (int i = 0; i < kVec; ++i) g[i] = gated<kAct, false>(g[i], u[i]) * by;
        pack(g, &in[r0 + r]);
      }
    }
  }
};

template <Activation kAct>
struct GatedGradient {
  const void* grad;
  const float* factor;
  float* partials;
  int64_t all_rows;
  static constexpr int kTileRows = 128, kParts = 2;
  static constexpr bool kByColumns = false;
  static constexpr int blocks(size_t) { return 2; }
  static constexpr int blocks_1x128(size_t) { return 2; }
  template <typename Tile, bool kAligned, typename T>
  __device__ __forceinline__ void load(const T* x, int64_t begin, const typename Tile::Place& at,
                                       bool, Vec8<T>* in) const {
    const int rows = at.rows_present();
    const T* gates = x + (begin + at.row) * 2 * at.cols + at.col;
    const T* grads = static_cast<const T*>(grad) + (begin + at.row) * at.cols + at.col;
#pragma unroll
    for (int r0 = 0; r0 < kVec; r0 += kGatedBatch) {
      Vec8<T> gate[kGatedBatch], up[kGatedBatch], dy[kGatedBatch];
      load_batch(gates, 2 * at.cols, rows - r0, gate);
      load_batch(gates + at.cols, 2 * at.cols, rows - r0, up);
      load_batch(grads, at.cols, rows - r0, dy);
      gates += kGatedBatch * 2 * at.cols;
      grads += kGatedBatch * at.cols;
      float dots[kGatedBatch] = {};
#pragma unroll
      for (int r = 0; r < kGatedBatch; ++r) {
        in[r0 + r] = in[kVec + r0 + r] = Vec8<T>{};
        if (r0 + r >= rows) continue;
        float g[kVec], u[kVec], d[kVec];
        unpack(gate[r], g);
        unpack(up[r], u);
        unpack(dy[r], d);
        const float by = factor ? factor[begin + at.row + r0 + r] : 1.0f;
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          float result;
          gated_gradient<kAct, false>(g[i], u[i], d[i] * by, &g[i], &u[i], &result);
          dots[r] += d[i] * result;
        }
        pack(g, &in[r0 + r]);
        pack(u, &in[kVec + r0 + r]);
      }
      if (partials) store_dots<Tile>(begin + at.row + r0, at.col0, rows - r0, dots);
    }
  }

 private:
  // Sums of a batch of rows over a tile's columns, in an order that is always the same.
  template <typename Tile>
  __device__ __forceinline__ void store_dots(int64_t row, int64_t col0, int rows,
                                             const float* dots) const {
    float* out = partials + col0 / kBlock * all_rows + row;
#pragma unroll
    for (int r = 0; r < kGatedBatch; ++r) {
      float sum = dots[r];
#pragma unroll
      for (int lanes = Tile::kLanes / 2; lanes; lanes /= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
      if (threadIdx.x % Tile::kLanes == 0 && r < rows) out[r] = sum;
    }
  }
};

template <typename T, typename Source>
void launch_cast(const GroupedCast& p, const Source& source, cudaStream_t stream) {
  if (p.in_blocks)
    return launch_1x128<T, true>(p.blocks, source, AnyFormat{p.blocks.fp8 == DType::kE5M2}, stream);
  Params params = params_of(p.groups);
  params.x = p.from.x;
  launch_tiles<T, true>(params, Pointers{}, 1, source, AnyFormat{p.groups.codes == DType::kE5M2},
                        stream);
}

using GatedKinds = ActivationKinds<false, Activation::kSilu, Activation::kGelu,
                                   Activation::kGeluErf, Activation::kRelu, Activation::kSigmoid>;

// Calls launch(zero, kind) for the dtype and the activation.
template <typename Launch>
void with_gated(const Produced& p, const Launch& launch) {
  GatedKinds::choose(p.activation, [&](auto kind) {
    p.dtype == DType::kFloat16 ? launch(Half{}, kind) : launch(BFloat16{}, kind);
  });
}

}  // namespace
}  // namespace apex_te
