// Layout of the scales of FP8 blocks of 1 x 128 and 128 x 128, as cuBLASLt's block-scaled matmul
// reads them.
//
// Shapes for FP8 data [rows, cols], K along cols:
//   1 x 128:   [ceil(cols / 128), rows rounded up to 4], VEC128_32F
//   128 x 128: [ceil(rows / 128), ceil(cols / 128) rounded up to 4], BLK128x128_32F
#pragma once

#include "common/abi/op.h"

namespace apex_te {

constexpr int64_t kBlock = 128;

inline int64_t num_blocks(int64_t n) { return n / kBlock + (n % kBlock > 0); }
inline int64_t padded_to_4(int64_t n) { return (n + 3) / 4 * 4; }

// The next argument: rows of a block.
inline int64_t check_block_rows(Args& args) {
  const int64_t block_rows = args.integer();
  if (block_rows == 1 || block_rows == kBlock) return block_rows;
  char parameter[64];
  args.parameter_name(args.position() - 1, parameter, sizeof(parameter));
  fail(kApexTeValueError, "%s: %s must be 1 or 128, got %lld", args.name(), parameter,
       static_cast<long long>(block_rows));
}

inline void check_block_scales(const TensorView& scales, int64_t rows, int64_t cols,
                               int64_t block_rows) {
  scales.has_dtype({DType::kFloat32});
  if (block_rows == 1)
    scales.has_shape({num_blocks(cols), padded_to_4(rows)});
  else
    scales.has_shape({num_blocks(rows), padded_to_4(num_blocks(cols))});
  scales.is_dense();
}

}  // namespace apex_te
