// Choice of the instruction set of a CPU kernel at run time.
//
// APEX_TE_CPU_VARIANTS(f) defines f_run(args...) from an always-inline template f: one copy
// compiled for baseline, one for AVX2 + F16C. Contraction is off, so both give the same bits;
// APEX_TE_CPU_ISA=portable in the environment forces the baseline (a test compares the two).
#pragma once

#include <cstdlib>
#include <cstring>

#define APEX_TE_INLINE inline __attribute__((always_inline))

namespace apex_te {

#if defined(__x86_64__)
inline bool use_avx2() {
  static const bool use = [] {
    const char* forced = getenv("APEX_TE_CPU_ISA");
    if (forced && strcmp(forced, "portable") == 0) return false;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  }();
  return use;
}
#define APEX_TE_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#else
inline bool use_avx2() { return false; }
#define APEX_TE_TARGET_AVX2
#endif

}  // namespace apex_te
