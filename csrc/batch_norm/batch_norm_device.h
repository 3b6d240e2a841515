// CUDA kernels of batch_norm, for both directions.
//
// Where a thread can keep to its columns, the data are a matrix of rows of c * s elements: a block
// has up to 256 columns, 8 for each thread, and rows far apart are loaded at once. Else a block of
// a reduction has vectors of one channel, and elements are computed in order of memory.
#pragma once

#include "batch_norm/batch_norm.h"
#include "common/gpu/dependent_launch.h"
#include "common/gpu/shifted.h"
#include "common/numerics/with_dtype.h"

namespace apex_te {
namespace batch_norm {

constexpr int kThreads = 256;
constexpr int kTile = static_cast<int>(kBatchNormTile);
constexpr int kElementBlocks = 792;  // of rows of elements at least: two turns of a GPU's blocks
constexpr int kElementVectors = 16;  // of a thread that has rows of elements, at most
constexpr int64_t kReusedBytes = int64_t{1} << 28;  // of x; of more, L2 has too little left
constexpr int kFlatVectors = 8;  // of a thread that has elements in order of memory
constexpr int kFlatBatch = 4;    // of these, whose loads come first
constexpr int kFinishBatch = 4;  // parts of a channel whose loads come first

// Rows of a thread whose loads come first: 128 bytes of statistics, 64 of each other tensor.
template <typename T, bool kStats>
constexpr int kBatch = (kStats ? 16 : 8) / sizeof(T);

// Rows of a thread that has elements of a matrix, whose loads come first; without gradients 128
// bytes of float32, since nothing else is in flight.
template <typename T, bool kBwd>
constexpr int kElementBatch = kBwd ? kBatch<T, false> : 4;

// How a block's threads share the columns of a matrix [rows, cols].
struct Columns {
  int64_t rows, cols, tiles;
  int lanes;  // threads beside each other

  Columns(int64_t rows, int64_t cols) : rows(rows), cols(cols) {
    const int64_t vectors = (cols + kVec - 1) / kVec;
    tiles = (vectors + kTile / kVec - 1) / (kTile / kVec);
    lanes = static_cast<int>((vectors + tiles - 1) / tiles);
  }
};

// A thread's place in a block's columns.
struct Place {
  int lane, group, groups;  // the group of threads has rows of its own
  int64_t first, col;       // columns of the block and of the thread

  __device__ Place(int lanes)
      : lane(threadIdx.x % lanes),
        group(threadIdx.x / lanes),
        groups(kThreads / lanes),
        first(int64_t{blockIdx.x} * lanes * kVec),
        col(first + lane * kVec) {}
  __device__ bool has_columns(int64_t cols) const { return group < groups && col < cols; }
};

__device__ __forceinline__ float inverse_total(const BatchNorm& p) {
  long long total = 0;
  if (p.counts) {
    for (int64_t i = threadIdx.x % 32; i < p.ranks; i += 32) total += p.counts[i];
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, lane);
  } else {
    total = p.n * p.s;
  }
  return total > 0 ? static_cast<float>(1.0 / static_cast<double>(total)) : 0.0f;
}

// What a block's columns are computed with, each made once.
struct alignas(16) Channels {
  float mean[kTile], scale[kTile], shift[kTile], mean_dy[kTile], slope[kTile];

  template <typename T>
  __device__ void fill(const BatchNorm& p, const Place& place, int lanes, int64_t cols,
                       float inv_total) {
    const int j = threadIdx.x;
    const int64_t col = place.first + j;
    if (j < lanes * kVec && col < cols) {
      const BatchNormChannel at = batch_norm_channel<T>(p, p.s == 1 ? col : col / p.s, inv_total);
      mean[j] = at.mean;
      scale[j] = at.scale;
      shift[j] = at.shift;
      mean_dy[j] = at.mean_dy;
      slope[j] = at.slope;
    }
    __syncthreads();
  }
};
__device__ __forceinline__ void read(const float* shared, int lane, float* values) {
#pragma unroll
  for (int i = 0; i < kVec / 4; ++i) {
    const float4 v = reinterpret_cast<const float4*>(shared + lane * kVec)[i];
    values[4 * i] = v.x;
    values[4 * i + 1] = v.y;
    values[4 * i + 2] = v.z;
    values[4 * i + 3] = v.w;
  }
}

// Elements from `at` on, of which n belong to the row.
template <typename T, bool kAligned>
__device__ __forceinline__ Vec8<T> load(const void* data, int64_t at, int64_t n, int64_t numel) {
  const T* x = static_cast<const T*>(data);
  return kAligned ? load_vec(x + at) : load_shifted(x + at, n, x, x + numel);
}

// Number of elements, and what a reduction has of them: mean and sum of squared distances, or sums.
struct Part {
  double count, first, second;
};
template <bool kStats>
__device__ __forceinline__ Part merge(const Part& a, const Part& b) {
  if (!kStats) return {a.count + b.count, a.first + b.first, a.second + b.second};
  const double count = a.count + b.count;
  if (count <= 0.0) return a;
  const double apart = b.first - a.first, share = b.count / count;
  return {count, a.first + apart * share, a.second + b.second + apart * apart * a.count * share};
}

// Mean, as its distance from `from`, and sum of squared distances from the mean, of elements whose
// distances from a pivot have these sums.
__device__ __forceinline__ Part statistics_of(double count, float pivot, double sum, double squares,
                                              float from) {
  if (count <= 0.0) return {0.0, 0.0, 0.0};
  const double apart = sum / count, rest = squares - sum * apart;
  return {count, static_cast<double>(pivot) - from + apart, rest > 0.0 ? rest : 0.0 * rest};
}

// Rows of one thread that are in registers: x and, in backward, dy and z.
template <typename T, bool kStats, bool kRelu>
struct Rows {
  static constexpr int kCount = kBatch<T, kStats>;
  Vec8<T> x[kCount], dy[kStats ? 1 : kCount], z[kRelu ? kCount : 1];

  // Of `left` rows from that of the element `at` on, each `groups`-th, `step` elements apart; n of
  // a row's elements exist.
  template <bool kAligned>
  __device__ void load_from(const BatchNorm& p, int64_t at, int64_t step, int left, int groups,
                            int64_t n) {
    const int64_t numel = p.n * p.c * p.s;
#pragma unroll
    for (int k = 0; k < kCount; ++k, at += step) {
      const bool is_present = k * groups < left;
      x[k] = is_present ? load<T, kAligned>(p.x, at, n, numel) : Vec8<T>{};
      if (!kStats) dy[k] = is_present ? load<T, kAligned>(p.dy, at, n, numel) : Vec8<T>{};
      if (kRelu && p.z) z[k] = is_present ? load<T, kAligned>(p.z, at, n, numel) : Vec8<T>{};
    }
  }
};

template <bool kRelu, typename T>
__device__ __forceinline__ void mask(const Vec8<T>& z, bool has_z, const float* x,
                                     const float* mean, const float* scale, const float* shift,
                                     float* dy) {
  if (!kRelu) return;
  float residual[kVec] = {};
  if (has_z) unpack(z, residual);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const BatchNormChannel at{mean[i], scale[i], shift[i], 0.0f, 0.0f};
    dy[i] = relu_gradient(at.activation(x[i], residual[i]), dy[i]);
  }
}

// Adds a row's elements to a thread's sums.
template <bool kStats>
__device__ __forceinline__ void add_row(const float* x, const float* dy, const float* mean,
                                        float* first, float* second) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float apart = x[i] - mean[i], factor = kStats ? apart : dy[i];
    first[i] += factor;
    second[i] = fmaf(factor, apart, second[i]);
  }
}

// Rows of a line that each of its groups of threads has: group, group + groups, ...
struct GroupRows {
  int each, more;

  __device__ GroupRows(int num_rows, int groups)
      : each(num_rows / groups), more(num_rows % groups) {}
  __device__ int operator[](int group) const { return each + (group < more); }
};

// Sums of `count` rows around `mean` become mean, as its distance from `from`, and sum of squares.
__device__ __forceinline__ void leave_statistics(int count, const float* mean, const float* from,
                                                 float* first, float* second) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const Part part = statistics_of(count, mean[i], first[i], second[i], from[i]);
    first[i] = static_cast<float>(part.first);
    second[i] = static_cast<float>(part.second);
  }
}

// What a line leaves of a column, from what its groups left, `step` values apart.
template <bool kStats>
__device__ __forceinline__ float2 merge_groups(const float* first, const float* second, int step,
                                               int groups, int num_rows) {
  const GroupRows rows(num_rows, groups);
  double sum = 0.0, of_second = 0.0;
  for (int g = 0; g < groups; ++g) {
    const float part = first[g * step];
    sum += kStats ? static_cast<double>(rows[g]) * part : part;
  }
  if (kStats) sum /= num_rows;
  for (int g = 0; g < groups; ++g) {
    const double apart = first[g * step] - sum;
    of_second += second[g * step];
    if (kStats) of_second += static_cast<double>(rows[g]) * apart * apart;
  }
  return make_float2(static_cast<float>(sum), static_cast<float>(of_second));
}

// A block's lines of the reduction of a matrix.
template <typename T, bool kStats, bool kRelu, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2) reduce_columns_kernel(const BatchNorm p, int lanes) {
  constexpr int kCount = kBatch<T, kStats>;
  __shared__ float parts[2][kThreads * kVec];
  __shared__ Channels channels;
  const Place place(lanes);
  const int64_t line = block_row(), cols = p.split.width;
  if (line >= p.split.lines) return;
  const int64_t begin = p.split.begin(line);
  const int num_rows = static_cast<int>(p.split.begin(line + 1) - begin);
  const int64_t step = place.groups * cols, n = cols - place.col;
  int64_t at = (begin + place.group) * cols + place.col;
  int left = place.has_columns(cols) ? num_rows - place.group : 0;
  Rows<T, kStats, kRelu> rows;
  if (left > 0) rows.template load_from<kAligned>(p, at, step, left, place.groups, n);
  float mean[kVec] = {}, scale[kVec], shift[kVec];  // of statistics the mean is the pivot
  if (kStats) {
    const int64_t col = place.first + threadIdx.x;
    if (threadIdx.x < lanes * kVec && col < cols)
      channels.mean[threadIdx.x] = batch_norm_pivot(p, p.s == 1 ? col : col / p.s);
    int present = 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k * place.groups >= left) break;
      float x[kVec];
      unpack(rows.x[k], x);
      ++present;
#pragma unroll
      for (int i = 0; i < kVec; ++i) mean[i] += x[i];
    }
    const float inverse = present > 0 ? 1.0f / present : 0.0f;
#pragma unroll
    for (int i = 0; i < kVec; ++i) mean[i] *= inverse;
    __syncthreads();
  } else {
    channels.fill<T>(p, place, lanes, cols, 0.0f);
    read(channels.mean, place.lane, mean);
    if (kRelu) {
      read(channels.scale, place.lane, scale);
      read(channels.shift, place.lane, shift);
    }
  }
  float first[kVec] = {}, second[kVec] = {};
  while (left > 0) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k * place.groups >= left) break;
      float x[kVec], dy[kVec];
      unpack(rows.x[k], x);
      if (!kStats) {
        unpack(rows.dy[k], dy);
        mask<kRelu>(rows.z[kRelu ? k : 0], p.z != nullptr, x, mean, scale, shift, dy);
      }
      add_row<kStats>(x, dy, mean, first, second);
    }
    at += kCount * step;
    left -= kCount * place.groups;
    if (left > 0) rows.template load_from<kAligned>(p, at, step, left, place.groups, n);
  }
  let_next_kernel_start();
  if (kStats && place.group < place.groups) {
    float from[kVec];
    read(channels.mean, place.lane, from);
    const int count = GroupRows(num_rows, place.groups)[place.group];
    leave_statistics(count, mean, from, first, second);
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    parts[0][threadIdx.x * kVec + i] = first[i];
    parts[1][threadIdx.x * kVec + i] = second[i];
  }
  __syncthreads();
  const int width = lanes * kVec;
  if (threadIdx.x >= width || place.first + threadIdx.x >= cols) return;
  const float2 merged = merge_groups<kStats>(parts[0] + threadIdx.x, parts[1] + threadIdx.x, width,
                                             place.groups, num_rows);
  float* out = p.workspace + line * 2 * cols + place.first + threadIdx.x;
  out[0] = merged.x;
  out[cols] = merged.y;
}

// Leaves what a block's threads have of a line of one channel: `count` elements each, and their
// sums, of statistics around `mean`.
template <bool kStats>
__device__ __forceinline__ void leave_vectors(const BatchNorm& p, int64_t channel, int64_t line,
                                              int64_t count, float mean, const float* first,
                                              const float* second, Part* parts) {
  Part part{static_cast<double>(count), 0.0, 0.0};
#pragma unroll
  for (int i = 0; i < kVec; ++i) part.first += first[i], part.second += second[i];
  if (kStats)
    part = statistics_of(part.count, mean, part.first, part.second, batch_norm_pivot(p, channel));
  parts[threadIdx.x] = part;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half)
      parts[threadIdx.x] = merge<kStats>(parts[threadIdx.x], parts[threadIdx.x + half]);
  }
  if (threadIdx.x != 0) return;
  float* out = p.workspace + line * 2 * p.split.width + channel;
  out[0] = static_cast<float>(parts[0].first);
  out[p.split.width] = static_cast<float>(parts[0].second);
}

// A block's line of the vectors of one channel.
template <typename T, bool kStats, bool kRelu, bool kAligned>
__global__ void __launch_bounds__(kThreads) reduce_rows_kernel(const BatchNorm p) {
  constexpr int kCount = kBatch<T, kStats>;
  __shared__ Part parts[kThreads];
  const int64_t channel = blockIdx.x, line = block_row(), numel = p.n * p.c * p.s;
  if (line >= p.split.lines) return;
  const int64_t vectors = p.split.row_places();
  const int64_t end = p.split.begin(line + 1), row_step = kThreads / vectors;
  const int64_t vec_step = kThreads - row_step * vectors;
  int64_t place = p.split.begin(line) + threadIdx.x;
  int64_t row = place / vectors, vec = place - row * vectors;
  const BatchNormChannel at = kStats ? BatchNormChannel{} : batch_norm_channel<T>(p, channel, 0.0f);
  float mean[kVec], scale[kVec], shift[kVec];  // of statistics the mean is the pivot
#pragma unroll
  for (int i = 0; i < kVec; ++i) mean[i] = at.mean, scale[i] = at.scale, shift[i] = at.shift;
  float first[kVec] = {}, second[kVec] = {};
  int64_t count = 0;
  while (place < end) {
    Vec8<T> x[kCount], dy[kCount], z[kCount];
    int n[kCount], present = 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k, place += kThreads) {
      const int64_t index = (row * p.c + channel) * p.s + vec * kVec, left = p.s - vec * kVec;
      n[k] = place < end ? (kAligned || left > kVec ? kVec : static_cast<int>(left)) : 0;
      present += n[k];
      x[k] = dy[k] = z[k] = Vec8<T>{};
      if (n[k] > 0) {
        x[k] = load<T, kAligned>(p.x, index, left, numel);
        if (!kStats) dy[k] = load<T, kAligned>(p.dy, index, left, numel);
        if (kRelu && p.z) z[k] = load<T, kAligned>(p.z, index, left, numel);
      }
      row += row_step;
      vec += vec_step;
      if (vec >= vectors) vec -= vectors, ++row;
    }
    if (kStats && count == 0) {
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        float values[kVec];
        unpack(x[k], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum += values[i];
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) mean[i] = sum / static_cast<float>(present);
    }
    count += present;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      float values[kVec], grads[kVec];
      unpack(x[k], values);
      if (!kStats) {
        unpack(dy[k], grads);
        mask<kRelu>(z[k], p.z != nullptr, values, mean, scale, shift, grads);
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float apart = i < n[k] ? values[i] - mean[i] : 0.0f;
        const float factor = kStats ? apart : grads[i];
        first[i] += factor;
        second[i] = fmaf(factor, apart, second[i]);
      }
    }
  }
  let_next_kernel_start();
  leave_vectors<kStats>(p, channel, line, count, mean[0], first, second, parts);
}

// Adds the values of a channel's threads, `ways` apart by `channels`, for all of them.
__device__ __forceinline__ double add_ways(double value, int channels, double* shared) {
  __syncthreads();
  shared[threadIdx.x] = value;
  for (int half = static_cast<int>(blockDim.x) / 2; half >= channels; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  __syncthreads();
  return shared[threadIdx.x % channels];
}

// Threads that add what the lines left of a channel, of which they left s columns or one.
APEX_TE_HD int finish_ways(const BatchNormSplit& split) {
  return split.by_columns && split.s > 1 ? 64 : 32;
}

// Calls done(channel, mean, biased variance), or with the sums, in one thread for each channel from
// `begin` to `end` - 1. All threads of the block; `shared` has a value for each.
template <bool kStats, typename Done>
__device__ __forceinline__ void finish_channels(const BatchNorm& p, int64_t begin, int64_t end,
                                                double* shared, const Done& done) {
  const BatchNormSplit& split = p.split;
  const int ways = finish_ways(split), channels = static_cast<int>(blockDim.x) / ways;
  const int way = threadIdx.x / channels;
  const int64_t columns = split.by_columns ? p.s : 1;
  for (int64_t channel = begin + threadIdx.x % channels; channel - threadIdx.x % channels < end;
       channel += channels) {
    const int64_t parts = channel < end && p.n > 0 ? split.lines * columns : 0;
    const auto each = [&](const auto& body) {
      for (int64_t i = way; i < parts; i += kFinishBatch * ways) {
        int64_t line[kFinishBatch];
        float values[2][kFinishBatch];
#pragma unroll
        for (int k = 0; k < kFinishBatch; ++k) {
          const int64_t part = i + k * ways;
          if (part >= parts) break;
          line[k] = columns == 1 ? part : part / columns;
          const int64_t column = part - line[k] * columns;
          const float* at = p.workspace + line[k] * 2 * split.width + channel * columns + column;
          values[0][k] = at[0];
          values[1][k] = at[split.width];
        }
#pragma unroll
        for (int k = 0; k < kFinishBatch; ++k) {
          if (i + k * ways >= parts) break;
          body(line[k], values[0][k], values[1][k]);
        }
      }
    };
    double first = 0.0, second = 0.0;
    if (kStats) {
      double count = 0.0;
      each([&](int64_t line, float mean, float) {
        const auto n = static_cast<double>(split.count(line));
        count += n;
        first += n * mean;
      });
      count = add_ways(count, channels, shared);
      first = add_ways(first, channels, shared) / (count > 0.0 ? count : 1.0);
      each([&](int64_t line, float mean, float squares) {
        const double apart = mean - first;
        second += squares + static_cast<double>(split.count(line)) * apart * apart;
      });
      second = add_ways(second, channels, shared) / (count > 0.0 ? count : 1.0);
      if (channel < end) first += batch_norm_pivot(p, channel);
    } else {
      each([&](int64_t, float sum, float of_products) {
        first += sum;
        second += of_products;
      });
      first = add_ways(first, channels, shared);
      second = add_ways(second, channels, shared);
    }
    if (way == 0 && channel < end)
      done(channel, static_cast<float>(first), static_cast<float>(second), second);
  }
}

// Gradients of weight and bias from a channel's sums.
__device__ __forceinline__ void store_param_grads(const BatchNorm& p, int64_t channel, float sum_dy,
                                                  double sum_dy_xmu) {
  const float grads[2] = {static_cast<float>(sum_dy_xmu * p.inv_std[channel]), sum_dy};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!p.param_grads[i]) continue;
    if (p.param_grads_fp32)
      static_cast<float*>(p.param_grads[i])[channel] = grads[i];
    else if (p.dtype == DType::kFloat16)
      static_cast<Half*>(p.param_grads[i])[channel] = from_float<Half>(grads[i]);
    else
      static_cast<BFloat16*>(p.param_grads[i])[channel] = from_float<BFloat16>(grads[i]);
  }
}

// Combines a channel's statistics, which are those of all.
__device__ __forceinline__ BatchNormCombined combined_alone(const BatchNormCombine& p, float mean,
                                                            float var) {
  const BatchNormPart part{static_cast<double>(p.count), mean, var};
  return combine_parts(1, p.eps, [&](int64_t) { return part; });
}

// Results from what the lines left. Statistics are combined if they are those of all.
template <bool kStats>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const BatchNorm p, const BatchNormCombine combine, int channels) {
  __shared__ double shared[kThreads];
  const int64_t begin = int64_t{blockIdx.x} * channels;
  let_next_kernel_start();
  wait_for_previous_kernel();
  finish_channels<kStats>(p, begin, begin + channels < p.c ? begin + channels : p.c, shared,
                          [&](int64_t channel, float first, float second, double exact_second) {
                            if (kStats && combine.parts > 0) {
                              store_combined(combine, channel,
                                             combined_alone(combine, first, second));
                              return;
                            }
                            p.results[0][channel] = first;
                            p.results[1][channel] = second;
                            if (!kStats) store_param_grads(p, channel, first, exact_second);
                          });
}

// One vector of results at `at`, of which n elements exist.
template <typename T>
__device__ __forceinline__ void store(const float* values, void* data, int64_t at, int64_t n,
                                      bool as_vector) {
  Vec8<T> v;
  pack(values, &v);
  T* out = static_cast<T*>(data) + at;
  if (as_vector)
    store_vec(out, v);
  else
    store_partial(out, v, n);
}

// Elements to their results, for columns with these values.
template <bool kRelu, typename T>
__device__ __forceinline__ void normalize(const Vec8<T>& z, bool has_z, const float* mean,
                                          const float* scale, const float* shift, float* values) {
  float residual[kVec] = {};
  if (has_z) unpack(z, residual);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    values[i] = (values[i] - mean[i]) * scale[i] + shift[i] + residual[i];
    if (kRelu) values[i] = relu_of(values[i]);
  }
}

// Elements to their gradients.
__device__ __forceinline__ void differentiate(const float* grads, const float* mean,
                                              const float* scale, const float* mean_dy,
                                              const float* slope, float* values) {
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    values[i] = (grads[i] - mean_dy[i] - (values[i] - mean[i]) * slope[i]) * scale[i];
}

// Rows of blocks of elements: in order or, after a reduction of `lines` lines, the last rows of all
// lines first, which L2 still has.
struct ElementRows {
  int64_t rows, block_rows;
  int64_t lines, line_rows, of_line;  // lines of 0 for blocks in order; blocks of a line

  __host__ __device__ int64_t blocks() const {
    return lines > 0 ? lines * of_line : (rows + block_rows - 1) / block_rows;
  }
  __device__ int64_t begin(int64_t block) const {
    if (lines == 0) return block * block_rows;
    const int64_t turn = block / lines;
    return (block - turn * lines) * line_rows + (of_line - 1 - turn) * block_rows;
  }
  __device__ int64_t end(int64_t block) const {
    const int64_t next = begin(block) + block_rows;
    const int64_t last = lines > 0 ? (block % lines + 1) * line_rows : rows;
    return min64(next, min64(last, rows));
  }
  __device__ static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
};

// Elements of a matrix of rows of whole vectors.
template <typename T, bool kBwd, bool kRelu>
__global__ void __launch_bounds__(kThreads, kBwd || sizeof(T) == 4 ? 2 : 3)
    columns_kernel(const BatchNorm p, int lanes, int64_t cols, const ElementRows element_rows) {
  constexpr int kCount = kElementBatch<T, kBwd>;
  __shared__ Channels channels;
  const Place place(lanes);
  if (block_row() >= element_rows.blocks()) return;
  const int64_t begin = element_rows.begin(block_row()), end = element_rows.end(block_row());
  if (begin >= end) return;
  const bool is_used = place.has_columns(cols);
  const float inv_total = kBwd ? inverse_total(p) : 0.0f;
  const int64_t step = place.groups * cols;
  int64_t at = (begin + place.group) * cols + place.col;
  int left = is_used ? static_cast<int>(end - begin) - place.group : 0;
  Vec8<T> x[kCount], dy[kCount], z[kCount];
  const auto load_rows = [&] {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k * place.groups >= left) break;
      x[k] = load<T, true>(p.x, at + k * step, kVec, 0);
      if (kBwd) dy[k] = load<T, true>(p.dy, at + k * step, kVec, 0);
      if ((!kBwd || kRelu) && p.z) z[k] = load<T, true>(p.z, at + k * step, kVec, 0);
    }
  };
  if (left > 0) load_rows();
  wait_for_previous_kernel();
  channels.fill<T>(p, place, lanes, cols, inv_total);
  if (!is_used) return;
  float mean[kVec], scale[kVec], shift[kVec], mean_dy[kVec], slope[kVec];
  read(channels.mean, place.lane, mean);
  read(channels.scale, place.lane, scale);
  if (!kBwd || kRelu) read(channels.shift, place.lane, shift);
  if (kBwd) {
    read(channels.mean_dy, place.lane, mean_dy);
    read(channels.slope, place.lane, slope);
  }
  while (left > 0) {
#pragma unroll
    for (int k = 0; k < kCount; ++k, at += step, left -= place.groups) {
      if (left <= 0) break;
      float values[kVec], grads[kVec];
      unpack(x[k], values);
      if (kBwd) {
        unpack(dy[k], grads);
        mask<kRelu>(z[k], p.z != nullptr, values, mean, scale, shift, grads);
        if (p.dz) store<T>(grads, p.dz, at, kVec, true);
        if (!p.dx) continue;
        differentiate(grads, mean, scale, mean_dy, slope, values);
        store<T>(values, p.dx, at, kVec, true);
      } else {
        normalize<kRelu>(z[k], p.z != nullptr, mean, scale, shift, values);
        store<T>(values, p.y, at, kVec, true);
      }
    }
    if (left > 0) load_rows();
  }
}

// Elements in order of memory, or the last blocks first. kWhole: no vector has elements of two
// channels.
template <typename T, bool kBwd, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    flat_kernel(const BatchNorm p, int64_t numel, bool is_aligned, bool last_first) {
  const float inv_total = kBwd ? inverse_total(p) : 0.0f;
  const bool reads_z = p.z && (!kBwd || p.relu);
  const int64_t block = last_first ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  int64_t at = (block * kFlatVectors * kThreads + threadIdx.x) * kVec;
  int64_t offset = at % p.s, channel = at / p.s % p.c;
  const int64_t channel_step = kThreads * kVec / p.s;
  const int64_t offset_step = kThreads * kVec - channel_step * p.s;
#pragma unroll 1
  for (int batch = 0; batch < kFlatVectors / kFlatBatch && at < numel; ++batch) {
    Vec8<T> x[kFlatBatch], dy[kFlatBatch], z[kFlatBatch];
#pragma unroll
    for (int k = 0; k < kFlatBatch; ++k) {
      const int64_t index = at + k * kThreads * kVec, n = numel - index;
      x[k] = dy[k] = z[k] = Vec8<T>{};
      if (n <= 0) continue;
      const bool as_vector = is_aligned && n >= kVec;
      const auto read_vec = [&](const void* data) {
        const T* from = static_cast<const T*>(data) + index;
        return as_vector ? load_vec(from) : load_partial(from, n);
      };
      x[k] = read_vec(p.x);
      if (kBwd) dy[k] = read_vec(p.dy);
      if (reads_z) z[k] = read_vec(p.z);
    }
    wait_for_previous_kernel();
#pragma unroll
    for (int k = 0; k < kFlatBatch; ++k, at += kThreads * kVec) {
      const int64_t n = numel - at;
      if (n <= 0) return;
      float values[kVec], grads[kVec], residual[kVec];
      unpack(x[k], values);
      unpack(dy[k], grads);
      unpack(z[k], residual);
      int64_t in_row = offset, of = channel;
      BatchNormChannel own = batch_norm_channel<T>(p, of, inv_total);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float value = own.activation(values[i], residual[i]);
        if (kBwd) {
          if (p.relu) grads[i] = relu_gradient(value, grads[i]);
          values[i] = own.gradient(values[i], grads[i]);
        } else {
          values[i] = p.relu ? relu_of(value) : value;
        }
        if (!kWhole && ++in_row >= p.s) {
          in_row = 0;
          if (++of >= p.c) of = 0;
          own = batch_norm_channel<T>(p, of, inv_total);
        }
      }
      const bool as_vector = is_aligned && n >= kVec;
      if (!kBwd) store<T>(values, p.y, at, n, as_vector);
      if (kBwd && p.dz) store<T>(grads, p.dz, at, n, as_vector);
      if (kBwd && p.dx) store<T>(values, p.dx, at, n, as_vector);
      channel += channel_step;
      offset += offset_step;
      if (offset >= p.s) offset -= p.s, ++channel;
      channel = channel < p.c ? channel : channel % p.c;
    }
  }
}

inline bool are_aligned(const BatchNorm& p) {
  bool aligned = true;
  for (const void* data : {p.x, p.z, p.dy, static_cast<const void*>(p.y),
                           static_cast<const void*>(p.dx), static_cast<const void*>(p.dz)})
    aligned = aligned && is_aligned(data, 16);
  return aligned;
}

template <typename T, bool kStats, bool kRelu, bool kAligned>
void launch_reduction_of(const BatchNorm& p, const char* name, cudaStream_t stream) {
  if (p.split.by_columns) {
    const Columns columns(p.n, p.split.width);
    reduce_columns_kernel<T, kStats, kRelu, kAligned>
        <<<grid_of(p.split.lines, columns.tiles, name), kThreads, 0, stream>>>(p, columns.lanes);
  } else {
    reduce_rows_kernel<T, kStats, kRelu, kAligned>
        <<<grid_of(p.split.lines, p.c, name), kThreads, 0, stream>>>(p);
  }
  check_cuda(cudaGetLastError(), name);
}

template <bool kStats, bool kRelu>
void launch_reduction(const BatchNorm& p, const BatchNormCombine& combine, const char* name,
                      cudaStream_t stream) {
  if (p.c == 0) return;
  if (p.numel() > 0) {
    const bool aligned = are_aligned(p) && (p.split.by_columns ? p.split.width : p.s) % kVec == 0;
    with_dtype(p.dtype, [&](auto zero) {
      using T = decltype(zero);
      if (aligned)
        launch_reduction_of<T, kStats, kRelu, true>(p, name, stream);
      else
        launch_reduction_of<T, kStats, kRelu, false>(p, name, stream);
    });
  }
  const int channels = kThreads / finish_ways(p.split);
  const int64_t blocks = (p.c + channels - 1) / channels;
  if (blocks > 0x7FFFFFFF) fail(kApexTeUnsupported, "%s: too many channels", name);
  launch_dependent(finish_kernel<kStats>, blocks, kThreads, stream, p, combine, channels);
}

template <typename T, bool kBwd>
void launch_elements_of(const BatchNorm& p, bool after_finish, const char* name,
                        cudaStream_t stream) {
  const auto launch = [&](auto kernel, dim3 grid, auto... args) {
    if (after_finish)
      launch_dependent_grid(kernel, grid, kThreads, 0, stream, p, args...);
    else
      kernel<<<grid, kThreads, 0, stream>>>(p, args...);
  };
  const bool aligned = are_aligned(p);
  const Columns columns(p.n, p.c * p.s);
  const bool by_columns = p.s == 1 || (p.s % kVec != 0 && p.n >= 32);
  if (aligned && by_columns && columns.cols % kVec == 0) {
    const int64_t step = kThreads / columns.lanes * kElementBatch<T, kBwd>;
    const int64_t steps = (columns.rows + step - 1) / step;
    const int64_t blocks = std::max<int64_t>(kElementBlocks / columns.tiles, 1);
    // Blocks that run at once have neighbouring rows, which DRAM reads and writes faster.
    const int64_t most_rows = kElementVectors / kElementBatch<T, kBwd> * step;
    ElementRows rows = {columns.rows, std::min((steps + blocks - 1) / blocks * step, most_rows)};
    if (after_finish && p.numel() * static_cast<int64_t>(sizeof(T)) <= kReusedBytes) {
      rows.lines = p.split.lines;
      rows.line_rows = p.split.chunk;
      const int64_t wanted = std::max<int64_t>(blocks / rows.lines, 1);
      rows.block_rows = ((rows.line_rows + wanted - 1) / wanted + step - 1) / step * step;
      rows.block_rows = std::min(rows.block_rows, most_rows);
      rows.of_line = (rows.line_rows + rows.block_rows - 1) / rows.block_rows;
    }
    const dim3 grid = grid_of(rows.blocks(), columns.tiles, name);
    const auto kernel = p.relu ? columns_kernel<T, kBwd, true> : columns_kernel<T, kBwd, false>;
    launch(kernel, grid, columns.lanes, columns.cols, rows);
  } else {
    const int64_t of_block = int64_t{kThreads} * kFlatVectors * kVec;
    const int64_t blocks = (p.numel() + of_block - 1) / of_block;
    if (blocks > 0x7FFFFFFF) fail(kApexTeUnsupported, "%s: too many elements", name);
    const auto kernel = p.s % kVec == 0 ? flat_kernel<T, kBwd, true> : flat_kernel<T, kBwd, false>;
    launch(kernel, dim3(static_cast<unsigned>(blocks)), p.numel(), aligned, after_finish);
  }
  check_cuda(cudaGetLastError(), name);
}

// after_finish: the kernel before it in the stream is that of launch_reduction.
template <bool kBwd>
void launch_elements(const BatchNorm& p, bool after_finish, const char* name, cudaStream_t stream) {
  if (p.numel() == 0) return;
  with_dtype(p.dtype, [&](auto zero) {
    launch_elements_of<decltype(zero), kBwd>(p, after_finish, name, stream);
  });
}

}  // namespace batch_norm
}  // namespace apex_te
