// The order in which a column sum (a bias or weight gradient) is added, the same on both devices.
//
// A kernel leaves the sums of each tile of rows in a line of fp32. A second step adds the lines by
// 16, and the sums of 16 in order of rows; it adds in double, so that many lines cost no accuracy.
#pragma once

#include <cstdint>

namespace apex_te {

constexpr int kLinesAtOnce = 16;

// A line of the tiles that casts make sums 256 rows: 8 rows, two such sums, the 16 pairs.
constexpr int64_t kSumTileRows = 256;
constexpr int64_t kSumThreadRows = 8;

}  // namespace apex_te
