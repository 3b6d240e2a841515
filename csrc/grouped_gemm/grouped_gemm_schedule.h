// Order in which clusters of two blocks take tiles of groups, known to the device alone.
//
// A tile is kTileM x tile_n of the result. The two blocks of a cluster take tiles that lie one
// below the other and share their part of b; of a last row of tiles without a pair they take tiles
// side by side, which share their part of a.
#pragma once

#include "common/gpu/device.h"
#include "grouped_gemm/grouped_gemm.h"

namespace apex_te {

constexpr int kTileM = 128, kTileK = 128;
constexpr int kStrip = 8;  // tiles of N that are worked on at once, for the L2 cache

#if defined(__CUDACC__) && !defined(__HIP_PLATFORM_AMD__)

__device__ __forceinline__ int tiles_of(int64_t extent, int tile) {
  return static_cast<int>((extent + tile - 1) / tile);
}

struct Tile {
  int group, begin, end;  // rows or columns of the group
  int m, n;               // of the group's tiles
  bool shares_b;
};

__device__ __forceinline__ int pairs_of(int m_tiles, int n_tiles) {
  return m_tiles / 2 * n_tiles + m_tiles % 2 * ((n_tiles + 1) / 2);
}

// A warp's walk through the groups, of which each lane has one of 32.
class Walk {
 public:
  __device__ Walk(const GroupedGemm& g, int tile_n, int rank)
      : groups_(static_cast<int>(g.groups)),
        lane_(static_cast<int>(threadIdx.x % 32)),
        rank_(rank),
        n_tiles_(tiles_of(g.n, tile_n)),
        contracted_m_tiles_(g.contract ? tiles_of(g.m, kTileM) : 0),
        limit_(static_cast<int>(g.contract ? g.k : g.m)),
        places_(g.contract ? -static_cast<int>(kCopyAlign) : -1),
        ends_(g.ends) {
    load(0, 0, 0);
  }

  // The tile of this block whose turn is `turn`, not before the last one's; false behind the last.
  __device__ __forceinline__ bool find(int turn, Tile* tile) {
    int passed;
    while ((passed = __popc(__ballot_sync(0xFFFFFFFFu, pairs_ <= turn))) == 32) {
      if (first_ + 32 >= groups_) return false;
      load(first_ + 32, last_, __shfl_sync(0xFFFFFFFFu, pairs_, 31));
    }
    tile->group = __shfl_sync(0xFFFFFFFFu, group_, passed);
    tile->begin = __shfl_sync(0xFFFFFFFFu, begin_, passed);
    tile->end = __shfl_sync(0xFFFFFFFFu, end_, passed);
    const int m_tiles = m_tiles_of(tile->end - tile->begin);
    int t = turn - (__shfl_sync(0xFFFFFFFFu, pairs_, passed) - pairs_of(m_tiles, n_tiles_));
    const int both = m_tiles / 2;
    tile->shares_b = t < both * n_tiles_;
    if (tile->shares_b) {
      const int strip = t / (both * kStrip), width = min(kStrip, n_tiles_ - strip * kStrip);
      t -= strip * both * kStrip;
      tile->m = t / width * 2 + rank_;
      tile->n = strip * kStrip + t % width;
    } else {
      tile->m = m_tiles - 1;
      tile->n = (t - both * n_tiles_) * 2 + rank_;
    }
    return true;
  }

 private:
  __device__ __forceinline__ int m_tiles_of(int rows) const {
    return contracted_m_tiles_ ? contracted_m_tiles_ : tiles_of(rows, kTileM);
  }

  // The largest of, or the sum over, this lane and those before it.
  template <bool kLargest>
  __device__ __forceinline__ int scan(int value) const {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xFFFFFFFFu, value, step);
      if (lane_ >= step) value = kLargest ? max(value, before) : value + before;
    }
    return value;
  }

  // The 32 groups from `first` on, of which the first begins at `begin`, after as many pairs. Ends
  // that are no partition, which there should not be, are made one of what exists: a tensor copy
  // from a column that is no multiple of 16 bytes would be an illegal instruction.
  __device__ __forceinline__ void load(int first, int begin, int pairs) {
    first_ = first;
    group_ = first + lane_;
    const bool exists = group_ < groups_;
    end_ = max(scan<true>(exists ? min(ends_[group_], limit_) & places_ : 0), begin);
    begin_ = __shfl_up_sync(0xFFFFFFFFu, end_, 1);
    if (lane_ == 0) begin_ = begin;
    last_ = __shfl_sync(0xFFFFFFFFu, end_, 31);
    const int own = exists ? pairs_of(m_tiles_of(end_ - begin_), n_tiles_) : 0;
    pairs_ = pairs + scan<false>(own);
    if (contracted_m_tiles_) sort(exists);
  }

  // Longest first: what is left at the end for a part of the multiprocessors should not take long.
  // All groups of a contraction have as many tiles.
  __device__ __forceinline__ void sort(bool exists) {
    const int size = exists ? end_ - begin_ : -1;
    int place = 0, from = 0;
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      const int other = __shfl_sync(0xFFFFFFFFu, size, i);
      place += other > size || (other == size && i < lane_);
    }
#pragma unroll 1
    for (int i = 0; i < 32; ++i)
      if (__shfl_sync(0xFFFFFFFFu, place, i) == lane_) from = i;
    begin_ = __shfl_sync(0xFFFFFFFFu, begin_, from);
    end_ = __shfl_sync(0xFFFFFFFFu, end_, from);
    group_ = first_ + from;
  }

  const int groups_, lane_, rank_, n_tiles_, contracted_m_tiles_, limit_;
  const int places_;  // the bits of an end where a group may begin
  const int32_t* const ends_;
  int first_, last_;         // group of lane 0, end of the 32 groups
  int group_, begin_, end_;  // the lane's
  int pairs_;                // tiles of a cluster up to the end of the lane's place
};

#endif

}  // namespace apex_te
