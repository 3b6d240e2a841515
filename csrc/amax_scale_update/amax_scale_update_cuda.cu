// CUDA kernel of amax_scale_update: one block for 64 slots of a history, up to 1000 histories a
// launch, whose table travels in the kernel's parameters, so that no copy to the device is needed.
// The host copies all of a kernel's parameters on each launch, so that there is a kernel for each
// size of table.
#include <vector>

#include "amax_scale_update/amax_scale_update.h"
#include "common/gpu/device.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 16;
constexpr int kBlockSlots = 64;
constexpr int kTableSize = 1000;  // of the largest table

template <int kSize>
struct Params {
  AmaxHistory table[kSize];
  int32_t* nonfinite_count;
  float range_factor;
  bool most_recent, pow2;
};
static_assert(sizeof(AmaxHistory) == 32 && sizeof(Params<kTableSize>) <= 32764,
              "kernel parameter limit");

thread_local std::vector<AmaxHistory> g_table;

AmaxHistory* allocate(int count) {
  g_table.resize(count);
  return g_table.data();
}

template <int kSize>
__global__ void __launch_bounds__(kThreads)
    amax_scale_update_kernel(const __grid_constant__ Params<kSize> p) {
  const AmaxHistory h = p.table[blockIdx.x];
  const int first = static_cast<int>(blockIdx.y) * kBlockSlots, stride = h.slots();
  const int slots = min(kBlockSlots, stride - first);
  if (slots <= 0) return;
  const int total = static_cast<int>(h.length()) * slots;  // of this block, below 2^26
  float *const scales = h.scale + first, *const scale_invs = h.scale_inv + first;
  const auto at = [&](int i) -> float& {
    return h.history[static_cast<int64_t>(i / slots) * stride + first + i % slots];
  };
  __shared__ uint32_t amax[kBlockSlots];
  __shared__ float last[kBlockSlots];
  __shared__ bool rolls[kBlockSlots];
  if (threadIdx.x < slots) {
    const float staged = at(threadIdx.x);
    const bool is_finite = magnitude_bits(staged) < 0x7F800000u;
    last[threadIdx.x] = staged;
    rolls[threadIdx.x] = is_finite && staged != 0.0f;
    amax[threadIdx.x] = float_bits(staged);
    at(threadIdx.x) = 0.0f;
    if (!is_finite && p.nonfinite_count) atomicAdd(p.nonfinite_count, 1);
  }
  __syncthreads();
  // Amaxes are never negative, so they order as integers and the maximum is exact in any order.
  for (int begin = slots; begin < total; begin += kThreads * kPerThread) {
    float next[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int i = begin + k * kThreads + threadIdx.x;
      next[k] = i < total ? (i + slots < total ? at(i + slots) : last[i % slots]) : 0.0f;
      if (i < total && !p.most_recent) {
        // Row 1 leaves the window but still counts; later rows are seen as their successor's value.
        const float seen = i < 2 * slots ? fmaxf(at(i), next[k]) : next[k];
        if (rolls[i % slots]) atomicMax(&amax[i % slots], float_bits(seen));
      }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int i = begin + k * kThreads + threadIdx.x;
      if (i < total && rolls[i % slots]) at(i) = next[k];
    }
    __syncthreads();
  }
  if (threadIdx.x < slots && rolls[threadIdx.x]) {
    const float scale =
        scale_from_amax(bits_float(amax[threadIdx.x]), h.fp8_max, p.range_factor, p.pow2);
    scales[threadIdx.x] = scale;
    scale_invs[threadIdx.x] = 1.0f / scale;
  }
}

// Launches the kernel for `count` histories, kSize at most, that begin at `table`.
template <int kSize>
void launch(const AmaxScaleUpdate& u, const AmaxHistory* table, int count, cudaStream_t stream) {
  Params<kSize> p;
  p.nonfinite_count = u.nonfinite_count;
  p.range_factor = u.range_factor;
  p.most_recent = u.most_recent;
  p.pow2 = u.pow2;
  memcpy(p.table, table, count * sizeof(AmaxHistory));
  int slots = 1;
  for (int i = 0; i < count; ++i) slots = table[i].slots() > slots ? table[i].slots() : slots;
  const dim3 grid(count, (slots + kBlockSlots - 1) / kBlockSlots);
  amax_scale_update_kernel<kSize><<<grid, kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "amax_scale_update");
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(amax_scale_update) {
  using namespace apex_te;
  const AmaxScaleUpdate u = check_amax_scale_update(args, allocate);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  for (int begin = 0; begin < u.count; begin += kTableSize) {
    const AmaxHistory* table = g_table.data() + begin;
    const int count = u.count - begin < kTableSize ? u.count - begin : kTableSize;
    const auto run = count <= 8 ? launch<8> : count <= 64 ? launch<64> : launch<kTableSize>;
    run(u, table, count, stream);
  }
}
