// Choice of the instruction set of a CPU kernel at run time.
//
// An always-inline loop is compiled into one function for each instruction set. Contraction is off,
// so all give the same bits; APEX_TE_CPU_ISA in the environment forces a lower one, portable or
// avx2 (tests compare them).
#pragma once

#include <cstdlib>
#include <cstring>

#define APEX_TE_INLINE inline __attribute__((always_inline))
// Marks a loop over a row that functions of several instruction sets and dtypes call: it is
// compiled once.
#if defined(__GNUC__) && !defined(__clang__)
#define APEX_TE_ONCE __attribute__((noinline, noclone))
#else
#define APEX_TE_ONCE __attribute__((noinline))
#endif

// Marks the function for processors without AVX2 where there is one for AVX2, too: without the long
// optimizations it takes a sixth of the time to build instead of a third.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define APEX_TE_TARGET_PORTABLE __attribute__((optimize("O1")))
#else
#define APEX_TE_TARGET_PORTABLE
#endif

namespace apex_te {

#if defined(__x86_64__)
inline bool use_avx2() {
  static const bool use = [] {
    const char* forced = getenv("APEX_TE_CPU_ISA");
    if (forced && strcmp(forced, "portable") == 0) return false;
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if defined(__clang__)  // has no name for F16C, which every processor with AVX2 has
    return has_avx2;
#else
    return has_avx2 && __builtin_cpu_supports("f16c");
#endif
  }();
  return use;
}
#define APEX_TE_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#else
inline bool use_avx2() { return false; }
#define APEX_TE_TARGET_AVX2
#endif

// For loops whose arithmetic, not memory, takes the time. Where it is true, so is use_avx2().
// APEX_TE_CPU_ISA=avx2 forces it off.
#if defined(__x86_64__)
inline bool use_avx512() {
  static const bool use = [] {
    const char* forced = getenv("APEX_TE_CPU_ISA");
    if (!use_avx2() || (forced && strcmp(forced, "avx2") == 0)) return false;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }();
  return use;
}
#if defined(__clang__)
#define APEX_TE_TARGET_AVX512 \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define APEX_TE_TARGET_AVX512 \
  __attribute__((             \
      target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#else
inline bool use_avx512() { return false; }
#define APEX_TE_TARGET_AVX512
#endif

}  // namespace apex_te
