// grouped_quantize: FP8 copies of groups of rows whose sizes only the device knows, each group with
// a scale of its own, and what belongs to products over such groups.
//
// The groups lie one after the other in x [rows, cols]; what is left of x behind the last is
// padding and never read. `table` (int32 [3 G + 1], from grouped_offsets) describes them:
//   ends[G]    row after a group's last;
//   columns[G] column after a group's last in columnwise codes, where a group begins at a multiple
//              of 16 and has 16 columns at least, those without a row being zeros;
//   used[G]    1 for a group with rows;
//   bad        1 where the splits are no such partition (one is negative, or they exceed the rows):
//              then no group has rows, scale_inv is NaN, and grouped_finish and grouped_clear write
//              NaN.
#pragma once

#include "amax_scale_update/amax_scale_update.h"
#include "common/numerics/fp8_formats.h"
#include "common/numerics/scaling.h"

constexpr int64_t kGroupAlign = 16;  // columns of a group in columnwise codes
constexpr int64_t kMaxGroups = 1023;
constexpr int kMaxStacks = 8;  // of which a group's matrix has its rows

APEX_TE_FUNCTION(grouped_offsets, "splits: i32|i64[g], table: i32[table(g)]!, rows: int")
// q = satcast_rne(float(x) * scale[g]). amax[g] becomes max(amax[g], max |x of g|), NaN above
// infinity; row_scale_inv[r] is its group's inverse; scale_inv is written unless it is given. With
// `due`, only groups whose flag is set are looked at; nothing is written of the others.
APEX_TE_FUNCTION(grouped_quantize,
                 "x: T[r c], table: i32[table(g)], scale: f32[g], scale_inv: f32[g]!!, "
                 "rowwise: F[r c]!?, columnwise: F[c columns(r g)]!?, row_scale_inv: f32[r]!?, "
                 "amax: f32[g]!!?, due: i32[g]?, inverse_given: bool")
APEX_TE_IN_PLACE(grouped_quantize, "amax: scale")
// Casts G matrices of one shape, or one stack [G, rows, cols] of them; with a table, only the
// matrices of groups with rows are read. Of several stacks, a group's matrices follow one another
// as the rows of one.
APEX_TE_FUNCTION(grouped_quantize_matrices,
                 "matrices: T[r c][g], table: i32[table(g)]?, scale: f32[g], scale_inv: f32[g]!!, "
                 "rowwise: F[g r c]!?, columnwise: F[g c r]!?, amax: f32[g]!!?, due: i32[g]?, "
                 "inverse_given: bool")
APEX_TE_IN_PLACE(grouped_quantize_matrices, "amax: scale")
// Block scaling. Blocks of 1x128 of groups of rows: rowwise as block_quantize's of x; columnwise
// blocks run along a group's rows and begin with it, and group g's scales are the lines from
// g + begin / 128 on, its columns beginning at `begin`, of [columns / 128 + G, cols rounded up to
// 4]; columnwise blocks of 128 columns have their one scale at each of them. Blocks of 128x128 of
// matrices: block_quantize's copies of each, one after the other.
APEX_TE_FUNCTION(grouped_block_quantize,
                 "x: T[r c], table: i32[table(g)], rowwise: F[r c]!?, "
                 "rowwise_scale_inv: f32[c/128 r%4]!?rowwise, columnwise: F[c columns(r g)]!?, "
                 "columnwise_scale_inv: f32[column_lines(r g) c%4]!?columnwise, "
                 "columnwise_block_rows: int, eps: float, scales: int",
                 "cuda")
APEX_TE_FUNCTION(grouped_block_quantize_matrices,
                 "matrices: T[r c][g], table: i32[table(g)]?, rowwise: F[g r c]!?, "
                 "rowwise_scale_inv: f32[g r/128 c/128%4]!?rowwise, columnwise: F[g c r]!?, "
                 "columnwise_scale_inv: f32[g c/128 r/128%4]!?columnwise, eps: float, scales: int",
                 "cuda")
// Scales of groups from their amaxes by the rule of common/numerics/scaling.h.
APEX_TE_FUNCTION(grouped_scales,
                 "amax: f32[g], scale: f32[g]!, scale_inv: f32[g]!, fp8_max: float, eps: float, "
                 "pow2: bool")
// The first scales of delayed scaling, for groups that are due and have rows, which are then done.
APEX_TE_FUNCTION(grouped_first_scales,
                 "amax: f32[g], table: i32[table(g)], due: i32[g]!!, scale: f32[g]!!, "
                 "scale_inv: f32[g]!!, fp8_max: float, margin: int, pow2: bool")
// Adds each group's bias to its rows of out and zeroes the rows behind the last group.
APEX_TE_FUNCTION(grouped_finish, "out: T[r c]!!, table: i32[table(g)], bias: T[g c]?")
// Zeroes out[g] of groups without rows.
APEX_TE_FUNCTION(grouped_clear, "out: T[g c]!!, table: i32[table(g)]")
// Column sums [G, cols] of each group's rows.
APEX_TE_FUNCTION(grouped_sum, "x: T[r c], table: i32[table(g)], out: T[g c]!")
// For products of codes that no matrix unit takes: their values in bfloat16, which has them all,
// and rows of the result times their factors.
APEX_TE_FUNCTION(grouped_decode, "fp8_data: F[n], out: bf16[n]!")
APEX_TE_FUNCTION(grouped_scale_rows, "out: T[r c]!!, factor: f32[r]")

namespace apex_te {

struct Table {
  const int32_t* data;
  int groups;
  int32_t rows = 0;  // of the matrix; a table of another one is cut to it
  APEX_TE_HD int64_t end(int g) const {
    const int32_t row = data[g] < rows ? data[g] : rows;
    return row < 0 ? 0 : row;
  }
  APEX_TE_HD int64_t begin(int g) const { return g ? end(g - 1) : 0; }
  APEX_TE_HD int64_t column_end(int g) const { return data[groups + g]; }
  APEX_TE_HD int64_t column_begin(int g) const { return g ? data[groups + g - 1] : 0; }
  APEX_TE_HD bool used(int g) const { return data[2 * groups + g] != 0; }
  APEX_TE_HD bool bad() const { return data[3 * groups] != 0; }
};

APEX_TE_HD int64_t columns_of(int64_t rows) {
  return rows <= 0 ? kGroupAlign : (rows + kGroupAlign - 1) / kGroupAlign * kGroupAlign;
}

// One element of each group, at a distance.
struct GroupValues {
  float* data = nullptr;
  int64_t stride = 0;
  APEX_TE_HD explicit operator bool() const { return data != nullptr; }
  APEX_TE_HD float& operator[](int64_t g) const { return data[g * stride]; }
};

inline int groups_of(const Args& args, int64_t groups) {
  if (groups < 1 || groups > kMaxGroups)
    fail(kApexTeUnsupported, "%s: groups must be 1 to %d, got %lld", args.name(),
         static_cast<int>(kMaxGroups), static_cast<long long>(groups));
  return static_cast<int>(groups);
}

inline Table check_table(const Args& args, const TensorView& table, int64_t groups = -1,
                         int64_t rows = 0) {
  table.has_dtype({DType::kInt32}).has_ndim(1).is_dense();
  if (groups < 0) groups = (table.size(0) - 1) / 3;
  const int count = groups_of(args, groups);
  table.has_shape({3 * groups + 1});
  constexpr int64_t kMost = 0x7FFFFFFF;  // more have no table
  return {table.data<const int32_t>(), count, static_cast<int32_t>(rows < kMost ? rows : kMost)};
}

// On the CPU, where the table can be read: refuses what is no partition of the rows. The GPU, which
// is not waited for, reads and writes within the matrix whatever the table says.
inline void check_partition(const Args& args, const Table& table) {
  int64_t row = 0, column = 0;
  for (int g = 0; g < table.groups; ++g) {
    const int64_t end = table.data[g], column_end = table.column_end(g);
    if (end < row || end > table.rows || column_end != column + columns_of(end - row))
      fail(
          kApexTeValueError,
          "%s: table must be of groups in %lld rows, got group %d in rows %lld to %lld and columns "
          "%lld to %lld",
          args.name(), static_cast<long long>(table.rows), g, static_cast<long long>(row),
          static_cast<long long>(end), static_cast<long long>(column),
          static_cast<long long>(column_end));
    row = end;
    column = column_end;
  }
}

inline GroupValues check_values(const TensorView& values, int groups) {
  if (!values) return {};
  values.has_dtype({DType::kFloat32}).has_shape({groups});
  return {values.data<float>(), values.stride(0)};
}

inline int32_t* check_due(const TensorView& due, int groups) {
  if (!due) return nullptr;
  return due.has_dtype({DType::kInt32}).has_shape({groups}).is_dense().data<int32_t>();
}

struct GroupedOffsets {
  TensorView splits;
  int32_t* table;
  int groups;
  int64_t rows;
};

inline GroupedOffsets check_grouped_offsets(Args& args) {
  GroupedOffsets p;
  p.splits = args.tensor();
  p.splits.has_dtype({DType::kInt32, DType::kInt64}).has_ndim(1).is_dense();
  p.groups = groups_of(args, p.splits.size(0));
  const TensorView table = args.tensor();
  check_table(args, table, p.groups);
  p.table = table.data<int32_t>();
  p.rows = args.integer();
  const int64_t padding = (static_cast<int64_t>(p.groups) + 1) * kGroupAlign;
  if (p.rows < 0 || p.rows > 0x7FFFFFFF - padding)
    fail(kApexTeUnsupported, "%s: rows must be from 0 to 2^31 - 1 with padding, got %lld",
         args.name(), static_cast<long long>(p.rows));
  return p;
}

// Matrices of one shape and dtype, one a group, each for itself or in a stack; or of `parts`
// stacks, each of which has `rows` of the rows of a group's matrix.
struct Matrices {
  const DLTensor* list = nullptr;
  int parts = 1;
  int64_t rows = 0;
  int64_t bytes = 0;  // of a matrix in a stack; 0 without stacks
  explicit operator bool() const { return list; }
  // Where row 0 of a group's matrix would be, before the rows that the part has.
  const void* at(int64_t g, int part) const {
    const DLTensor& t = list[bytes ? part : g];
    return static_cast<const char*>(t.data) + t.byte_offset + (g - part) * bytes;
  }
};

// Both casts. Of matrices `rows` is that of each, and `columns`, the length of a row of columnwise
// codes, is the same.
struct GroupedQuantize {
  DType dtype, codes;
  TensorView x;
  Matrices matrices;  // of the other cast
  Table table{nullptr, 0};
  int64_t rows, cols, columns;
  GroupValues scale, scale_inv, amax;
  uint8_t *rowwise, *columnwise;  // null, too, where they have no elements
  bool casts;                     // not amax alone
  float* row_scale_inv = nullptr;
  const int32_t* due;
  bool inverse_given;
};

inline void check_codes(Args& args, GroupedQuantize& p, bool stacked) {
  const TensorView rowwise = args.optional_tensor(), columnwise = args.optional_tensor();
  p.columns = p.rows;
  for (const TensorView& out : {rowwise, columnwise})
    if (out) out.has_dtype({DType::kE4M3, DType::kE5M2}).is_dense();
  if (rowwise && columnwise) columnwise.has_dtype({rowwise.dtype()});
  const int64_t groups = p.table.groups;
  if (stacked) {
    if (rowwise) rowwise.has_shape({groups, p.rows, p.cols});
    if (columnwise) columnwise.has_shape({groups, p.cols, p.rows});
  } else {
    if (rowwise) rowwise.has_shape({p.rows, p.cols});
    p.columns = (p.rows + kGroupAlign - 1) / kGroupAlign * kGroupAlign + groups * kGroupAlign;
    if (columnwise) columnwise.has_shape({p.cols, p.columns});
  }
  p.codes = rowwise ? rowwise.dtype() : columnwise ? columnwise.dtype() : DType::kE4M3;
  p.rowwise = rowwise.data<uint8_t>();
  p.columnwise = columnwise.data<uint8_t>();
  p.casts = rowwise || columnwise;
}

// A call for amax alone, which has no use for a scale, may pass amax itself as one.
inline GroupValues check_amax(const TensorView& amax, const GroupedQuantize& p) {
  if (amax && p.casts && amax.data<float>() == p.scale.data)
    amax.refuse(kApexTeValueError, "share no memory with scale, as data is cast", "the same");
  return check_values(amax, p.table.groups);
}

// Reads what follows the elements: p has their dtype, rows and cols.
inline void check_group_outputs(Args& args, GroupedQuantize& p) {
  p.table = check_table(args, args.tensor(), -1, p.rows);
  const int groups = p.table.groups;
  p.scale = check_values(args.tensor(), groups);
  p.scale_inv = check_values(args.tensor(), groups);
  check_codes(args, p, false);
  const TensorView row_scale_inv = args.optional_tensor();
  if (row_scale_inv) row_scale_inv.has_dtype({DType::kFloat32}).has_shape({p.rows}).is_dense();
  p.row_scale_inv = row_scale_inv.data<float>();
  p.amax = check_amax(args.optional_tensor(), p);
  p.due = check_due(args.optional_tensor(), groups);
  p.inverse_given = args.boolean();
}

inline GroupedQuantize check_grouped_quantize(Args& args) {
  GroupedQuantize p;
  p.x = args.tensor();
  p.x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.dtype = p.x.dtype();
  p.rows = p.x.size(0);
  p.cols = p.x.size(1);
  check_group_outputs(args, p);
  return p;
}

// Reads matrices and an optional table into the fields that both kinds of scaling have. `multiple`:
// of the rows of each of several stacks.
template <typename Cast>
void check_matrices(Args& args, Cast* p, int64_t multiple) {
  const int index = args.position();
  const DLTensor* list;
  int64_t count = args.tensor_list(&list);
  groups_of(args, count);
  const TensorView first = args.list_item(list, index, 0);
  const bool stacked = first.ndim() == 3;
  first.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2 + stacked);
  const DType dtype = p->dtype = first.dtype();
  const int64_t rows = first.size(stacked), cols = first.size(1 + stacked);
  const int64_t depth = stacked ? first.size(0) : 0;
  for (int i = 0; i < count; ++i) {
    const TensorView each = args.list_item(list, index, i).has_dtype({dtype}).is_dense();
    stacked ? each.has_shape({depth, rows, cols}) : each.has_shape({rows, cols});
  }
  p->matrices.list = list;
  p->matrices.rows = rows;
  if (stacked) {
    p->matrices.parts = static_cast<int>(count);
    p->matrices.bytes = rows * cols * (dtype == DType::kFloat32 ? 4 : 2);
    if (count > kMaxStacks)
      fail(kApexTeUnsupported, "%s: matrices must be at most %d stacks, got %lld", args.name(),
           kMaxStacks, static_cast<long long>(count));
    if (count > 1 && rows % multiple)
      fail(kApexTeValueError, "%s: matrices must have a multiple of %d rows in several stacks",
           args.name(), static_cast<int>(multiple));
    count = depth;
  }
  p->rows = p->matrices.parts * rows;
  p->cols = cols;
  const int groups = groups_of(args, count);
  const TensorView table = args.optional_tensor();
  if (table) check_table(args, table, groups);
  p->table = {table.data<const int32_t>(), groups};
}

inline GroupedQuantize check_grouped_quantize_matrices(Args& args) {
  GroupedQuantize p;
  check_matrices(args, &p, kGroupAlign);
  const int groups = p.table.groups;
  p.scale = check_values(args.tensor(), groups);
  p.scale_inv = check_values(args.tensor(), groups);
  check_codes(args, p, true);
  p.amax = check_amax(args.optional_tensor(), p);
  p.due = check_due(args.optional_tensor(), groups);
  p.inverse_given = args.boolean();
  return p;
}

struct GroupedScales {
  GroupValues amax, scale, scale_inv;
  Table table{nullptr, 0};
  int32_t* due = nullptr;
  ScaleRule rule{};                     // of grouped_scales
  float fp8_max = 0, range_factor = 1;  // of grouped_first_scales
  bool pow2 = false;
};

inline GroupedScales check_grouped_scales(Args& args) {
  GroupedScales p;
  const TensorView amax = args.tensor();
  amax.has_ndim(1);
  p.table.groups = groups_of(args, amax.size(0));
  p.amax = check_values(amax, p.table.groups);
  p.scale = check_values(args.tensor(), p.table.groups);
  p.scale_inv = check_values(args.tensor(), p.table.groups);
  p.fp8_max = static_cast<float>(args.floating());
  p.rule = check_scale_rule(args, p.fp8_max);
  return p;
}

inline GroupedScales check_grouped_first_scales(Args& args) {
  GroupedScales p;
  const TensorView amax = args.tensor();
  p.table = check_table(args, args.tensor());
  p.amax = check_values(amax, p.table.groups);
  p.due = check_due(args.tensor(), p.table.groups);
  p.scale = check_values(args.tensor(), p.table.groups);
  p.scale_inv = check_values(args.tensor(), p.table.groups);
  p.fp8_max = static_cast<float>(args.floating());
  const int64_t margin = args.integer();
  if (margin < -64 || margin > 64)
    fail(kApexTeValueError, "%s: margin must be from -64 to 64, got %lld", args.name(),
         static_cast<long long>(margin));
  p.range_factor = std::ldexp(1.0f, static_cast<int>(-margin));
  p.pow2 = args.boolean();
  return p;
}

// Sets the scale of one group for grouped_scales.
APEX_TE_HD void set_scale(const GroupedScales& p, int g) {
  const uint32_t amax = float_bits(p.amax[g]) & 0x7FFFFFFFu;
  const float scale = p.rule.scale_of(amax);
  p.scale[g] = scale;
  p.scale_inv[g] = ScaleRule::inverse_of(amax, scale);
}

// Sets the first scale of one group; an amax of 0, infinity or NaN changes nothing.
APEX_TE_HD void set_first_scale(const GroupedScales& p, int g) {
  if (!p.due[g] || !p.table.used(g)) return;
  p.due[g] = 0;
  const uint32_t amax = float_bits(p.amax[g]) & 0x7FFFFFFFu;
  if (amax == 0u || amax >= 0x7F800000u) return;
  const float scale = scale_from_amax(bits_float(amax), p.fp8_max, p.range_factor, p.pow2);
  p.scale[g] = scale;
  p.scale_inv[g] = 1.0f / scale;
}

// A matrix, or one row for each group, in a dtype of rows.
struct GroupedRows {
  TensorView x, other;  // other: the bias, or the sums
  int64_t rows, cols;
  Table table;
};

inline GroupedRows check_grouped_rows(Args& args, bool other_optional) {
  GroupedRows p;
  p.x = args.tensor();
  p.x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.rows = p.x.size(0);
  p.cols = p.x.size(1);
  p.table = check_table(args, args.tensor(), -1, p.rows);
  p.other = other_optional ? args.optional_tensor() : args.tensor();
  if (p.other) p.other.has_dtype({p.x.dtype()}).has_shape({p.table.groups, p.cols}).is_dense();
  return p;
}

struct GroupedDecode {
  DType format;
  const uint8_t* codes;
  BFloat16* out;
  int64_t numel;
};

inline GroupedDecode check_grouped_decode(Args& args) {
  const TensorView codes = args.tensor(), out = args.tensor();
  codes.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(1).is_dense();
  out.has_dtype({DType::kBFloat16}).has_shape({codes.size(0)}).is_dense();
  return {codes.dtype(), codes.data<const uint8_t>(), out.data<BFloat16>(), codes.size(0)};
}

inline GroupedRows check_grouped_scale_rows(Args& args) {
  GroupedRows p;
  p.x = args.tensor();
  p.x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.rows = p.x.size(0);
  p.cols = p.x.size(1);
  p.table = {nullptr, 0};
  p.other = args.tensor();
  p.other.has_dtype({DType::kFloat32}).has_shape({p.rows}).is_dense();
  return p;
}

inline GroupedRows check_grouped_clear(Args& args) {
  GroupedRows p;
  p.x = args.tensor();
  p.x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.rows = p.x.size(0);
  p.cols = p.x.size(1);
  p.table = check_table(args, args.tensor(), p.rows);
  return p;
}

}  // namespace apex_te
