// jit_op on the CPU.
//
// Chunks of elements, one thread each, through floats in the first-level cache.
#include <algorithm>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"
#include "jit_op/jit_op.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kChunk = 512;  // elements; whatever the number of threads, for equal results

template <typename T>
void run_chunk(const Problem& p, int64_t begin) {
  const int64_t n = std::min(kChunk, p.numel - begin);
  float in[kInputs][kChunk], grads[kOutputs][kChunk], out[kMost][kChunk];
  for (int k = 0; k < kInputs; ++k) widen(static_cast<const T*>(p.in[k]) + begin, n, in[k]);
  for (int k = 0; p.is_bwd && k < kOutputs; ++k)
    widen(static_cast<const T*>(p.grads[k]) + begin, n, grads[k]);
  for (int64_t i = 0; i < n; ++i) {
    float x[kInputs], dy[kOutputs], result[kMost];
    for (int k = 0; k < kInputs; ++k) x[k] = in[k][i];
    if (p.is_bwd) {
      for (int k = 0; k < kOutputs; ++k) dy[k] = grads[k][i];
      gradients_of(x, dy, p.scalars, result);
    } else {
      values_of(x, p.scalars, result);
    }
    for (int k = 0; k < p.results(); ++k) out[k][i] = result[k];
  }
  for (int k = 0; k < p.results(); ++k) narrow(out[k], n, static_cast<T*>(p.out[k]) + begin);
}

template <typename T>
void run_chunks(const Problem& p) {
  parallel_for((p.numel + kChunk - 1) / kChunk, [&](int64_t i) { run_chunk<T>(p, i * kChunk); });
}

void run_problem(const Problem& p) {
  switch (p.dtype) {
    case DType::kFloat32:
      return run_chunks<float>(p);
    case DType::kFloat16:
      return run_chunks<Half>(p);
    default:
      return run_chunks<BFloat16>(p);
  }
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(jit_op_fwd) {
  using namespace apex_te;
  run_problem(check_problem(args, false));
}

APEX_TE_DEFINE(jit_op_bwd) {
  using namespace apex_te;
  run_problem(check_problem(args, true));
}
