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

constexpr int64_t kChunk = 2048;  // elements; whatever the number of threads, for equal results

template <typename T>
void run_chunk(const Problem& p, int64_t begin) {
  const int64_t n = std::min(kChunk, p.numel - begin);
  float values[kChunk], dy[kChunk];
  widen(static_cast<const T*>(p.x) + begin, n, values);
  if (p.dy) {
    widen(static_cast<const T*>(p.dy) + begin, n, dy);
    for (int64_t i = 0; i < n; ++i) values[i] = gradient_of(values[i], dy[i], p.scale);
  } else {
    for (int64_t i = 0; i < n; ++i) values[i] = value_of(values[i], p.scale);
  }
  narrow(values, n, static_cast<T*>(p.out) + begin);
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
