// peer_exchange: bytes written to the memory of GPUs of the same host, and the sum of what arrived.
//
// A buffer begins with a flag (uint32) for each rank, the number of the last exchange in which that
// rank's bytes arrived whole; behind kPeerHeader bytes there are a piece of every rank, by rank.
// Numbers grow by one and may wrap.
#pragma once

#include "common/abi/op.h"

// Copies `source` to where the pieces of rank `rank` begin in `targets`, buffers of peers, by the
// copy engines on the stream `side`, after what `fork` (an event) recorded on this stream; then
// sets its flag there. `own`: a buffer that gets the bytes, too, without a flag. `sent`: an event
// recorded behind all of it.
APEX_TE_FUNCTION(peer_send,
                 "source: Tensor, targets: Tensor![], own: Tensor!?, rank: int, number: int, "
                 "side: int, fork: int, sent: int",
                 "cuda")
// The stream waits until `rank` has set its flag in `buffer`; a time-out is a device-side assert.
APEX_TE_FUNCTION(peer_await, "buffer: Tensor, rank: int, number: int, timeout_ms: int", "cuda")
// out = sum over ranks, in float32 and by rank, of the pieces of `buffer`, once all flags but that
// of `rank` are set.
APEX_TE_FUNCTION(peer_sum,
                 "buffer: u8[b], ranks: int, rank: int, number: int, timeout_ms: int, "
                 "out: T[*s]!",
                 "cuda")
// The stream waits for an event.
APEX_TE_FUNCTION(peer_join, "buffer: Tensor, sent: int", "cuda")

namespace apex_te {

constexpr int64_t kPeerHeader = 512;
constexpr int kMaxPeers = kPeerHeader / sizeof(uint32_t);

struct PeerBuffer {
  uint8_t* data;
  int64_t size;

  explicit PeerBuffer(const TensorView& buffer) {
    buffer.has_dtype({DType::kUInt8}).has_ndim(1).is_dense();
    data = buffer.data<uint8_t>();
    size = buffer.size(0);
  }
  // Begin of the piece of `rank`; pieces have `bytes` each.
  uint8_t* piece(int64_t rank, int64_t bytes) const {
    if (rank < 0 || rank >= kMaxPeers || kPeerHeader + (rank + 1) * bytes > size)
      fail(kApexTeValueError,
           "peer_exchange: a buffer of %lld bytes must hold the piece of rank %lld, of %lld bytes",
           static_cast<long long>(size), static_cast<long long>(rank),
           static_cast<long long>(bytes));
    return data + kPeerHeader + rank * bytes;
  }
  uint32_t* flag(int64_t rank) const {
    piece(rank, 0);
    return reinterpret_cast<uint32_t*>(data) + rank;
  }
};

struct PeerSum {
  const uint8_t* pieces;
  const uint32_t* flags;
  int64_t numel;
  int ranks, rank;
  uint32_t number;
  uint64_t timeout_ns;
  DType dtype;
  void* out;
};

inline PeerSum check_peer_sum(Args& args) {
  const PeerBuffer buffer(args.tensor());
  const int64_t ranks = args.integer(), rank = args.integer();
  const uint32_t number = static_cast<uint32_t>(args.integer());
  const uint64_t timeout_ns = static_cast<uint64_t>(args.integer()) * 1000000u;
  const TensorView out = args.tensor();
  out.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).is_dense();
  const int64_t bytes = out.numel() * (out.dtype() == DType::kFloat32 ? 4 : 2);
  buffer.piece(ranks - 1, bytes);
  buffer.flag(rank);
  return {buffer.piece(0, bytes), buffer.flag(0), out.numel(), static_cast<int>(ranks),
          static_cast<int>(rank), number,         timeout_ns,  out.dtype(),
          out.data<void>()};
}

}  // namespace apex_te
