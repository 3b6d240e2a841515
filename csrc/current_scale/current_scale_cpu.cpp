// CPU kernel of current_scale: amax in chunks, then the loops of common/cpu/quantize.h.
#include "common/cpu/quantize.h"
#include "common/numerics/with_dtype.h"
#include "current_scale/current_scale.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

template <typename T>
void cast(const CurrentScaleCall& p, uint32_t amax) {
  amax &= 0x7FFFFFFFu;
  const float scale = p.rule.scale_of(amax);
  *p.scale = scale;
  *p.scale_inv = p.rule.inverse_of(amax, scale);
  quantize_all<T>(p.q, fp8_row_encoder<T>(p.q.codes, scale));
}

void cast_any(const CurrentScaleCall& p, uint32_t amax) {
  with_dtype(p.q.x.dtype(), [&](auto zero) { cast<decltype(zero)>(p, amax); });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(current_scale_fwd) {
  using namespace apex_te;
  const CurrentScaleCall p = check_current_scale(args, true);
  const uint32_t amax = amax_of_tensor(p.q.x);
  *p.amax = bits_float(amax);
  cast_any(p, amax);
}

APEX_TE_DEFINE(current_scale_cast) {
  using namespace apex_te;
  const CurrentScaleCall p = check_current_scale(args, false);
  cast_any(p, float_bits(*p.amax));
}

APEX_TE_DEFINE(current_scale_amax) {
  using namespace apex_te;
  const CurrentScaleAmax p = check_current_scale_amax(args);
  *p.amax = bits_float(amax_of_tensor(p.x));
}
