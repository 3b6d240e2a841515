// Forward of the norms for many rows: a persistent grid through which the rows stream.
//
// A warp has a row, or a part of a long one, of up to 8 KB: it takes it from shared memory into
// registers, lets the copy of its next row begin, and normalises. No load waits for a reduction
// and, but for the statistics of long rows, no warp for another. Rows whose parameters do not fit in
// a block's shared memory go to a cluster of blocks. Weight and bias stay in shared memory, widened.
#pragma once

#include "common/async_copy.h"
#include "common/norm_fwd_cuda.h"

namespace apex_te {

#ifndef RING_WARPS
#define RING_WARPS 16
#endif
#ifndef RING_BYTES
#define RING_BYTES 32
#endif
constexpr int kRingWarps = RING_WARPS;
constexpr int kRingThreads = kRingWarps * 32;
constexpr int kMaxRingSlots = 8;
template <typename T>
constexpr int kRingVecs = RING_BYTES / sizeof(T);  // of a thread: 64 registers

struct RingShape {
  int warps;  // of a row in a block
  int vecs;   // of a row in a warp
  int slots;  // rows of a warp in shared memory
};

// The larger of two magnitudes; NaN is the largest.
__device__ __forceinline__ float larger(float amax, float value) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(amax), "f"(fabsf(value)));
  return result;
}

template <typename T, bool kLayerNorm>
__global__ void __launch_bounds__(kRingThreads, 1)
    norm_ring_kernel(const NormFwd p, const RingShape shape) {
  constexpr int kVecs = kRingVecs<T>;
  extern __shared__ __align__(16) unsigned char ring_memory[];
  const RowRanks ranks{static_cast<int>(cluster_size()), static_cast<int>(cluster_rank())};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / shape.warps, w = warp - group * shape.warps;
  const int groups = kRingWarps / shape.warps;
  const int parts = ranks.count * shape.warps, part = ranks.rank * shape.warps + w;
  const int total_vecs = static_cast<int>(p.cols / kVec);
  const auto vecs_of = [&](int i) { return min(max(total_vecs - i * shape.vecs, 0), shape.vecs); };
  const int vecs = vecs_of(part), block_vecs = shape.warps * shape.vecs;

  // Shared memory: the warps' slots; gamma and bias, 4 of each 8 columns in one plane and 4 in
  // another; a barrier for each slot and two for each group's exchange of statistics; these.
  const int slot_bytes = shape.vecs * kVec * static_cast<int>(sizeof(T));
  T* slots = reinterpret_cast<T*>(ring_memory + warp * shape.slots * slot_bytes);
  float4* gammas = reinterpret_cast<float4*>(ring_memory + kRingWarps * shape.slots * slot_bytes);
  float4* biases = gammas + (p.params.weight ? 2 * block_vecs : 0);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(biases + (p.params.bias ? 2 * block_vecs : 0));
  uint64_t* full = barriers + warp * shape.slots;
  uint64_t* exchange = barriers + kRingWarps * shape.slots + 2 * group;
  float2* statistics = reinterpret_cast<float2*>(barriers + kRingWarps * (shape.slots + 2)) +
                       group * 2 * parts;  // mean and sum of squares of each part, of two rows

  const int64_t line = blockIdx.x / ranks.count, lines = gridDim.x / ranks.count;
  const int64_t stride = lines * groups;
  int64_t row = group < groups ? line + group * lines : p.rows;
  const int64_t col0 = static_cast<int64_t>(part) * shape.vecs * kVec;
  const auto refill = [&](int64_t from, int slot) {
    if (from < p.rows && vecs > 0)
      copy_chunk(slots + slot * shape.vecs * kVec,
                 static_cast<const T*>(p.x) + from * p.cols + col0,
                 vecs * kVec * static_cast<int>(sizeof(T)), full + slot);
  };
  if (lane == 0)
    for (int s = 0; s < shape.slots; ++s) barrier_init(full + s, kCopyArrivals);
  if (lane == 0 && w == 0 && group < groups) {
    const unsigned arrivals = ranks.count > 1 ? 1 : shape.warps;
    barrier_init(exchange, arrivals);
    barrier_init(exchange + 1, arrivals);
  }
  __syncwarp();
  for (int s = 0; s < shape.slots; ++s) refill(row + s * stride, s);
  const uint32_t seen = amax_so_far(p.amax);
  for (int v = threadIdx.x; v < block_vecs; v += kRingThreads) {
    const int64_t col = (static_cast<int64_t>(ranks.rank) * block_vecs + v) * kVec;
    if (col >= p.cols) break;
    float values[kVec];
    if (p.params.weight) {
      load_gamma<T>(p.params, col, values);
      gammas[v] = make_float4(values[0], values[1], values[2], values[3]);
      gammas[v + block_vecs] = make_float4(values[4], values[5], values[6], values[7]);
    }
    if (p.params.bias) {
      load_bias<T>(p.params, col, values);
      biases[v] = make_float4(values[0], values[1], values[2], values[3]);
      biases[v + block_vecs] = make_float4(values[4], values[5], values[6], values[7]);
    }
  }
  if (ranks.count > 1)
    cluster_sync();  // every block of the cluster has begun
  else
    __syncthreads();

  const float count = static_cast<float>(p.cols), scale = p.scale ? *p.scale : 1.0f;
  const float warp_count = static_cast<float>(vecs * kVec);
  float amax = 0.0f;
  int slot = 0, turn = 0;
  unsigned phase = 0, exchange_phase = 0;
  for (; row < p.rows; row += stride) {
    Vec8<T> in[kVecs];
    if (vecs > 0) barrier_wait(full + slot, phase);
    const T* x = slots + (slot * shape.vecs + lane) * kVec;
#pragma unroll
    for (int k = 0; k < kVecs; ++k)
      in[k] = k * 32 + lane < vecs ? load_vec(x + k * 32 * kVec) : Vec8<T>{};
    __syncwarp();
    refill(row + shape.slots * stride, slot);
    if (++slot == shape.slots) slot = 0, phase ^= 1;

    // Mean of the warp's columns and the sum of squares around it; of rms_norm around zero.
    float mean = 0.0f, values[kVec];
    if (kLayerNorm) {
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        if (k * 32 >= vecs) break;
        unpack(in[k], values);
        sum += ((values[0] + values[1]) + (values[2] + values[3])) +
               ((values[4] + values[5]) + (values[6] + values[7]));
      }
      sum = warp_sum(sum);
      if (vecs > 0) mean = sum / warp_count;
      keep_packed(in);
    }
    constexpr int kSums = kCentredSums<T, kLayerNorm>;
    float sums[2][kSums] = {};
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (k * 32 + lane >= vecs) break;
      unpack(in[k], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        add_centred(kLayerNorm ? values[i] - mean : values[i], sums[i % 2]);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[0][i] = warp_sum(sums[0][i] + sums[1][i]);
    if (vecs > 0) correct_mean(sums[0], warp_count, &mean);
    float squares = sums[0][0];
    keep_packed(in);

    if (parts > 1) {
      float2* shared = statistics + turn * parts;
      if (ranks.count > 1) {
        if (w == 0 && lane == 0) barrier_expect(exchange + turn, parts * 8);
        if (lane < ranks.count)
          store_remote_async(shared + part, exchange + turn, lane, mean, squares);
      } else if (lane == 0) {
        shared[part] = make_float2(mean, squares);
        barrier_arrive(exchange + turn);
      }
      barrier_wait(exchange + turn, exchange_phase);
      exchange_phase ^= turn;
      turn ^= 1;
      float total = 0.0f;
      if (kLayerNorm) {
        const float some = shared[0].x;
        for (int i = lane; i < parts; i += 32)
          total = fmaf(shared[i].x - some, static_cast<float>(vecs_of(i) * kVec), total);
        mean = some + warp_sum(total) / count;
        total = 0.0f;
      }
      for (int i = lane; i < parts; i += 32) {
        const float2 other = shared[i];
        const float off = kLayerNorm ? other.x - mean : 0.0f;
        total += kLayerNorm ? fmaf(off * off, static_cast<float>(vecs_of(i) * kVec), other.y)
                            : other.y;
      }
      squares = warp_sum(total);
    }
    const float rstd = rstd_of(squares, count, p.eps);
    if (part == 0 && lane == 0) {
      if (kLayerNorm) p.mean[row] = mean;
      p.rstd[row] = rstd;
    }
    if (!p.y && !p.scale) continue;
    const int64_t to = row * p.cols + col0 + lane * kVec;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      if (k * 32 + lane >= vecs) break;
      unpack(in[k], values);
      const int at = w * shape.vecs + k * 32 + lane;
      const float4 ones = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
      const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const float4 g0 = p.params.weight ? gammas[at] : ones;
      const float4 g1 = p.params.weight ? gammas[at + block_vecs] : ones;
      const float4 b0 = kLayerNorm && p.params.bias ? biases[at] : zeros;
      const float4 b1 = kLayerNorm && p.params.bias ? biases[at + block_vecs] : zeros;
      const float gamma[kVec] = {g0.x, g0.y, g0.z, g0.w, g1.x, g1.y, g1.z, g1.w};
      const float bias[kVec] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
      normalize<kLayerNorm>(values, gamma, bias, mean, rstd);
      if (p.y) {
        Vec8<T> out;
        pack(values, &out);
        store_vec(static_cast<T*>(p.y) + to + k * 32 * kVec, out);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) amax = larger(amax, values[i]);
        const uint2 codes = encode_as(p.fp8, values, scale);
        if (p.rowwise) *reinterpret_cast<uint2*>(p.rowwise + to + k * 32 * kVec) = codes;
      }
    }
  }
  if (p.scale) finish_fp8(p, magnitude_bits(amax), seen);
}

struct RingPlan {
  RingShape shape;
  int64_t ranks;
  size_t shared_bytes;
};

// The fewest blocks to a row whose shared memory holds a slot for each warp and the parameters.
template <typename T>
bool plan_norm_ring(const NormFwd& p, int device, RingPlan* plan) {
  const int64_t total = p.cols / kVec, params = (p.params.weight ? 1 : 0) + (p.params.bias ? 1 : 0);
  const int64_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - 256;
  const int64_t max_ranks = has_clusters(device) ? kMaxNormRanks : 1;
  for (int64_t ranks = 1; ranks <= max_ranks; ranks *= 2) {
    const int64_t slice = (total + ranks - 1) / ranks;
    const int64_t warps = (slice + 32 * kRingVecs<T> - 1) / (32 * kRingVecs<T>);
    if (warps > kRingWarps) continue;
    const int64_t vecs = (slice + warps - 1) / warps;
    const int64_t fixed = warps * vecs * kVec * 4 * params + kRingWarps * 16 +
                          kRingWarps / warps * ranks * warps * 16;
    const int64_t slot = kRingWarps * (vecs * kVec * static_cast<int64_t>(sizeof(T)) + 8);
    const int64_t slots = std::min<int64_t>((limit - fixed) / slot, kMaxRingSlots);
    if (fixed > limit || slots < 1) continue;
    plan->shape = {static_cast<int>(warps), static_cast<int>(vecs), static_cast<int>(slots)};
    plan->ranks = ranks;
    plan->shared_bytes = static_cast<size_t>(fixed + slots * slot);
    return true;
  }
  return false;
}

template <typename T, bool kLayerNorm>
void launch_norm_ring(const NormFwd& p, const RingPlan& plan, int device, cudaStream_t stream) {
  const auto kernel = norm_ring_kernel<T, kLayerNorm>;
  const void* address = reinterpret_cast<const void*>(kernel);
  check_cuda(cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(plan.shared_bytes)),
             "cudaFuncSetAttribute");
  const int64_t groups = kRingWarps / plan.shape.warps;
  const int64_t lines =
      std::min((p.rows + groups - 1) / groups,
               max_active_clusters(address, kRingThreads, static_cast<int>(plan.ranks),
                                   plan.shared_bytes, device));
  launch_cluster(kernel, lines * plan.ranks, kRingThreads, static_cast<int>(plan.ranks),
                 plan.shared_bytes, stream, p, plan.shape);
}

}  // namespace apex_te
