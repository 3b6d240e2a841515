// All of batch_norm on one rank in one kernel, which reads each element once.
//
// A cluster of blocks holds the slab of a few channels in its shared memory, each block whole lines
// of the reduction. Sums are taken in the order of reduce_columns_kernel and reduce_rows_kernel.
#pragma once

#include "batch_norm/batch_norm_device.h"
#include "common/norm/cuda.h"

namespace apex_te {
namespace batch_norm {

constexpr int kSlabThreads = 512;
template <bool kBwd>
constexpr int kSlabBlocks = kBwd ? 1 : 2;         // of a multiprocessor, by their registers
constexpr int kSlabRanks = 8;                     // blocks of a cluster
constexpr int64_t kSlabBytes = int64_t{1} << 27;  // of x; beyond them three kernels overlap better
constexpr int64_t kChannelSlabBytes = 32 << 20;   // of channel_slab_kernel
constexpr int64_t kSlabRound = 160 << 10;         // bytes that a block's latencies are worth
constexpr int64_t kReserved = 1024;               // bytes of shared memory that each block has more

// How clusters share a matrix [n, c * s].
struct SlabPlan {
  int64_t channels;  // of a cluster; the last one may have fewer
  int64_t block_lines;
  int ranks;           // blocks of a cluster
  int groups;          // of threads that share a line in reduce_columns_kernel
  int64_t slab_bytes;  // of a block's x, or dy, in shared memory
  int64_t parts_bytes;

  // In backward dy is held, too.
  APEX_TE_HD int64_t shared_bytes(bool is_bwd, int64_t s) const {
    const int64_t of_column = (is_bwd ? 5 : 3) * static_cast<int64_t>(sizeof(float));
    const int64_t values = s * of_column + static_cast<int64_t>(sizeof(BatchNormChannel));
    return (is_bwd ? 2 : 1) * slab_bytes + parts_bytes + channels * values;
  }
};

// Values of the columns of a slab in shared memory, and those of its channels after them.
template <bool kBwd>
struct SlabColumns {
  float *mean, *scale, *shift, *mean_dy, *slope;
  BatchNormChannel* of_channel;

  __device__ SlabColumns(void* shared, int width)
      : mean(static_cast<float*>(shared)),
        scale(mean + width),
        shift(scale + width),
        mean_dy(shift + width),
        slope(mean_dy + width),
        of_channel(reinterpret_cast<BatchNormChannel*>(kBwd ? slope + width : mean_dy)) {}

  // From of_channel. All threads of the block.
  __device__ void spread(int width, int s) const {
    __syncthreads();
    for (int j = threadIdx.x; j < width; j += kSlabThreads) {
      const BatchNormChannel at = of_channel[j / s];
      mean[j] = at.mean;
      scale[j] = at.scale;
      shift[j] = at.shift;
      if (!kBwd) continue;
      mean_dy[j] = at.mean_dy;
      slope[j] = at.slope;
    }
    __syncthreads();
  }
};

// Leaves the sums of a block's lines in the workspace. Slabs are in shared memory, `vectors` a row.
template <typename T, bool kStats>
__device__ __forceinline__ void reduce_slab(const BatchNorm& p, int groups, int64_t line_begin,
                                            int num_lines, int64_t first_col, int vectors,
                                            const T* xs, const T* dys, const float* pivots,
                                            float* parts) {
  constexpr int kCount = kBatch<T, kStats>;
  const int strands = num_lines * groups, width = vectors * kVec;
  const int64_t first_row = p.split.begin(line_begin);
  float* const second_parts = parts + strands * width;
  for (int task = threadIdx.x; task < strands * vectors; task += kSlabThreads) {
    const int strand = task / vectors, vec = task - strand * vectors;
    const int of_line = strand / groups, group = strand - of_line * groups;
    const int64_t begin = p.split.begin(line_begin + of_line);
    const int num_rows = static_cast<int>(p.split.begin(line_begin + of_line + 1) - begin);
    const int count = GroupRows(num_rows, groups)[group];
    const int at = (static_cast<int>(begin - first_row) + group) * width + vec * kVec;
    const int step = groups * width;
    float mean[kVec] = {}, first[kVec] = {}, second[kVec] = {};
    if (kStats) {
      const int present = count < kCount ? count : kCount;
      for (int k = 0; k < present; ++k) {
        float x[kVec];
        unpack(load_vec(xs + at + k * step), x);
#pragma unroll
        for (int i = 0; i < kVec; ++i) mean[i] += x[i];
      }
      const float inverse = present > 0 ? 1.0f / present : 0.0f;
#pragma unroll
      for (int i = 0; i < kVec; ++i) mean[i] *= inverse;
    } else {
      read(pivots, vec, mean);
    }
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
      float x[kVec], dy[kVec];
      unpack(load_vec(xs + at + k * step), x);
      if (!kStats) unpack(load_vec(dys + at + k * step), dy);
      add_row<kStats>(x, dy, mean, first, second);
    }
    if (kStats) {
      float from[kVec];
      read(pivots, vec, from);
      leave_statistics(count, mean, from, first, second);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      parts[task * kVec + i] = first[i];
      second_parts[task * kVec + i] = second[i];
    }
  }
  __syncthreads();
  for (int pair = threadIdx.x; pair < num_lines * width; pair += kSlabThreads) {
    const int of_line = pair / width, col = pair - of_line * width;
    const int64_t line = line_begin + of_line;
    const int num_rows = static_cast<int>(p.split.begin(line + 1) - p.split.begin(line));
    const int at = of_line * groups * width + col;
    const float2 merged =
        merge_groups<kStats>(parts + at, second_parts + at, width, groups, num_rows);
    float* out = p.workspace + line * 2 * p.split.width + first_col + col;
    out[0] = merged.x;
    out[p.split.width] = merged.y;
  }
}

// What a channel's elements are computed with, from the results of its reduction; `own` has it of
// backward without the sums. One block writes the results.
template <typename T, bool kBwd>
__device__ __forceinline__ BatchNormChannel finish_slab(const BatchNorm& p,
                                                        const BatchNormCombine& combine,
                                                        int64_t channel, BatchNormChannel own,
                                                        float inv_total, bool writes, float first,
                                                        float second, double exact_second) {
  if (kBwd) {
    set_sums(own, first, second, p.inv_std[channel], inv_total);
    if (!writes) return own;
    p.results[0][channel] = first;
    p.results[1][channel] = second;
    store_param_grads(p, channel, first, exact_second);
    return own;
  }
  const BatchNormCombined all = combined_alone(combine, first, second);
  if (writes) store_combined(combine, channel, all);
  return batch_norm_channel_of<T>(p.params, channel, static_cast<float>(all.mean), all.inv_std);
}

// Results of one vector that is in shared memory; z is that of forward.
template <typename T, bool kBwd, bool kRelu>
__device__ __forceinline__ void write_slab(const BatchNorm& p, const T* x, const T* dy,
                                           const Vec8<T>& z, int64_t index, const float* mean,
                                           const float* scale, const float* shift,
                                           const float* mean_dy, const float* slope) {
  float values[kVec];
  unpack(load_vec(x), values);
  if (kBwd) {
    float grads[kVec];
    unpack(load_vec(dy), grads);
    if (p.dz) store<T>(grads, p.dz, index, kVec, true);
    differentiate(grads, mean, scale, mean_dy, slope, values);
    store<T>(values, p.dx, index, kVec, true);
  } else {
    normalize<kRelu>(z, p.z != nullptr, mean, scale, shift, values);
    store<T>(values, p.y, index, kVec, true);
  }
}

template <typename T, bool kBwd, bool kRelu>
__global__ void __launch_bounds__(kSlabThreads, kSlabBlocks<kBwd>)
    slab_kernel(const BatchNorm p, const BatchNormCombine combine, const SlabPlan plan) {
  constexpr int kCount = kBatch<T, !kBwd>;
  extern __shared__ __align__(16) unsigned char slab_memory[];
  const int rank = static_cast<int>(cluster_rank());
  const int64_t begin = blockIdx.x / plan.ranks * plan.channels;
  const int64_t end = begin + plan.channels < p.c ? begin + plan.channels : p.c;
  const int width = static_cast<int>((end - begin) * p.s), vectors = width / kVec;
  const int64_t cols = p.split.width, first_col = begin * p.s;
  const int64_t lines = p.split.lines, wanted = rank * plan.block_lines;
  const int64_t line_begin = wanted < lines ? wanted : lines;
  const int64_t line_end =
      line_begin + plan.block_lines < lines ? line_begin + plan.block_lines : lines;
  const int64_t first_row = p.split.begin(line_begin);
  const int num_rows = static_cast<int>(p.split.begin(line_end) - first_row);

  T* const xs = reinterpret_cast<T*>(slab_memory);
  T* const dys = reinterpret_cast<T*>(slab_memory + plan.slab_bytes);
  unsigned char* const behind = slab_memory + (kBwd ? 2 : 1) * plan.slab_bytes;
  float* const parts = reinterpret_cast<float*>(behind);
  double* const sums = reinterpret_cast<double*>(behind);
  const SlabColumns<kBwd> columns(behind + plan.parts_bytes, width);

  for (int64_t channel = begin + threadIdx.x; channel < end; channel += kSlabThreads) {
    BatchNormChannel at = {};
    if (kBwd)
      at = batch_norm_channel_of<T>(p.params, channel, p.mean[channel], p.inv_std[channel]);
    else
      at.mean = batch_norm_pivot(p, channel);
    columns.of_channel[channel - begin] = at;
  }
  columns.spread(width, static_cast<int>(p.s));

  // A thread keeps to the columns of one vector, here and in the end.
  const int group = threadIdx.x / vectors, vec = threadIdx.x - group * vectors;
  const int groups = kSlabThreads / vectors, step = groups * width;
  const int64_t global_step = groups * cols;
  const int own_row = group < groups ? group : num_rows;
  float mean[kVec], scale[kVec], shift[kVec];
  read(columns.mean, vec, mean);
  read(columns.scale, vec, scale);
  read(columns.shift, vec, shift);
  int at = own_row * width + vec * kVec;
  int64_t from = (first_row + own_row) * cols + first_col + vec * kVec;
  for (int row = own_row; row < num_rows;) {
    Vec8<T> x[kCount], dy[kCount], z[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (row + k * groups >= num_rows) break;
      const int64_t index = from + k * global_step;
      x[k] = load_vec(static_cast<const T*>(p.x) + index);
      if (kBwd) dy[k] = load_vec(static_cast<const T*>(p.dy) + index);
      if (kBwd && kRelu && p.z) z[k] = load_vec(static_cast<const T*>(p.z) + index);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k, row += groups, at += step, from += global_step) {
      if (row >= num_rows) break;
      store_vec(xs + at, x[k]);
      if (!kBwd) continue;
      if (kRelu) {
        float values[kVec], grads[kVec];
        unpack(x[k], values);
        unpack(dy[k], grads);
        mask<kRelu>(z[k], p.z != nullptr, values, mean, scale, shift, grads);
        pack(grads, &dy[k]);
      }
      store_vec(dys + at, dy[k]);
    }
  }
  __syncthreads();
  reduce_slab<T, !kBwd>(p, plan.groups, line_begin, static_cast<int>(line_end - line_begin),
                        first_col, vectors, xs, dys, columns.mean, parts);
  __syncthreads();
  if (plan.ranks > 1) cluster_sync();

  const float inv_total = kBwd ? inverse_total(p) : 0.0f;
  finish_channels<!kBwd>(p, begin, end, sums,
                         [&](int64_t channel, float first, float second, double exact_second) {
                           BatchNormChannel& own = columns.of_channel[channel - begin];
                           own = finish_slab<T, kBwd>(p, combine, channel, own, inv_total,
                                                      rank == 0, first, second, exact_second);
                         });
  columns.spread(width, static_cast<int>(p.s));
  read(columns.mean, vec, mean);
  read(columns.scale, vec, scale);
  read(columns.shift, vec, shift);
  float mean_dy[kVec], slope[kVec];
  if (kBwd) {
    read(columns.mean_dy, vec, mean_dy);
    read(columns.slope, vec, slope);
  }
  at = own_row * width + vec * kVec;
  from = (first_row + own_row) * cols + first_col + vec * kVec;
  for (int row = own_row; row < num_rows;) {
    constexpr int kLater = kBatch<T, false>;
    Vec8<T> z[kLater];
    if (!kBwd && p.z) {
#pragma unroll
      for (int k = 0; k < kLater; ++k) {
        if (row + k * groups >= num_rows) break;
        z[k] = load_vec(static_cast<const T*>(p.z) + from + k * global_step);
      }
    }
#pragma unroll
    for (int k = 0; k < kLater; ++k, row += groups, at += step, from += global_step) {
      if (row >= num_rows) break;
      write_slab<T, kBwd, kRelu>(p, xs + at, dys + at, z[k], from, mean, scale, shift, mean_dy,
                                 slope);
    }
  }
}

// Chooses how clusters share the data; false if they cannot hold them.
template <bool kBwd>
bool plan_slabs(const BatchNorm& p, int device, SlabPlan* best) {
  constexpr int kTensors = kBwd ? 2 : 1;
  const BatchNormSplit& split = p.split;
  const int64_t item = p.dtype == DType::kFloat32 ? 4 : 2;
  if (p.numel() == 0 || !split.by_columns || split.width % kVec != 0 || !are_aligned(p) ||
      p.numel() * item > kSlabBytes)
    return false;
  const int64_t multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, device);
  const int64_t most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int most_ranks = std::min(kSlabRanks, most_norm_ranks(device));
  int64_t unit = 1;  // channels of whole vectors
  while (unit * p.s % kVec != 0) unit *= 2;
  double best_cost = 0.0;
  for (int64_t channels = unit; channels < 2 * p.c; channels *= 2) {
    const int64_t width = std::min(channels, p.c) * p.s;
    if (width > kSlabThreads * kVec) break;
    for (int ranks = 1; ranks <= most_ranks && ranks <= split.lines; ranks *= 2) {
      SlabPlan plan = {std::min(channels, p.c), (split.lines + ranks - 1) / ranks, ranks};
      plan.groups = kThreads / Columns(p.n, split.width).lanes;
      const int64_t rows = plan.block_lines * split.chunk;
      plan.slab_bytes = rows * width * item;
      const int64_t part_values = plan.block_lines * plan.groups * width * 2;
      plan.parts_bytes =
          std::max<int64_t>(part_values * sizeof(float), kSlabThreads * sizeof(double));
      const int64_t shared = plan.shared_bytes(kBwd, p.s);
      if (shared > most) continue;
      // Bytes that a multiprocessor moves one after the other, and latencies as bytes.
      const int64_t blocks = (p.c + plan.channels - 1) / plan.channels * ranks;
      const int64_t of_each = (blocks + multiprocessors - 1) / multiprocessors;
      const int64_t at_once =
          std::min<int64_t>((most + kReserved) / (shared + kReserved), kSlabBlocks<kBwd>);
      const int64_t rounds = (of_each + at_once - 1) / at_once;
      const double waste = width * item < 32 ? 2.0 : width * item < 64 ? 1.15 : 1.0;
      const double cost = waste * static_cast<double>(of_each * kTensors * plan.slab_bytes) +
                          static_cast<double>(rounds * kSlabRound);
      if (best_cost > 0.0 && cost >= best_cost) continue;
      best_cost = cost;
      *best = plan;
    }
  }
  return best_cost > 0.0;
}

// Steps of a thread through the vectors of one channel's rows.
struct VectorWalk {
  int64_t place, row, vec;

  __device__ VectorWalk(int64_t place, int64_t vectors)
      : place(place), row(place / vectors), vec(place - row * vectors) {}
  __device__ int64_t index(const BatchNorm& p, int64_t channel) const {
    return (row * p.c + channel) * p.s + vec * kVec;
  }
  __device__ void advance(int64_t vectors) {
    place += kThreads;
    vec += kThreads;
    if (vec < vectors) return;
    const int64_t rows = vec / vectors;
    row += rows;
    vec -= rows * vectors;
  }
};

// As slab_kernel, for one channel whose rows are whole vectors, which reduce_rows_kernel sums.
template <typename T, bool kBwd, bool kRelu>
__global__ void __launch_bounds__(kThreads, 2)
    channel_slab_kernel(const BatchNorm p, const BatchNormCombine combine, const SlabPlan plan) {
  constexpr int kCount = kBatch<T, false>, kFirst = kBatch<T, !kBwd>;
  extern __shared__ __align__(16) unsigned char slab_memory[];
  __shared__ Part parts[kThreads];
  __shared__ double sums[kThreads];
  __shared__ BatchNormChannel shared_own;
  const int rank = static_cast<int>(cluster_rank());
  const int64_t channel = blockIdx.x / plan.ranks, vectors = p.split.row_places();
  const int64_t lines = p.split.lines, wanted = rank * plan.block_lines;
  const int64_t line_begin = wanted < lines ? wanted : lines;
  const int64_t line_end =
      line_begin + plan.block_lines < lines ? line_begin + plan.block_lines : lines;
  const int64_t begin = p.split.begin(line_begin), end = p.split.begin(line_end);
  T* const xs = reinterpret_cast<T*>(slab_memory);
  T* const dys = reinterpret_cast<T*>(slab_memory + plan.slab_bytes);

  float mean[kVec], scale[kVec], shift[kVec], mean_dy[kVec], slope[kVec];
  const auto spread = [&](const BatchNormChannel& at) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      mean[i] = at.mean, scale[i] = at.scale, shift[i] = at.shift;
      mean_dy[i] = at.mean_dy, slope[i] = at.slope;
    }
  };
  BatchNormChannel own = {};
  if (kBwd) own = batch_norm_channel_of<T>(p.params, channel, p.mean[channel], p.inv_std[channel]);
  spread(own);
  for (VectorWalk walk(begin + threadIdx.x, vectors); walk.place < end;) {
    Vec8<T> x[kCount], dy[kCount], z[kCount];
    VectorWalk ahead = walk;
#pragma unroll
    for (int k = 0; k < kCount; ++k, ahead.advance(vectors)) {
      if (ahead.place >= end) break;
      const int64_t index = ahead.index(p, channel);
      x[k] = load_vec(static_cast<const T*>(p.x) + index);
      if (kBwd) dy[k] = load_vec(static_cast<const T*>(p.dy) + index);
      if (kBwd && kRelu && p.z) z[k] = load_vec(static_cast<const T*>(p.z) + index);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k, walk.place += kThreads) {
      if (walk.place >= end) break;
      const int at = static_cast<int>(walk.place - begin) * kVec;
      store_vec(xs + at, x[k]);
      if (!kBwd) continue;
      if (kRelu) {
        float values[kVec], grads[kVec];
        unpack(x[k], values);
        unpack(dy[k], grads);
        mask<kRelu>(z[k], p.z != nullptr, values, mean, scale, shift, grads);
        pack(grads, &dy[k]);
      }
      store_vec(dys + at, dy[k]);
    }
    walk = ahead;
  }
  __syncthreads();

  for (int64_t line = line_begin; line < line_end; ++line) {
    const int from = static_cast<int>(p.split.begin(line) - begin + threadIdx.x);
    const int to = static_cast<int>(p.split.begin(line + 1) - begin);
    float first[kVec] = {}, second[kVec] = {};
    int count = 0;
    if (!kBwd) {
      float sum = 0.0f;
      for (int place = from; place < to && count < kFirst; place += kThreads, ++count) {
        float x[kVec];
        unpack(load_vec(xs + place * kVec), x);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum += x[i];
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) mean[i] = sum / static_cast<float>(count * kVec);
      count = 0;
    }
#pragma unroll 4
    for (int place = from; place < to; place += kThreads, ++count) {
      float x[kVec], dy[kVec];
      unpack(load_vec(xs + place * kVec), x);
      if (kBwd) unpack(load_vec(dys + place * kVec), dy);
      add_row<!kBwd>(x, dy, mean, first, second);
    }
    leave_vectors<!kBwd>(p, channel, line, int64_t{count} * kVec, mean[0], first, second, parts);
    __syncthreads();
  }
  if (plan.ranks > 1) cluster_sync();

  const float inv_total = kBwd ? inverse_total(p) : 0.0f;
  finish_channels<!kBwd>(
      p, channel, channel + 1, sums, [&](int64_t, float first, float second, double exact_second) {
        shared_own = finish_slab<T, kBwd>(p, combine, channel, own, inv_total, rank == 0, first,
                                          second, exact_second);
      });
  __syncthreads();
  spread(shared_own);
  for (VectorWalk walk(begin + threadIdx.x, vectors); walk.place < end;) {
    Vec8<T> z[kCount];
    if (!kBwd && p.z) {
      VectorWalk ahead = walk;
#pragma unroll
      for (int k = 0; k < kCount; ++k, ahead.advance(vectors)) {
        if (ahead.place >= end) break;
        z[k] = load_vec(static_cast<const T*>(p.z) + ahead.index(p, channel));
      }
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k, walk.advance(vectors)) {
      if (walk.place >= end) break;
      const int at = static_cast<int>(walk.place - begin) * kVec;
      write_slab<T, kBwd, kRelu>(p, xs + at, dys + at, z[k], walk.index(p, channel), mean, scale,
                                 shift, mean_dy, slope);
    }
  }
}

// As plan_slabs, for channel_slab_kernel.
template <bool kBwd>
bool plan_channel_slabs(const BatchNorm& p, int device, SlabPlan* plan) {
  const BatchNormSplit& split = p.split;
  const int64_t item = p.dtype == DType::kFloat32 ? 4 : 2;
  if (p.numel() == 0 || split.by_columns || p.s % kVec != 0 || !are_aligned(p) ||
      p.numel() * item > kChannelSlabBytes)
    return false;
  const int64_t most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) -
                       kThreads * static_cast<int64_t>(sizeof(Part) + sizeof(double)) - kReserved;
  const int64_t enough = 2 * device_attribute(cudaDevAttrMultiProcessorCount, device);
  const int most_ranks = std::min(kSlabRanks, most_norm_ranks(device));
  bool fits = false;
  for (int ranks = 1; ranks <= most_ranks && ranks <= split.lines; ranks *= 2) {
    if (fits && p.c * plan->ranks >= enough) break;
    const int64_t lines = (split.lines + ranks - 1) / ranks;
    const int64_t bytes = lines * split.chunk * kVec * item;
    if ((kBwd ? 2 : 1) * bytes > most) continue;
    fits = true;
    *plan = {1, lines, ranks, 0, bytes, 0};
  }
  return fits;
}

// Launches the whole of forward or backward where clusters can hold the data; else returns false.
template <bool kBwd>
bool launch_slabs(const BatchNorm& p, const BatchNormCombine& combine, int device,
                  cudaStream_t stream) {
  SlabPlan plan;
  const bool by_columns = plan_slabs<kBwd>(p, device, &plan);
  if (!by_columns && !plan_channel_slabs<kBwd>(p, device, &plan)) return false;
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto kernel = p.relu ? slab_kernel<T, kBwd, true> : slab_kernel<T, kBwd, false>;
    int64_t bytes = plan.shared_bytes(kBwd, p.s);
    if (!by_columns) {
      kernel = p.relu ? channel_slab_kernel<T, kBwd, true> : channel_slab_kernel<T, kBwd, false>;
      bytes = (kBwd ? 2 : 1) * plan.slab_bytes;
    }
    allow_shared(reinterpret_cast<const void*>(kernel));
    const int64_t clusters = (p.c + plan.channels - 1) / plan.channels;
    launch_cluster(kernel, clusters * plan.ranks, by_columns ? kSlabThreads : kThreads, plan.ranks,
                   static_cast<size_t>(bytes), stream, p, combine, plan);
  });
  return true;
}

}  // namespace batch_norm
}  // namespace apex_te
