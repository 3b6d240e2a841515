// Memory that a CPU kernel works in. Large arrays do not stand on a stack, which may have 64 KiB,
// and an allocation that fails is an error that names the op and the bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "common/abi/op.h"

namespace apex_te {

// n elements, not initialised.
template <typename T>
std::unique_ptr<T[]> make_scratch(int64_t n) {
  std::unique_ptr<T[]> scratch(new (std::nothrow) T[n]);
  if (!scratch) throw OutOfMemory(n * static_cast<int64_t>(sizeof(T)));
  return scratch;
}

// A struct of arrays, not initialised, that a thread's first call makes and the thread keeps until
// it ends. A function has a struct of its own, and does not call itself.
template <typename Arrays>
Arrays& thread_scratch() {
  static thread_local std::unique_ptr<Arrays> arrays;
  if (!arrays) {
    arrays.reset(new (std::nothrow) Arrays);
    if (!arrays) throw OutOfMemory(sizeof(Arrays));
  }
  return *arrays;
}

}  // namespace apex_te
