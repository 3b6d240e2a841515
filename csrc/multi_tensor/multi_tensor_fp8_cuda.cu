// CUDA kernels of optimizer steps that also cast the parameters.
//
// Tiles of 128 x 128 (common/gpu/fp8_tile.h), one a block: a thread updates 8 rows of 8 columns and
// holds them, as stored, until it has their scale and writes both copies. So a cast costs the bytes
// it writes, and reads none.
#include <algorithm>

#include "common/gpu/block_128x128.h"
#include "multi_tensor/multi_tensor_fp8.h"
#include "multi_tensor/multi_tensor_launch.h"

namespace apex_te {
namespace {

using Tile = BlockTile;
constexpr int kTileThreads = Tile::kThreads;
constexpr int kEntries = 32;  // parameters of a launch

struct Entry {
  void *param, *grad;
  float *m, *v, *master;
  uint8_t *rowwise, *columnwise;
  float *rowwise_scale_inv, *columnwise_scale_inv;
  const float* scale;
  float* amax;
  int32_t rows, cols, first_tile;
  uint32_t dtypes;  // as Row's
};
// By value, as Table is. Block b works on tile b - first_tile of its entry.
struct Entries {
  Entry of[kEntries];
  int32_t count;
  BlockRule rule;
};
static_assert(sizeof(Entries) + sizeof(Moments) + sizeof(DeviceScalars) + sizeof(StepScalars) <=
                  kSmallTable,
              "a kernel's parameters");

// The 8 elements at i of a row after their update, as they are stored.
template <typename T>
__device__ __forceinline__ Vec8<T> update_row(const Entry& e, const Moments& moments,
                                              const DeviceScalars& device, const StepScalars& s,
                                              int64_t i) {
  const int param_dtype = sizeof(T) == 4 ? 0 : static_cast<int>(e.dtypes & 3u);
  const int grad_dtype = static_cast<int>(e.dtypes >> 2 * kGrad & 3u);
  const Raw<kVec> m = load_raw<kVec, true>(e.m, 0, i, kVec);
  const Raw<kVec> v = load_raw<kVec, true>(e.v, 0, i, kVec);
  const void* weight = e.master ? e.master : e.param;
  const int weight_dtype = e.master ? 0 : param_dtype;
  const Raw<kVec> p = load_raw<kVec, true>(weight, weight_dtype, i, kVec);
  const Raw<kVec> g = load_raw<kVec, true>(e.grad, grad_dtype, i, kVec);
  float mv[kVec], vv[kVec], pv[kVec], gv[kVec];
  unpack(m, 0, mv);
  unpack(v, 0, vv);
  unpack(p, weight_dtype, pv);
  unpack(g, grad_dtype, gv);
#pragma unroll
  for (int k = 0; k < kVec; ++k) adam_element(moments, s, gv[k], &pv[k], &mv[k], &vv[k]);
  store_values<kVec, true>(e.m, 0, i, kVec, mv);
  store_values<kVec, true>(e.v, 0, i, kVec, vv);
  if (e.master) store_values<kVec, true>(e.master, 0, i, kVec, pv);
  if (device.unscale_grads) {
    const float factor = *device.inv_scale;
#pragma unroll
    for (int k = 0; k < kVec; ++k) gv[k] *= factor;
    store_values<kVec, true>(e.grad, grad_dtype, i, kVec, gv);
  }
  Vec8<T> stored;
  pack(pv, &stored);
  store_vec(static_cast<T*>(e.param) + i, stored);
  return stored;
}

// Casts with a scale that is known: a row's codes as soon as it is updated.
template <typename T>
struct KnownScale {
  struct Shared {
    __align__(16) uint2 tile[Tile::kSharedWords];
    uint32_t warp_amaxes[kTileThreads / 32];
  };
  uint2 codes[kVec];
  float scale;
  uint32_t amax = 0;
  __device__ __forceinline__ explicit KnownScale(const Entry& e) : scale(*e.scale) {}
  __device__ __forceinline__ void add(int r, const Vec8<T>& row) {
    float values[kVec];
    unpack(row, values);
    fold_amax(row, amax);
    codes[r] = encode_values<E4M3>(values, scale);
  }
  __device__ __forceinline__ void finish(const Entry& e, const BlockRule&, const Tile::Place& at,
                                         bool is_whole, Shared& shared) {
    const uint32_t seen = amax_so_far(e.amax);
    is_whole ? Tile::store_rows_whole(e.rowwise, e.cols, at, codes)
             : Tile::store_rows<true>(e.rowwise, e.cols, at, codes);
    Tile::stage_columns(codes, shared.tile);
    stage_amax(amax_bits(T{}, amax), shared.warp_amaxes);
    __syncthreads();
    is_whole ? Tile::store_columns_whole(e.columnwise, e.rows, at, shared.tile)
             : Tile::store_columns<true>(e.columnwise, e.rows, at, shared.tile);
    finish_amax<kTileThreads>(e.amax, seen, shared.warp_amaxes);
  }
};

// Casts with the tile's own scale, which needs all of it.
template <typename T, bool kDivides>
struct OwnScale {
  using Shared = Block128x128Shared;
  Vec8<T> held[kVec];
  __device__ __forceinline__ explicit OwnScale(const Entry&) {}
  __device__ __forceinline__ void add(int r, const Vec8<T>& row) { held[r] = row; }
  __device__ __forceinline__ void finish(const Entry& e, const BlockRule& rule,
                                         const Tile::Place& at, bool is_whole, Shared& shared) {
    BlockCast p = {};
    p.rows = e.rows;
    p.cols = e.cols;
    p.columnwise_ld = p.rowwise_rows = e.rows;
    p.rowwise = e.rowwise;
    p.columnwise = e.columnwise;
    p.rowwise_scale_inv = e.rowwise_scale_inv;
    p.columnwise_scale_inv = e.columnwise_scale_inv;
    p.block_rows = kBlock;
    p.rule = rule;
    cast_128x128<T>(p, at, true, is_whole, OneFormat<E4M3, kDivides>{}, held, shared);
  }
};

template <typename T, typename Cast>
__global__ void __launch_bounds__(kTileThreads, 2)
    multi_tensor_adam_cast_kernel(const __grid_constant__ Entries entries,
                                  const __grid_constant__ Moments moments,
                                  const __grid_constant__ DeviceScalars device,
                                  const __grid_constant__ StepScalars host_scalars) {
  if (device.found_inf.is_set()) return;
  __shared__ typename Cast::Shared shared;
  const int block = blockIdx.x;
  int index = entries.count - 1;
  while (entries.of[index].first_tile > block) --index;
  const Entry& e = entries.of[index];
  const bool on_device = device.lr || device.step || device.inv_scale;
  const StepScalars s = on_device ? shared_scalars(moments, device) : host_scalars;
  const Tile::Place at(e.rows, e.cols, block - e.first_tile);
  Cast cast(e);
#pragma unroll
  for (int r = 0; r < kVec; ++r) {
    const int64_t row = at.row + r;
    Vec8<T> stored = {};
    if (row < at.rows && at.col < at.cols)
      stored = update_row<T>(e, moments, device, s, row * at.cols + at.col);
    cast.add(r, stored);
  }
  cast.finish(e, entries.rule, at, at.is_whole(), shared);
}

// Before the tiles: the inverse scales, and amaxes of 0, to which the tiles add.
__global__ void __launch_bounds__(kEntries)
    multi_tensor_begin_casts_kernel(const __grid_constant__ Entries entries, const Flag found_inf) {
  if (found_inf.is_set() || static_cast<int>(threadIdx.x) >= entries.count) return;
  const Entry& e = entries.of[threadIdx.x];
  *e.amax = 0.0f;
  *e.rowwise_scale_inv = 1.0f / *e.scale;
}

// Parameters of one dtype, for which the cast is compiled, in launches of kEntries.
template <typename T, typename Cast>
void launch_dtype(const AdamFP8& p, DType dtype, const StepScalars& scalars, cudaStream_t stream) {
  Entries entries = {};
  entries.rule = p.rule;
  int64_t tiles = 0;
  const auto launch = [&] {
    if (!entries.count) return;
    const DeviceScalars& device = p.adam.device;
    if (entries.of[0].amax)
      multi_tensor_begin_casts_kernel<<<1, kEntries, 0, stream>>>(entries, device.found_inf);
    multi_tensor_adam_cast_kernel<T, Cast>
        <<<static_cast<unsigned>(tiles), kTileThreads, 0, stream>>>(entries, p.adam.moments, device,
                                                                    scalars);
    check_cuda(cudaGetLastError(), "multi_tensor_adam");
    entries.count = 0;
    tiles = 0;
  };
  for (const FP8Row& f : *p.rows) {
    if (f.row.dtype(kParam) != dtype) continue;
    const int64_t count = Tile::num_tiles(f.rows, f.cols);
    if (std::max({f.rows, f.cols, count}) > 0x7FFFFFFF)
      fail(kApexTeUnsupported, "multi_tensor_adam: params must have fewer than 2^31 rows");
    if (entries.count == kEntries || tiles + count > 0x7FFFFFFF) launch();
    if (dtype != DType::kFloat32) entries.rule = f.block_cast(p.rule).rule;
    Entry& e = entries.of[entries.count++];
    e = {f.row.data[kParam],
         f.row.data[kGrad],
         static_cast<float*>(f.row.data[kExpAvg]),
         static_cast<float*>(f.row.data[kExpAvgSq]),
         static_cast<float*>(f.row.data[kMaster]),
         f.rowwise,
         f.columnwise,
         f.rowwise_scale_inv,
         f.columnwise_scale_inv,
         f.scale,
         f.amax,
         static_cast<int32_t>(f.rows),
         static_cast<int32_t>(f.cols),
         static_cast<int32_t>(tiles),
         f.row.dtypes};
    tiles += count;
  }
  launch();
}

template <template <typename> class Cast>
void launch_casts(const AdamFP8& p, cudaStream_t stream) {
  const StepScalars scalars = host_scalars(p.adam.moments, p.adam.device);
  launch_dtype<float, Cast<float>>(p, DType::kFloat32, scalars, stream);
  launch_dtype<Half, Cast<Half>>(p, DType::kFloat16, scalars, stream);
  launch_dtype<BFloat16, Cast<BFloat16>>(p, DType::kBFloat16, scalars, stream);
}

template <typename T>
using MultipliedByOwn = OwnScale<T, false>;
template <typename T>
using DividedByOwn = OwnScale<T, true>;

constexpr int kKept = 64;  // scales of a launch
struct KeptScales {
  KeptScale of[kKept];
  int32_t count;
};
__global__ void __launch_bounds__(kKept)
    multi_tensor_kept_scales_kernel(const __grid_constant__ KeptScales scales) {
  if (static_cast<int>(threadIdx.x) < scales.count) check_kept(scales.of[threadIdx.x]);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(multi_tensor_adam_fp8) {
  using namespace apex_te;
  const AdamFP8 p = check_adam_with_cast(args, false);
  const DeviceGuard guard(args.device_id());
  launch_casts<KnownScale>(p, static_cast<cudaStream_t>(args.stream()));
}

APEX_TE_DEFINE(multi_tensor_adam_block) {
  using namespace apex_te;
  const AdamFP8 p = check_adam_with_cast(args, true);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  p.rule.divides ? launch_casts<DividedByOwn>(p, stream) : launch_casts<MultipliedByOwn>(p, stream);
}

APEX_TE_DEFINE(multi_tensor_kept_scales) {
  using namespace apex_te;
  const std::vector<KeptScale>& all = check_kept_scales(args);
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  KeptScales scales;
  for (size_t begin = 0; begin < all.size(); begin += kKept) {
    scales.count = static_cast<int>(std::min<size_t>(kKept, all.size() - begin));
    std::copy_n(all.begin() + begin, scales.count, scales.of);
    multi_tensor_kept_scales_kernel<<<1, kKept, 0, stream>>>(scales);
    check_cuda(cudaGetLastError(), "multi_tensor_kept_scales");
  }
}
