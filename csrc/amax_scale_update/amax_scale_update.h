// amax_scale_update: delayed scaling's update of many amax histories at once.
//
// A history is [length, slots]: row 0 is the staging row that casts max into, row 1 the oldest and
// row length - 1 the newest amax. For each slot, with last = history[0]:
//   last is 0 or not finite: history and scale stay, staging is cleared; not finite also adds 1 to
//   nonfinite_count. Otherwise amax = max(last, history[1:]) or last; the history rolls by one and
//   takes last; scale = fp8_max * 2^-margin / amax, infinity becomes the largest float.
#pragma once

#include <cmath>

#include "common/abi/op.h"
#include "common/numerics/codec.h"

constexpr int kSlotBits = 12;  // a layer of 1,023 GEMMs has 3,069 slots
constexpr int kMaxSlots = (1 << kSlotBits) - 1;
constexpr int64_t kMaxHistoryLength = (1 << (32 - kSlotBits)) - 1;

APEX_TE_FUNCTION(amax_scale_update,
                 "histories: f32[l s][each n]!!, scales: f32[s][each n]!!, "
                 "scale_invs: f32[s][each n]!!, fp8_max: float[], nonfinite_count: i32[1]!!?, "
                 "margin: int, most_recent: bool, pow2: bool")

namespace apex_te {

struct AmaxHistory {
  float *history, *scale, *scale_inv;
  float fp8_max;
  uint32_t packed;  // length and slots: the table of one launch is 32 bytes a history
  APEX_TE_HD int64_t length() const { return packed >> kSlotBits; }
  APEX_TE_HD int slots() const { return static_cast<int>(packed & kMaxSlots); }
};

struct AmaxScaleUpdate {
  int count;
  const DLTensor *histories, *scales, *scale_invs;
  const double* fp8_max;
  int32_t* nonfinite_count;
  float range_factor;  // 2^-margin
  bool most_recent, pow2;
};

// New scale from an amax that is finite and above zero.
APEX_TE_HD float scale_from_amax(float amax, float fp8_max, float range_factor, bool pow2) {
  constexpr uint32_t kLargest = 0x7F7FFFFFu, kLargestPower = 0x7F000000u;
  if (pow2) {
    uint32_t bits = float_bits(fp8_max / amax);
    bits = bits < kLargest ? bits : kLargest;
    // A negative margin can leave float's range.
    bits = float_bits(bits_float(bits & 0x7F800000u) * range_factor);
    return bits_float(bits < kLargestPower ? bits : kLargestPower);
  }
  const uint32_t bits = float_bits(fp8_max * range_factor / amax);
  return bits_float(bits < kLargest ? bits : kLargest);
}

inline AmaxScaleUpdate check_amax_scale_update(Args& args, AmaxHistory* (*allocate)(int)) {
  AmaxScaleUpdate p;
  const int index = args.position();
  p.count = args.tensor_list(&p.histories);
  const int scales = args.tensor_list(&p.scales);
  const int scale_invs = args.tensor_list(&p.scale_invs);
  const int values = args.float_list(&p.fp8_max);
  if (scales != p.count || scale_invs != p.count || values != p.count)
    fail(
        kApexTeValueError,
        "%s: scales, scale_invs and fp8_max must have %d entries like histories, got %d, %d and %d",
        args.name(), p.count, scales, scale_invs, values);
  const TensorView nonfinite = args.optional_tensor();
  if (nonfinite) nonfinite.is_scalar(DType::kInt32);
  p.nonfinite_count = nonfinite.data<int32_t>();
  const int64_t margin = args.integer();
  if (margin < -64 || margin > 64)
    fail(kApexTeValueError, "%s: margin must be from -64 to 64, got %lld", args.name(),
         static_cast<long long>(margin));
  p.range_factor = std::ldexp(1.0f, static_cast<int>(-margin));
  p.most_recent = args.boolean();
  p.pow2 = args.boolean();
  AmaxHistory* table = allocate(p.count);
  for (int i = 0; i < p.count; ++i) {
    const TensorView history = args.list_item(p.histories, index, i);
    history.has_dtype({DType::kFloat32}).has_ndim(2).is_dense();
    const int64_t length = history.size(0), slots = history.size(1);
    if (length < 1 || length > kMaxHistoryLength || slots < 1 || slots > kMaxSlots)
      history.refuse(kApexTeValueError, "be [1 to 2^20 - 1, 1 to 4095]", "another shape");
    const TensorView scale = args.list_item(p.scales, index + 1, i);
    const TensorView scale_inv = args.list_item(p.scale_invs, index + 2, i);
    scale.has_dtype({DType::kFloat32}).has_shape({slots}).is_dense();
    scale_inv.has_dtype({DType::kFloat32}).has_shape({slots}).is_dense();
    table[i] = {history.data<float>(), scale.data<float>(), scale_inv.data<float>(),
                static_cast<float>(p.fp8_max[i]),
                static_cast<uint32_t>(length << kSlotBits | slots)};
  }
  return p;
}

}  // namespace apex_te
