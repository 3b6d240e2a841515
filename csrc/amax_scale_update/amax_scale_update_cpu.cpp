// CPU kernel of amax_scale_update.
#include <vector>

#include "amax_scale_update/amax_scale_update.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

thread_local std::vector<AmaxHistory> g_table;

AmaxHistory* allocate(int count) {
  g_table.resize(count);
  return g_table.data();
}

void update_slot(const AmaxHistory& h, int slot, const AmaxScaleUpdate& p) {
  const int64_t slots = h.slots(), length = h.length();
  float* column = h.history + slot;
  const float last = column[0];
  column[0] = 0.0f;
  if (last == 0.0f) return;
  if (!std::isfinite(last)) {
    if (p.nonfinite_count) ++*p.nonfinite_count;
    return;
  }
  float amax = last;
  for (int64_t i = 1; i < length; ++i) {
    const float old = column[i * slots];
    if (!p.most_recent && old > amax) amax = old;
    column[i * slots] = i + 1 < length ? column[(i + 1) * slots] : last;
  }
  const float scale = scale_from_amax(amax, h.fp8_max, p.range_factor, p.pow2);
  h.scale[slot] = scale;
  h.scale_inv[slot] = 1.0f / scale;
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(amax_scale_update) {
  using namespace apex_te;
  const AmaxScaleUpdate p = check_amax_scale_update(args, allocate);
  for (const AmaxHistory& h : g_table)
    for (int slot = 0; slot < h.slots(); ++slot) update_slot(h, slot, p);
}
