// Subnormal numbers on XLA's CPU threads, which flush them to zero.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace apex_te {

// Keeps subnormal numbers, as ops are tested with, while it lives; the caller's mode comes back.
class KeepSubnormals {
 public:
#if defined(__x86_64__)
  KeepSubnormals() : mode_(_mm_getcsr()) {
    if (mode_ & kFlush) _mm_setcsr(mode_ & ~kFlush);
  }
  ~KeepSubnormals() {
    if (mode_ & kFlush) _mm_setcsr(mode_);
  }

 private:
  static constexpr uint32_t kFlush = 0x8040;  // FTZ and DAZ
  uint32_t mode_;
#elif defined(__aarch64__)
  KeepSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(mode_));
    if (mode_ & kFlush) asm volatile("msr fpcr, %0" : : "r"(mode_ & ~kFlush));
  }
  ~KeepSubnormals() {
    if (mode_ & kFlush) asm volatile("msr fpcr, %0" : : "r"(mode_));
  }

 private:
  static constexpr uint64_t kFlush = 1ull << 24 | 1ull << 19;  // FZ and FZ16
  uint64_t mode_;
#else
 public:
  KeepSubnormals() {}
#endif
 public:
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;
};

}  // namespace apex_te
