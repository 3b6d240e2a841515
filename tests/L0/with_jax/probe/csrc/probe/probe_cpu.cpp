#include "probe/probe.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace apex_te;

namespace {

struct Notes {
  double* at;
  void add(double value) { *at++ = value; }
  void add(const DLTensor& t) {
    add(t.dtype.code);
    add(t.dtype.bits);
    add(t.ndim);
    int64_t count = 1;
    for (int i = 0; i < t.ndim; ++i) {
      add(static_cast<double>(t.shape[i]));
      count *= t.shape[i];
    }
    add(count ? *static_cast<const uint8_t*>(t.data) : -1);
    if (t.strides || t.byte_offset || t.device.device_type != kDLCPU || t.device.device_id)
      fail(kApexTeRuntimeError, "probe: a plain view is wanted");
  }
};

}  // namespace

APEX_TE_LIBRARY()

// Reads the call itself: Args would refuse what only this probe takes.
extern "C" {
const char* const apex_te_probe_note_signature = kSignature_probe_note;
int32_t apex_te_probe_note(ApexTeCall* call) {
  const ApexTeArg* a = call->args;
  Notes notes{static_cast<double*>(a[2].value.tensor->data)};
  if (a[0].kind == kApexTeNone)
    notes.add(-1);
  else
    notes.add(*a[0].value.tensor);
  notes.add(a[1].count);
  for (int i = 0; i < a[1].count; ++i) notes.add(a[1].value.tensors[i]);
  notes.add(static_cast<double>(a[3].value.i));
  notes.add(a[4].value.f);
  notes.add(static_cast<double>(a[5].value.i));
  notes.add(a[6].count);
  for (int i = 0; i < a[6].count; ++i) notes.add(a[6].value.floats[i]);
  notes.add(call->num_args);
  return 0;
}
}

APEX_TE_DEFINE(probe_number) {
  const DLTensor* outs;
  const int count = args.tensor_list(&outs);
  for (int i = 0; i < count; ++i) {
    const TensorView out = args.list_item(outs, 0, i);
    for (int64_t k = 0; k < out.numel(); ++k) out.data<float>()[k] = static_cast<float>(i);
  }
}

APEX_TE_DEFINE(probe_double) {
  const TensorView x = args.tensor(), mode = args.tensor();
  volatile float* data = x.data<float>();
  for (int64_t k = 0; k < x.numel(); ++k) data[k] = data[k] + data[k];
#if defined(__x86_64__)
  *mode.data<int32_t>() = static_cast<int32_t>(_mm_getcsr());
#else
  *mode.data<int32_t>() = 0;
#endif
}

APEX_TE_DEFINE(probe_fail) {
  args.tensor();
  args.tensor();
  const int64_t kind = args.integer();
  if (kind)
    fail(static_cast<int32_t>(kind), "probe_fail: x must be better, got kind %d", int(kind));
}
