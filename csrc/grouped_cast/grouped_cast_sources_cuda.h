// Sources of grouped_cast's elements (grouped_quantize/grouped_quantize_source_cuda.h), all with
// vector accesses, and the launch of a cast of one.
#pragma once

#include "grouped_cast/grouped_cast.h"
#include "grouped_quantize/grouped_quantize_1x128_cuda.h"
#include "grouped_quantize/grouped_quantize_tile_cuda.h"
#include "swiglu/swiglu_device.h"

namespace apex_te {

// With one scale for each group, and in blocks by rules that divide or multiply: a file each, since
// they take long to compile.
void launch_gated(const GroupedCast& p, cudaStream_t stream);
void launch_gated_gradient(const GroupedCast& p, cudaStream_t stream);
template <bool kDivides>
void launch_gated_blocks(const GroupedCast& p, cudaStream_t stream);
template <bool kDivides>
void launch_gated_gradient_blocks(const GroupedCast& p, cudaStream_t stream);
template <>
void launch_gated_blocks<false>(const GroupedCast& p, cudaStream_t stream);
template <>
void launch_gated_blocks<true>(const GroupedCast& p, cudaStream_t stream);
template <>
void launch_gated_gradient_blocks<false>(const GroupedCast& p, cudaStream_t stream);
template <>
void launch_gated_gradient_blocks<true>(const GroupedCast& p, cudaStream_t stream);

namespace {

struct Gather : PlainSource {
  const int32_t* row_of;
  int64_t tokens;
  const float* factor;
  static constexpr bool kByColumns = true;
  template <typename Tile, bool kAligned, typename T>
  __device__ __forceinline__ void load(const T* x, int64_t begin, const typename Tile::Place& at,
                                       const WarpRows&, bool, Vec8<T>* in) const {
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

template <int kRows = kGatedBatch, typename T>
__device__ __forceinline__ void load_batch(const T* x, int64_t ld, int rows, Vec8<T>* in) {
#pragma unroll
  for (int r = 0; r < kRows; ++r, x += ld) in[r] = r < rows ? load_vec(x) : Vec8<T>{};
}

// Where a thread's gates and ups lie in a row of 2 cols elements: in both halves from `col` on, or
// interleaved in 16 elements, which separate() takes apart and join() puts together.
template <bool kInterleaved>
struct Halves {
  // Of the first gate in a row, and from a vector of gates, or the first of 16, to the other one.
  static __device__ __forceinline__ int64_t begin(int64_t col) {
    return kInterleaved ? 2 * col : col;
  }
  static __device__ __forceinline__ int64_t distance(int64_t cols) {
    return kInterleaved ? kVec : cols;
  }
  static __device__ __forceinline__ void separate(float* gates, float* ups) {
    if constexpr (kInterleaved) {
      float all[2 * kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        all[i] = gates[i];
        all[kVec + i] = ups[i];
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        gates[i] = all[2 * i];
        ups[i] = all[2 * i + 1];
      }
    }
  }
  static __device__ __forceinline__ void join(float* gates, float* ups) {
    if constexpr (kInterleaved) {
      float all[2 * kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        all[2 * i] = gates[i];
        all[2 * i + 1] = ups[i];
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        gates[i] = all[i];
        ups[i] = all[kVec + i];
      }
    }
  }
};

// The biases of a thread's columns, zeros where there are none.
template <bool kBias, typename T>
struct Biases {
  Vec8<T> gate{}, up{};
  template <typename Halves>
  __device__ __forceinline__ Biases(const void* bias, int group, int64_t col, int64_t cols,
                                    Halves halves) {
    if (!kBias || !bias || group < 0 || col >= cols) return;
    const T* own = static_cast<const T*>(bias) + group * 2 * cols + halves.begin(col);
    gate = load_vec(own);
    up = load_vec(own + halves.distance(cols));
  }
  // Adds them and rounds, as grouped_finish does.
  static __device__ __forceinline__ void add(const Vec8<T>& bias, float* values) {
    if (!kBias) return;
    float addends[kVec];
    unpack(bias, addends);
#pragma unroll
    for (int i = 0; i < kVec; ++i) addends[i] += values[i];
    Vec8<T> rounded;
    pack(addends, &rounded);
    unpack(rounded, values);
  }
};

template <Activation kAct, bool kBias, bool kInterleaved>
struct Gated {
  const float* factor;
  const void* bias;
  Clamp clamp;
  static constexpr int kTileRows = 128, kParts = 1;
  static constexpr bool kByColumns = false, kAdjacent = false;
  static constexpr int blocks(size_t) { return 3; }
  static constexpr int blocks_1x128(size_t) { return 3; }
  template <typename Tile, bool kAligned, typename T>
  __device__ __forceinline__ void load(const T* x, int64_t begin, const typename Tile::Place& at,
                                       const WarpRows& of, bool, Vec8<T>* in) const {
    const int rows = at.rows_present();
    const Halves<kInterleaved> halves;
    const T* gates = x + (begin + at.row) * 2 * at.cols + halves.begin(at.col);
    const Biases<kBias, T> biases(bias, of.group, at.col, at.cols, halves);
#pragma unroll
    for (int r0 = 0; r0 < kVec; r0 += kGatedBatch, gates += kGatedBatch * 2 * at.cols) {
      Vec8<T> gate[kGatedBatch], up[kGatedBatch];
      load_batch(gates, 2 * at.cols, rows - r0, gate);
      load_batch(gates + halves.distance(at.cols), 2 * at.cols, rows - r0, up);
#pragma unroll
      for (int r = 0; r < kGatedBatch; ++r) {
        in[r0 + r] = Vec8<T>{};
        if (r0 + r >= rows) continue;
        float g[kVec], u[kVec];
        unpack(gate[r], g);
        unpack(up[r], u);
        biases.add(biases.gate, g);
        biases.add(biases.up, u);
        halves.separate(g, u);
        const float by = factor ? factor[begin + at.row + r0 + r] : 1.0f;
#pragma unroll
        for (int i = 0; i < kVec; ++i) g[i] = gated<kAct, false>(g[i], u[i], clamp) * by;
        pack(g, &in[r0 + r]);
      }
    }
  }
};

template <Activation kAct, bool kBias, bool kInterleaved>
struct GatedGradient {
  const void* grad;
  const float* factor;
  float* partials;
  int64_t all_rows;
  const void* bias;
  float* lines;
  int64_t num_lines;
  Clamp clamp;
  // Of blocks of 128 threads an SM runs three, with the registers that these need.
  static constexpr bool kIsLarge = kBias || kAct == Activation::kSwish;
  static constexpr int kTileRows = kIsLarge ? 64 : 128, kParts = 2;
  static constexpr int kBatch = kAct == Activation::kSwish ? 2 : kGatedBatch;
  static constexpr bool kByColumns = false, kAdjacent = kInterleaved;
  static constexpr int blocks(size_t) { return kIsLarge ? 3 : 2; }
  static constexpr int blocks_1x128(size_t) { return 2; }
  template <typename Tile, bool kAligned, typename T>
  __device__ __forceinline__ void load(const T* x, int64_t begin, const typename Tile::Place& at,
                                       const WarpRows& of, bool, Vec8<T>* in) const {
    const int rows = at.rows_present();
    const Halves<kInterleaved> halves;
    const T* gates = x + (begin + at.row) * 2 * at.cols + halves.begin(at.col);
    const T* grads = static_cast<const T*>(grad) + (begin + at.row) * at.cols + at.col;
#pragma unroll
    for (int r0 = 0; r0 < kVec; r0 += kBatch) {
      Vec8<T> gate[kBatch], up[kBatch], dy[kBatch];
      load_batch<kBatch>(gates, 2 * at.cols, rows - r0, gate);
      load_batch<kBatch>(gates + halves.distance(at.cols), 2 * at.cols, rows - r0, up);
      load_batch<kBatch>(grads, at.cols, rows - r0, dy);
      gates += kBatch * 2 * at.cols;
      grads += kBatch * at.cols;
      float dots[kBatch] = {};
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        in[r0 + r] = in[kVec + r0 + r] = Vec8<T>{};
        if (r0 + r >= rows) continue;
        float g[kVec], u[kVec], d[kVec];
        unpack(gate[r], g);
        unpack(up[r], u);
        int group = of.group;
        // Each row loads its biases again: registers would not hold them, too.
        if (kInterleaved) asm volatile("" : "+r"(group));
        const Biases<kBias, T> biases(bias, group, at.col, at.cols, halves);
        unpack(dy[r], d);
        biases.add(biases.gate, g);
        biases.add(biases.up, u);
        halves.separate(g, u);
        const float by = factor ? factor[begin + at.row + r0 + r] : 1.0f;
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          float result;
          gated_gradient<kAct, false>(g[i], u[i], d[i] * by, clamp, &g[i], &u[i], &result);
          dots[r] += d[i] * result;
        }
        halves.join(g, u);
        pack(g, &in[r0 + r]);
        pack(u, &in[kVec + r0 + r]);
      }
      if (partials) store_dots<Tile>(begin + at.row + r0, at.col0, rows - r0, dots);
    }
    if (kInterleaved) exchange<Tile>(in);
    if (kBias && lines) store_sums<Tile>(at, of.column / kGroupAlign, in);
  }

 private:
  // Threads have 16 adjacent columns of two tiles; each gets 8 of either tile, in order.
  template <typename Tile, typename T>
  static __device__ __forceinline__ void exchange(Vec8<T>* in) {
    const int lane = threadIdx.x % Tile::kLanes, first = threadIdx.x % 32 - lane;
#pragma unroll
    for (int r = 0; r < kVec; ++r) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t words[2];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const int from = first + part * (Tile::kLanes / 2) + lane / 2;
          const uint32_t low = __shfl_sync(0xFFFFFFFFu, in[r].words[w], from);
          const uint32_t high = __shfl_sync(0xFFFFFFFFu, in[kVec + r].words[w], from);
          words[part] = lane % 2 ? high : low;
        }
        in[r].words[w] = words[0];
        in[kVec + r].words[w] = words[1];
      }
    }
  }

  // Sums of a warp's rows to their line, in an order that is always the same.
  template <typename Tile, typename T>
  __device__ __forceinline__ void store_sums(const typename Tile::Place& at, int64_t line,
                                             const Vec8<T>* in) const {
    const bool is_second = threadIdx.x % 32 >= Tile::kLanes;  // of the warp's two sets of rows
    const bool stores = !is_second && at.row < at.rows && line < num_lines;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int64_t col = kInterleaved ? at.col0 + part * Tile::kTileCols + at.col : at.col;
      float sums[kVec] = {};
#pragma unroll
      for (int r = 0; r < kVec; ++r) {
        float values[kVec];
        unpack(in[part * kVec + r], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sums[i] += values[i];
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        sums[i] += __shfl_down_sync(0xFFFFFFFFu, sums[i], Tile::kLanes);
      if (!stores || col >= (kInterleaved ? 2 : 1) * at.cols) continue;
      float4* out =
          reinterpret_cast<float4*>(lines + (2 * line + (kInterleaved ? 0 : part)) * at.cols + col);
      out[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      out[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
    }
  }

  // Sums of a batch of rows over a tile's columns, in an order that is always the same.
  template <typename Tile>
  __device__ __forceinline__ void store_dots(int64_t row, int64_t col0, int rows,
                                             const float* dots) const {
    float* out = partials + col0 / kBlock * all_rows + row;
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      float sum = dots[r];
#pragma unroll
      for (int lanes = Tile::kLanes / 2; lanes; lanes /= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
      if (threadIdx.x % Tile::kLanes == 0 && r < rows) out[r] = sum;
    }
  }
};

template <typename T, bool kDivides, typename Source>
void launch_blocks(const GroupedCast& p, const Source& source, cudaStream_t stream) {
  const AnyFormat<kDivides> format{p.blocks.fp8 == DType::kE5M2};
  launch_1x128<T, true>(p.blocks, source, format, stream);
}
template <typename T, typename Source>
void launch_groups(const GroupedCast& p, const Source& source, cudaStream_t stream) {
  Params params = params_of(p.groups);
  params.x = p.from.x;
  launch_tiles<T, true>(params, Pointers{}, 1, source, AnyFormat<>{p.groups.codes == DType::kE5M2},
                        stream);
}

// Calls launch(zero, kind, has_bias, interleaved) for a call.
template <typename Launch>
void with_gated(const Produced& p, const Launch& launch) {
  GatedKinds::choose(p.activation, [&](auto kind) {
    const auto with = [&](auto has_bias, auto interleaved) {
      p.dtype == DType::kFloat16 ? launch(Half{}, kind, has_bias, interleaved)
                                 : launch(BFloat16{}, kind, has_bias, interleaved);
    };
    if constexpr (decltype(kind)::value == Activation::kSwish)
      if (p.interleaved) return with(std::true_type{}, std::true_type{});
    p.bias ? with(std::true_type{}, std::false_type{}) : with(std::false_type{}, std::false_type{});
  });
}

// Calls launch(zero, source) with the gated rows of a call, or with their gradient.
template <typename Launch>
void with_gated_source(const GroupedCast& p, const Launch& launch) {
  with_gated(p.from, [&](auto zero, auto kind, auto has_bias, auto interleaved) {
    launch(zero,
           Gated<decltype(kind)::value, decltype(has_bias)::value, decltype(interleaved)::value>{
               p.from.factor, p.from.bias, p.from.clamp});
  });
}
template <typename Launch>
void with_gradient_source(const GroupedCast& p, const Launch& launch) {
  with_gated(p.from, [&](auto zero, auto kind, auto has_bias, auto interleaved) {
    const Produced& from = p.from;
    using Source = GatedGradient<decltype(kind)::value, decltype(has_bias)::value,
                                 decltype(interleaved)::value>;
    launch(zero, Source{from.grad, from.factor, from.partials, from.rows, from.bias, from.lines,
                        from.num_lines, from.clamp});
  });
}

}  // namespace
}  // namespace apex_te
