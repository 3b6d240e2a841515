// Rows of a dtype that is chosen at run time, for CPU kernels that work on floats: their loops are
// made once for all dtypes.
#pragma once

#include "common/abi/op.h"
#include "common/cpu/vec.h"

namespace apex_te {

template <typename T>
void widen_row_portable(const void* x, int64_t n, float* values) {
  widen(static_cast<const T*>(x), n, values);
}
template <typename T>
APEX_TE_TARGET_AVX2 void widen_row_avx2(const void* x, int64_t n, float* values) {
  widen(static_cast<const T*>(x), n, values);
}
template <typename T>
APEX_TE_TARGET_AVX512 void widen_row_avx512(const void* x, int64_t n, float* values) {
  widen(static_cast<const T*>(x), n, values);
}
template <typename T>
void narrow_row(const float* values, int64_t n, void* y) {
  narrow(values, n, static_cast<T*>(y));
}

// A dtype's conversions and the bytes of an element.
class RowDType {
 public:
  explicit RowDType(DType dtype) {
    if (dtype == DType::kFloat32)
      *this = RowDType(float{});
    else if (dtype == DType::kFloat16)
      *this = RowDType(Half{});
    else
      *this = RowDType(BFloat16{});
  }
  bool is_float() const { return size_ == sizeof(float); }
  int64_t size() const { return size_; }
  // The element at an index.
  const void* at(const void* data, int64_t i) const {
    return static_cast<const char*>(data) + i * size_;
  }
  void* at(void* data, int64_t i) const { return static_cast<char*>(data) + i * size_; }
  // n elements from an index on, as vec.h's functions of these names do.
  void widen(const void* data, int64_t i, int64_t n, float* values) const {
    widen_(at(data, i), n, values);
  }
  void narrow(const float* values, int64_t n, void* data, int64_t i) const {
    narrow_(values, n, at(data, i));
  }

 private:
  template <typename T>
  explicit RowDType(T)
      : size_(sizeof(T)),
        widen_(use_avx512() ? widen_row_avx512<T>
               : use_avx2() ? widen_row_avx2<T>
                            : widen_row_portable<T>),
        narrow_(narrow_row<T>) {}
  int64_t size_;
  void (*widen_)(const void* x, int64_t n, float* values);
  void (*narrow_)(const float* values, int64_t n, void* y);
};

}  // namespace apex_te
