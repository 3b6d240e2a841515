// moe_permute: rows of tokens copied to the rows of their experts and summed back, and the map
// between both, which counting on the device makes.
//
// The map, row_id_map, is int32 [tokens + 2, 1 + 2 * width], width being the experts of a mask or
// the k of indices, and one column wider where experts are padded:
// - of a token: n, and for each of its n copies the row (-1: dropped, -2: an index that is no
// expert)
//   and the column of probs that it belongs to. What lies behind them is not written.
// - row `tokens`: rows in use; of a mask, too: rows of each expert, the same with padding.
// - row `tokens` + 1: experts of a mask (0 for indices, for which there is no place); and the first
//   row of each, and the padding before it.
#pragma once

#include "common/abi/op.h"
#include "common/numerics/codec.h"
#include "common/numerics/with_dtype.h"

APEX_TE_FUNCTION(moe_permute_map,
                 "routing_map: i32|u8|bool[t w], workspace: i32[map_tiles(t) num_experts]!, "
                 "row_id_map: i32[map_rows(t) map_columns(w)~2]!, "
                 "tokens_per_expert: i32[num_experts]!?, num_experts: int, align_size: int, "
                 "num_rows: int, is_index: bool")
APEX_TE_FUNCTION(moe_permute_fwd,
                 "inp: X=T|u8[t c], probs: P=T|f32[t w]?, "
                 "row_id_map: i32[map_rows(t) map_columns(w)~2]!, out: X[r c]!, "
                 "permuted_probs: P[r]!?probs, routing_map: i32|u8|bool[t w], "
                 "workspace: i32[map_tiles(t) num_experts]!, "
                 "tokens_per_expert: i32[num_experts]!?, num_experts: int, align_size: int, "
                 "is_index: bool")
APEX_TE_FUNCTION(moe_permute_rows,
                 "inp: X=T|u8[t c], probs: P=T|f32[t w]?, "
                 "row_id_map: i32[map_rows(t) map_columns(w)~2], out: X[r c]!, "
                 "permuted_probs: P[r]!?probs")
// The token of each row, -1 for a row without a copy, and its prob.
APEX_TE_FUNCTION(moe_tokens_of_rows,
                 "probs: P=T|f32[t w]?, row_id_map: i32[map_rows(t) map_columns(w)~2], "
                 "out: i32[r]!, permuted_probs: P[r]!?probs")
APEX_TE_FUNCTION(moe_unpermute_fwd,
                 "inp: T[r c], probs: P=T|f32[t w]?, "
                 "row_id_map: i32[map_rows(t) map_columns(w)~2], out: T[t c]!, "
                 "grad_permuted_probs: G=f32|H[r]?, grad_probs: G[t w]!?grad_permuted_probs")
APEX_TE_FUNCTION(moe_unpermute_bwd,
                 "grad_output: T[t c], inp: T[r c], probs: P=T|f32[t w], "
                 "row_id_map: i32[map_rows(t) map_columns(w)~2], grad_inp: T[r c]!, "
                 "grad_probs: P[t w]!")
APEX_TE_FUNCTION(moe_sort_chunks_map,
                 "split_sizes: i32|i64[s], sorted_index: i32|i64[s], chunk_map: i32[2 r]!")
APEX_TE_FUNCTION(moe_sort_chunks,
                 "inp: X=T|u8[r c], probs: P=f32|H[r]?, chunk_map: i32[2 r], out: X[r c]!, "
                 "permuted_probs: P[r]!?probs, is_backward: bool")
// out[i] = inp[rows[i]]; zeros where rows[i] is not a row of inp.
APEX_TE_FUNCTION(moe_gather_rows, "inp: X=T|u8[t c], rows: i32[r], out: X[r c]!")

namespace apex_te {

constexpr int kMaxExperts = 1024;
constexpr int kMaxChunks = 2048;
constexpr int32_t kDropped = -1;
constexpr int32_t kNoExpert = -2;

// A tile's tokens are numbered by one block, few tokens by a single one; more than kMaxTiles would
// be long to add up. The Python side sizes the workspace by the same.
constexpr int64_t kTileTokens = 32;
constexpr int64_t kMaxTiles = 128;
constexpr int64_t kOneTileTokens = 128;
inline int64_t tile_tokens(int64_t tokens) {
  if (tokens <= kOneTileTokens) return kOneTileTokens;
  const int64_t most = kTileTokens * kMaxTiles;
  return kTileTokens * ((tokens + most - 1) / most);
}

struct RowMap {
  int32_t* data;
  int64_t tokens, stride;
  int width;
  APEX_TE_HD int32_t* of(int64_t token) const { return data + token * stride; }
  APEX_TE_HD void put(int64_t token, int slot, int32_t row, int32_t column) const {
    of(token)[1 + 2 * slot] = row;
    of(token)[2 + 2 * slot] = column;
  }
  APEX_TE_HD int32_t* in_use() const { return of(tokens); }  // with counts and padded counts
  APEX_TE_HD int32_t* starts() const { return of(tokens + 1); }
};

// Routing of tokens and the memory of its map.
struct Routing {
  const void* routes;  // [tokens, width]
  int bytes;           // of an element of a mask; 0 for indices
  int num_experts, align;
  int64_t tile, tiles;
  int64_t num_rows;  // of the permuted matrix; copies that come later are dropped
  int32_t* counts;   // [tiles, num_experts]
  int32_t* tokens_per_expert;
  RowMap map;
  APEX_TE_HD bool is_index() const { return bytes == 0; }
  APEX_TE_HD bool routed(int64_t i) const {
    return bytes == 1 ? static_cast<const uint8_t*>(routes)[i] != 0
                      : static_cast<const int32_t*>(routes)[i] != 0;
  }
  APEX_TE_HD int32_t index(int64_t i) const { return static_cast<const int32_t*>(routes)[i]; }
  // Place of the row-th copy of all; a row too many is dropped.
  APEX_TE_HD int32_t place(int32_t row) const { return row < num_rows ? row : kDropped; }
};

inline RowMap check_row_map(const TensorView& row_id_map) {
  row_id_map.has_dtype({DType::kInt32}).has_ndim(2).is_dense();
  if (row_id_map.size(0) < 2 || row_id_map.size(1) < 3)
    row_id_map.refuse(kApexTeValueError, "be what moe_permute made", "too small a matrix");
  return {row_id_map.data<int32_t>(), row_id_map.size(0) - 2, row_id_map.size(1),
          static_cast<int>((row_id_map.size(1) - 1) / 2)};
}

inline Routing check_routing(Args& args, const TensorView& routes, const TensorView& workspace,
                             const TensorView& row_id_map, const TensorView& tokens_per_expert,
                             int64_t num_experts, int64_t align, int64_t num_rows, bool is_index) {
  Routing p = {};
  if (is_index)
    routes.has_dtype({DType::kInt32});
  else
    routes.has_dtype({DType::kBool, DType::kUInt8, DType::kInt32});
  routes.has_ndim(2).is_dense();
  const int64_t tokens = routes.size(0), width = routes.size(1);
  if (width < 1) routes.refuse(kApexTeValueError, "have at least 1 column", "0");
  if (num_experts < 1 || (!is_index && num_experts != width))
    fail(kApexTeValueError,
         "%s: num_experts must be at least 1 and the columns of a mask, got %lld", args.name(),
         static_cast<long long>(num_experts));
  if (num_experts > kMaxExperts)
    fail(kApexTeUnsupported, "%s: num_experts must be at most %d, got %lld", args.name(),
         kMaxExperts, static_cast<long long>(num_experts));
  if (align < 1 || align > (1 << 20) || (is_index && align != 1))
    fail(kApexTeValueError,
         "%s: align_size must be at least 1 and at most 2^20, and 1 for indices, got %lld",
         args.name(), static_cast<long long>(align));
  if (tokens * width + num_experts * align > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "%s: routing_map must have fewer than 2^31 elements", args.name());
  p.map = check_row_map(row_id_map);
  row_id_map.has_shape({tokens + 2, 1 + 2 * width + (row_id_map.size(1) + 1) % 2});
  p.tile = tile_tokens(tokens);
  p.tiles = (tokens + p.tile - 1) / p.tile;
  workspace.has_dtype({DType::kInt32}).has_shape({p.tiles, num_experts}).is_dense();
  if (tokens_per_expert)
    tokens_per_expert.has_dtype({DType::kInt32}).has_shape({num_experts}).is_dense();
  p.routes = routes.data();
  p.bytes = is_index ? 0 : routes.dtype() == DType::kInt32 ? 4 : 1;
  p.num_experts = static_cast<int>(num_experts);
  p.align = static_cast<int>(align);
  p.num_rows = num_rows;
  p.counts = workspace.data<int32_t>();
  p.tokens_per_expert = tokens_per_expert.data<int32_t>();
  return p;
}

inline Routing check_moe_permute_map(Args& args) {
  const TensorView routes = args.tensor(), workspace = args.tensor(), row_id_map = args.tensor();
  const TensorView tokens_per_expert = args.optional_tensor();
  const int64_t num_experts = args.integer(), align = args.integer(), num_rows = args.integer();
  return check_routing(args, routes, workspace, row_id_map, tokens_per_expert, num_experts, align,
                       num_rows, args.boolean());
}

inline int bytes_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kUInt8 ? 1 : 2;
}

// A vector that is copied with the rows, [..., width] on one side and [rows] on the other.
struct Probs {
  const void* from;
  void* to;
  int bytes;  // of an element, 4 or 2
};

inline void check_probs_dtype(const TensorView& probs, DType dtype) {
  if (dtype == DType::kUInt8)
    probs.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  else if (dtype == DType::kFloat32)
    probs.has_dtype({DType::kFloat32});
  else
    probs.has_dtype({DType::kFloat32, dtype});
}

inline Probs check_probs(Args& args, const TensorView& from, const TensorView& to, DType dtype,
                         std::initializer_list<int64_t> from_shape,
                         std::initializer_list<int64_t> to_shape) {
  if (bool(from) != bool(to))
    fail(kApexTeValueError, "%s: probs must be given where they are permuted, and only there",
         args.name());
  if (!from) return {nullptr, nullptr, 4};
  check_probs_dtype(from, dtype);
  from.has_shape(from_shape).is_dense();
  to.has_dtype({from.dtype()}).has_shape(to_shape).is_dense();
  return {from.data(), to.data(), bytes_of(from.dtype())};
}

// Rows of bytes copied whole: permute, gather_rows and both directions of sort_chunks.
struct RowCopy {
  const void* inp;
  void* out;
  int64_t row_bytes;
  int64_t inp_rows, out_rows;
  Probs probs;
};

inline RowCopy check_rows(const TensorView& inp, const TensorView& out) {
  inp.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUInt8});
  inp.has_ndim(2).is_dense();
  out.has_dtype({inp.dtype()}).has_ndim(2);
  out.has_shape({out.size(0), inp.size(1)}).is_dense();
  if (out.size(0) > 0x7FFFFFFF || inp.size(0) > 0x7FFFFFFF)
    out.refuse(kApexTeUnsupported, "have fewer than 2^31 rows", "more");
  return {inp.data(),  out.data(),  inp.size(1) * bytes_of(inp.dtype()),
          inp.size(0), out.size(0), Probs{}};
}

struct Permute {
  RowCopy rows;
  RowMap map;
};

inline Permute check_permute(Args& args, TensorView* row_id_map) {
  const TensorView inp = args.tensor(), probs = args.optional_tensor();
  *row_id_map = args.tensor();
  const TensorView out = args.tensor(), permuted_probs = args.optional_tensor();
  Permute p = {check_rows(inp, out), check_row_map(*row_id_map)};
  inp.has_shape({p.map.tokens, inp.size(1)});
  p.rows.probs = check_probs(args, probs, permuted_probs, inp.dtype(), {p.map.tokens, p.map.width},
                             {p.rows.out_rows});
  return p;
}

inline Permute check_moe_permute_rows(Args& args) {
  TensorView row_id_map;
  return check_permute(args, &row_id_map);
}

inline Permute check_moe_permute_fwd(Args& args, Routing* routing) {
  TensorView row_id_map;
  const Permute p = check_permute(args, &row_id_map);
  const TensorView routes = args.tensor(), workspace = args.tensor();
  const TensorView tokens_per_expert = args.optional_tensor();
  const int64_t num_experts = args.integer(), align = args.integer();
  *routing = check_routing(args, routes, workspace, row_id_map, tokens_per_expert, num_experts,
                           align, p.rows.out_rows, args.boolean());
  return p;
}

struct TokensOfRows {
  RowMap map;
  int32_t* out;
  int64_t rows;
  Probs probs;
};

inline TokensOfRows check_moe_tokens_of_rows(Args& args) {
  const TensorView probs = args.optional_tensor();
  const RowMap map = check_row_map(args.tensor());
  const TensorView out = args.tensor(), permuted_probs = args.optional_tensor();
  out.has_dtype({DType::kInt32}).has_ndim(1).is_dense();
  if (out.size(0) > 0x7FFFFFFF) out.refuse(kApexTeUnsupported, "have fewer than 2^31 rows", "more");
  return {map, out.data<int32_t>(), out.size(0),
          check_probs(args, probs, permuted_probs, DType::kUInt8, {map.tokens, map.width},
                      {out.size(0)})};
}

struct Unpermute {
  DType dtype;
  RowMap map;
  int64_t num_rows, cols;
  const void* inp;
  const void* probs;  // [tokens, width]
  bool has_float_probs;
  void* out;
  const void* grad_output;
  Probs grad_probs;  // forward: of a permutation whose gradient this is
};

inline Unpermute check_unpermute(const TensorView& inp, const TensorView& probs,
                                 const TensorView& row_id_map) {
  Unpermute p = {};
  inp.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.dtype = inp.dtype();
  p.map = check_row_map(row_id_map);
  p.num_rows = inp.size(0);
  p.cols = inp.size(1);
  if (p.num_rows > 0x7FFFFFFF) inp.refuse(kApexTeUnsupported, "have fewer than 2^31 rows", "more");
  if (probs) {
    check_probs_dtype(probs, p.dtype);
    probs.has_shape({p.map.tokens, p.map.width}).is_dense();
    p.has_float_probs = probs.dtype() == DType::kFloat32;
  }
  p.inp = inp.data();
  p.probs = probs.data();
  return p;
}

inline Unpermute check_moe_unpermute_fwd(Args& args) {
  const TensorView inp = args.tensor(), probs = args.optional_tensor(), row_id_map = args.tensor();
  const TensorView out = args.tensor(), grad_permuted_probs = args.optional_tensor();
  const TensorView grad_probs = args.optional_tensor();
  Unpermute p = check_unpermute(inp, probs, row_id_map);
  out.has_dtype({p.dtype}).has_shape({p.map.tokens, p.cols}).is_dense();
  p.out = out.data();
  p.grad_probs = check_probs(args, grad_permuted_probs, grad_probs, DType::kUInt8, {p.num_rows},
                             {p.map.tokens, p.map.width});
  return p;
}

inline Unpermute check_moe_unpermute_bwd(Args& args) {
  const TensorView grad_output = args.tensor(), inp = args.tensor(), probs = args.tensor();
  const TensorView row_id_map = args.tensor(), grad_inp = args.tensor();
  const TensorView grad_probs = args.tensor();
  Unpermute p = check_unpermute(inp, probs, row_id_map);
  grad_output.has_dtype({p.dtype}).has_shape({p.map.tokens, p.cols}).is_dense();
  grad_inp.has_dtype({p.dtype}).has_shape({p.num_rows, p.cols}).is_dense();
  grad_probs.has_dtype({probs.dtype()}).has_shape({p.map.tokens, p.map.width}).is_dense();
  p.grad_output = grad_output.data();
  p.out = grad_inp.data();
  p.grad_probs = {nullptr, grad_probs.data(), bytes_of(probs.dtype())};
  return p;
}

// chunk_map, int32 [2, rows]: the input row of each output row, and the output row of each input
// row; -1 where there is none.
struct ChunkMap {
  const void *split_sizes, *sorted_index;
  bool has_long_sizes, has_long_index;
  int num_chunks;
  int64_t rows;
  int32_t* map;
};

inline ChunkMap check_moe_sort_chunks_map(Args& args) {
  const TensorView sizes = args.tensor(), index = args.tensor(), map = args.tensor();
  sizes.has_dtype({DType::kInt32, DType::kInt64}).has_ndim(1).is_dense();
  index.has_dtype({DType::kInt32, DType::kInt64}).has_shape({sizes.size(0)}).is_dense();
  if (sizes.size(0) > kMaxChunks)
    fail(kApexTeUnsupported, "%s: split_sizes must have at most %d elements, got %lld", args.name(),
         kMaxChunks, static_cast<long long>(sizes.size(0)));
  map.has_dtype({DType::kInt32}).has_ndim(2);
  map.has_shape({2, map.size(1)}).is_dense();
  if (map.size(1) > 0x7FFFFFFF)
    map.refuse(kApexTeUnsupported, "have fewer than 2^31 columns", "more");
  return {sizes.data(),
          index.data(),
          sizes.dtype() == DType::kInt64,
          index.dtype() == DType::kInt64,
          static_cast<int>(sizes.size(0)),
          map.size(1),
          map.data<int32_t>()};
}

struct SortChunks {
  RowCopy rows;
  const int32_t* sources;  // the input row of each output row
};

inline SortChunks check_moe_sort_chunks(Args& args) {
  const TensorView inp = args.tensor(), probs = args.optional_tensor(), map = args.tensor();
  const TensorView out = args.tensor(), permuted_probs = args.optional_tensor();
  SortChunks p = {};
  p.rows = check_rows(inp, out);
  const int64_t rows = p.rows.inp_rows;
  out.has_shape({rows, inp.size(1)});
  map.has_dtype({DType::kInt32}).has_shape({2, rows}).is_dense();
  p.rows.probs = check_probs(args, probs, permuted_probs, DType::kUInt8, {rows}, {rows});
  p.sources = map.data<const int32_t>() + (args.boolean() ? rows : 0);
  return p;
}

inline SortChunks check_moe_gather_rows(Args& args) {
  const TensorView inp = args.tensor(), rows = args.tensor(), out = args.tensor();
  SortChunks p = {};
  p.rows = check_rows(inp, out);
  rows.has_dtype({DType::kInt32}).has_shape({p.rows.out_rows}).is_dense();
  p.sources = rows.data<const int32_t>();
  return p;
}

}  // namespace apex_te
