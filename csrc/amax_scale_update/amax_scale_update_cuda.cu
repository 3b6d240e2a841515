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
  const int length = static_cast<int>(h.length());
  // A thread has one slot, of every `lanes`-th row.
  const int lanes = kThreads / slots, lane = threadIdx.x / slots, slot = threadIdx.x % slots;
  float* const column = h.history + first + slot;
  const auto at = [&](int row) -> float& { return column[static_cast<int64_t>(row) * stride]; };
  __shared__ uint32_t amax[kBlockSlots];
  __shared__ float staged[kBlockSlots];
  if (lane == 0) {
    const float value = at(0);
    if (magnitude_bits(value) >= 0x7F800000u && p.nonfinite_count) atomicAdd(p.nonfinite_count, 1);
    staged[slot] = value;
    amax[slot] = float_bits(value);
    at(0) = 0.0f;
  }
  __syncthreads();
  const float last = staged[slot];
  const bool rolls = lane < lanes && magnitude_bits(last) < 0x7F800000u && last != 0.0f;
  // Amaxes are never negative: they order as integers. Row 1 leaves the window but still counts.
  uint32_t largest = lane == 0 && rolls && length > 1 ? float_bits(at(1)) : 0;
  for (int begin = 1; begin < length; begin += lanes * kPerThread) {
    float next[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int row = begin + k * lanes + lane;
      next[k] = !rolls || row >= length ? 0.0f : row + 1 < length ? at(row + 1) : last;
      largest = max(largest, float_bits(next[k]));
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int row = begin + k * lanes + lane;
      if (rolls && row < length) at(row) = next[k];
    }
    __syncthreads();
  }
  if (rolls && !p.most_recent) atomicMax(&amax[slot], largest);
  __syncthreads();
  if (lane == 0 && rolls) {
    const float scale = scale_from_amax(bits_float(amax[slot]), h.fp8_max, p.range_factor, p.pow2);
    h.scale[first + slot] = scale;
    h.scale_inv[first + slot] = 1.0f / scale;
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
