"""Sizes of the scratch tensors that callers of C functions allocate; plain integers, no framework.

Each is that of a constant or formula in csrc, which the functions check.
"""

from __future__ import annotations

# Rows that one line of a bias gradient's partial sums covers.
CAST_ROWS = 256  # csrc/cast_transpose/cast_transpose.h, csrc/qkv_cast/qkv_cast.h
ACTIVATION_ROWS = 64  # csrc/common/activation/arguments.h, csrc/swiglu/swiglu.h and others
# Partial amaxes that a kernel leaves at most (csrc/common/numerics/quantize.h).
MAX_AMAXES = 1024
# What cuBLASLt's heuristic may use on Hopper; smaller workspaces rule out its split-K algorithms.
GEMM_BYTES = 32 << 20
# Chunks, beside one for each tensor, that may leave partial sums: csrc/multi_tensor/multi_tensor.h.
LIST_PARTIALS = 16384


def lines(rows: int, rows_of_line: int) -> int:
    """Returns the number of lines of partial sums for a matrix with ``rows`` rows."""
    return -(-rows // rows_of_line)


def norm_lines(rows: int, cols: int) -> int:
    """Returns the lines of partial sums that the backward of a norm uses for [rows, cols]."""
    return min(rows, max(min(264, (1 << 21) // max(cols, 1)), 16))


def list_words(count: int, sums: int) -> int:
    """Returns the float32 elements that a reduction over a list of tensors uses."""
    return 4 + (2 * sums + 1) * count + sums * (LIST_PARTIALS + count)


def map_tiles(tokens: int) -> int:
    """Returns the tiles of tokens whose copies ``csrc/moe_permute/moe_permute.h`` counts."""
    tile = 128 if tokens <= 128 else 32 * lines(tokens, 32 * 128)
    return lines(tokens, tile)


def batch_norm_floats(n: int, c: int, s: int) -> int:
    """Returns the float32 elements that a reduction of ``csrc/batch_norm`` uses for [n, c, s]."""
    if s == 1 or (s % 8 and n >= 32):
        width, places = c * s, n
        wanted, most = 264 // max(lines(width, 256), 1), lines(n, 64)
    else:
        width, places = c, n * lines(s, 8)
        wanted, most = 1056 // max(c, 1), lines(places, 2048)
    chunk = max(lines(places, max(min(wanted, most), 1)), 1)
    return 2 * max(lines(places, chunk), 1) * width
