"""Contracts of C functions: what their headers declare of dtypes, shapes and conditions, parsed.

    x: T[r c], scale: f32[1], columnwise: F*[c r~16]!?, amax: f32[^ 1]!!?, dbias: T[+ c]!?

A tensor is a dtype, dimensions in brackets and marks; ``Tensor`` leaves dtype and dimensions open.

- Dtype: a name of ``DTYPES`` or alternatives, ``T|f32``. The first argument of class ``T`` or ``F``
  decides the dtype of the others. ``W=T|f32`` makes ``W`` another such variable; ``T=H`` limits T.
- Dimensions: letters for extents; ``2`` or ``2c``; ``r/256``, the number of blocks of 256; ``r%4``,
  r rounded up to a multiple of 4; ``r~16``, r as it is or rounded up; ``*r``, any number of
  dimensions; an int parameter, whose value it is; a tensor, whose shape it is; a formula of
  ``LAYOUTS`` or ``SIZES``, whose arguments are letters, scalars and optional tensors, which are
  True if given. ``1`` alone is one element in any number of dimensions.
- ``+`` or ``^`` before them: if a call is divided along other letters, its result is the sum or the
  maximum of the parts.
- ``!`` is written, ``!!`` read and written, ``?`` may be None; ``?a|b`` is given if a or b is.
- ``T[r c][n]`` is a list of n tensors of one shape and dtype. In ``T[r c][each n]`` every tensor
  binds letters and dtypes anew, together with those of its place in other lists; ``[each n|0]`` may
  be empty.
- ``workspace`` is scratch memory. ``; whole c``: a call cannot be divided along c.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from .runtime import scratch_sizes

_FP8 = ("float8_e4m3fn", "float8_e5m2")
DTYPES = {
    "T": ("float32", "float16", "bfloat16"),
    "H": ("float16", "bfloat16"),
    "F": _FP8,
    "F*": (*_FP8, "float8_e4m3fnuz", "float8_e5m2fnuz"),
    "f32": ("float32",),
    "bf16": ("bfloat16",),
    "i32": ("int32",),
    "i64": ("int64",),
    "u8": ("uint8",),
    "e4m3": ("float8_e4m3fn",),
    "bool": ("bool",),
    "e8m0": ("float8_e8m0fnu",),
}
_PLAIN = ("Tensor", "Tensor[]", "int", "float", "float[]", "bool")
_TENSOR = re.compile(
    r"(?:(\w)=)?([\w|*]+)\[([+^]?)([^][]+)\](?:\[(each )?(\w)(\|0)?\])?"
    r"(!{0,2})(?:(\?)([\w|]*))?"
)
_DIMENSION = re.compile(r"(\*?)(\d*)([A-Za-z_]\w*)?(?:\(([\w ]*)\))?(?:/(\d+))?(?:([~%])(\d+))?")


def _block_scales(rows: str, cols: str, block_rows: int) -> str:
    """Returns the dimensions of the scale_inv of FP8 data [rows, cols], as cuBLASLt reads it."""
    return f"{cols}/128 {rows}%4" if block_rows == 1 else f"{rows}/128 {cols}/128%4"


def _block_lines(rows: str, block_rows: int) -> str:
    """Returns the rows of FP8 data; cuBLASLt reads those with 1x128 blocks in fours."""
    return f"{rows}~4" if block_rows == 1 else rows


def _gated(cols: str, up: bool) -> str:
    """Returns F; the input of a gated activation has F columns with ``up``, 2F without."""
    return cols if up else f"{cols}/2"


def _gated_scales(cols: str, up: bool, rows: str, block_rows: int) -> str:
    """Returns ``_block_scales`` of the columnwise copy of an activation's result."""
    if block_rows == 1:
        return f"{rows}/128 {_gated(cols, up)}%4"
    return f"{cols}/{128 if up else 256} {rows}/128%4"


def _half_scales(cols: str, rows: str, block_rows: int) -> str:
    """Returns ``_gated_scales`` of an input of ``cols`` columns, gate and up in one tensor."""
    return _gated_scales(cols, False, rows, block_rows)


def _pair(cols: str, up: bool, apart: bool = False) -> str:
    """Returns 2F, of gate and up side by side; F if the half of up is a tensor of its own."""
    if apart:
        return _gated(cols, up)
    return f"2{cols}" if up else cols


def _columns(rows: int, groups: int) -> int:
    """Returns the columns of columnwise FP8 data of groups, which begin at multiples of 16."""
    return -(-rows // 16) * 16 + 16 * groups


def _lines(columns: int, groups: int) -> int:
    """Returns the lines of block scales of groups that lie in ``columns``."""
    return columns // 128 + groups


# Formulas that give dimensions, of letters and options, and those that give one extent of extents.
LAYOUTS: dict[str, Callable[..., str]] = {
    "block_scales": _block_scales,
    "block_lines": _block_lines,
    "gated": _gated,
    "gated_scales": _gated_scales,
    "half_scales": _half_scales,
    "pair": _pair,
}
SIZES: dict[str, Callable[..., int]] = {
    "norm_lines": scratch_sizes.norm_lines,
    "batch_norm_floats": scratch_sizes.batch_norm_floats,
    "tokens": lambda outer, inner: outer * inner,
    "qkv": lambda q, groups, size, has_queries: (q * has_queries + 2 * groups) * size,
    # csrc/grouped_quantize/grouped_quantize.h
    "table": lambda groups: 3 * groups + 1,
    "columns": _columns,
    "lines": _lines,
    "column_lines": lambda rows, groups: _lines(_columns(rows, groups), groups),
    # csrc/moe_permute/moe_permute.h
    "map_rows": lambda tokens: tokens + 2,
    "map_columns": lambda width: 1 + 2 * width,
    "map_tiles": scratch_sizes.map_tiles,
    # csrc/focal_loss/focal_loss.h
    "focal_tiles": lambda rows, cols: -(-rows * cols // 8192),
    # csrc/rope/rope.h
    "bounds": lambda sequences: sequences + 1,
}


class Dimension(NamedTuple):
    """A number of blocks of a letter's elements, which may be rounded up; or a formula."""

    name: str  # of the letter or formula, "" for a number
    times: int = 1
    block: int = 1
    multiple: int = 1
    is_padded: bool = False  # True if it is rounded up always, False if it may be
    is_open: bool = False  # True if the letter stands for any number of dimensions
    arguments: tuple[str, ...] = ()

    @property
    def is_letter(self) -> bool:
        """True for a letter and nothing else, whose extent a tensor of this dimension has."""
        return bool(self.name) and self == (self.name, 1, 1, 1, False, self.is_open, ())


class Param(NamedTuple):
    """A parameter of a C function, without dimensions if the contract leaves these open."""

    name: str
    kind: str  # Tensor, Tensor[], int, float, float[] or bool
    is_optional: bool = False
    is_written: bool = False
    is_read: bool = True
    dtypes: tuple[str, ...] = ()
    variable: str = ""  # that its dtype binds
    dims: tuple[Dimension, ...] = ()
    like: str | None = None  # the parameter whose shape it has
    reduction: str = ""
    follows: tuple[str, ...] = ()  # it is given if one of these is
    length: str = ""  # the letter of a list's number of tensors
    is_mixed: bool = False  # True if each place of a list has letters and dtypes of its own
    may_be_empty: bool = False  # True if a list may be empty whatever its letter is

    @property
    def is_tensor(self) -> bool:
        """True for a tensor or a list of tensors."""
        return self.kind.startswith("Tensor")

    @property
    def is_scalar(self) -> bool:
        """True for a tensor of one element in any number of dimensions."""
        return self.dims == (Dimension(""),)


class Contract(NamedTuple):
    """Parameters of a C function by name, in its order, and the letters that are not divided."""

    params: Mapping[str, Param]
    whole: frozenset[str]

    def presence(self, given: Collection[str]) -> dict[str, bool]:
        """Returns for each optional tensor whether it is given, as formulas read it."""
        return {p.name: p.name in given for p in self.params.values() if p.is_optional}


@functools.cache
def parse(signature: str) -> Contract:
    """Returns the contract of a C function from its signature in a header."""
    body, *clauses = signature.partition("->")[0].split(";")
    params: dict[str, Param] = {}
    for text in filter(str.strip, body.split(",")):
        name, _, kind = (part.strip() for part in text.partition(":"))
        params[name] = _param(name, kind)
    for p in params.values():
        is_name = len(p.dims) == 1 and not p.dims[0].arguments
        other = params.get(p.dims[0].name) if is_name else None
        if other and other.dims:
            params[p.name] = p._replace(dims=other.dims, like=other.name)
    whole = [word for clause in clauses for word in clause.split()[1:]]
    return Contract(params, frozenset(whole))


def _param(name: str, kind: str) -> Param:
    plain = kind.replace("!", "").rstrip("?")
    if plain in _PLAIN:
        return Param(name, plain, kind.endswith("?"), "!" in kind)
    found = _TENSOR.fullmatch(kind)
    if not found:
        raise ValueError(f"{name}: type must be valid, got {kind!r}")
    variable, dtypes, reduction, dims, mixed, length, empty, written, optional, follows = (
        found.groups()
    )
    only = dtypes.rstrip("*") if dtypes in ("T", "F", "F*") else ""
    return Param(
        name, "Tensor[]" if length else "Tensor", bool(optional), bool(written), written != "!",
        tuple(dtypes.split("|")), variable or only, dimensions(dims), None, reduction,
        tuple(follows.split("|")) if follows else (), length or "", bool(mixed), bool(empty),
    )  # fmt: skip


@functools.cache
def dimensions(text: str) -> tuple[Dimension, ...]:
    """Returns the dimensions in brackets."""
    found = []
    for word in re.findall(r"[^\s(]+(?:\(.*?\))?\S*", text):
        match = _DIMENSION.fullmatch(word)
        if not match:
            raise ValueError(f"dimension must be valid, got {word!r}")
        is_open, times, name, arguments, block, pad, multiple = match.groups()
        times, block, multiple = (int(each or 1) for each in (times, block, multiple))
        names = tuple((arguments or "").split())
        found.append(
            Dimension(name or "", times, block, multiple, pad == "%", bool(is_open), names)
        )
    return tuple(found)


class Bindings:
    """Extents of letters and parameters, and dtypes of variables, as arguments bind them.

    Args:
        options: what formulas may read: the scalars, and ``presence``.
        ranks: numbers of dimensions that letters stand for, where it is not 1.
        dtypes: dtypes of variables that no argument binds.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        ranks: Mapping[str, int] | None = None,
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        self.options, self.ranks, self.dtypes = options, dict(ranks or {}), dict(dtypes or {})
        self.extents: dict[str, tuple[int, ...]] = {"": ()}
        self.extents |= {name: (n,) for name, n in options.items() if type(n) is int}

    def dims(self, p: Param) -> list[Dimension]:
        """Returns the dimensions of a parameter, those of a layout in its place."""
        found: list[Dimension] = []
        for d in p.dims:
            if d.name not in LAYOUTS:
                found.append(d)
                continue
            text = LAYOUTS[d.name](*(self.options.get(a, a) for a in d.arguments))
            found += [
                each._replace(
                    times=each.times * d.times,
                    block=each.block * d.block,
                    multiple=max(each.multiple, d.multiple),
                    is_padded=each.is_padded or d.is_padded,
                )
                for each in dimensions(text)
            ]
        return found

    def _extent(self, d: Dimension) -> int:
        """Returns the number of elements along a letter, or what a formula gives."""
        if d.name not in SIZES:
            return math.prod(self.extents[d.name])
        return SIZES[d.name](
            *(
                self.options[a] if a in self.options else math.prod(self.extents.get(a, (0,)))
                for a in d.arguments
            )
        )

    def allowed(self, p: Param) -> tuple[str, ...]:
        """Returns the dtypes that a parameter may have."""
        if p.variable in self.dtypes:
            return (self.dtypes[p.variable],)
        found: list[str] = []
        for name in p.dtypes:
            found += [self.dtypes[name]] if name in self.dtypes else DTYPES[name]
        return tuple(dict.fromkeys(found))

    def rank(self, p: Param, ndim: int) -> int:
        """Returns a parameter's rank; an open letter takes what an argument of ``ndim`` leaves."""
        for d in p.dims:
            if d.is_open:
                self.ranks.setdefault(d.name, max(ndim - len(p.dims) + 1, 0))
        return sum(self.ranks.get(d.name, 1) for d in p.dims)

    def bind(self, p: Param, shape: tuple[int, ...], dtype: str) -> None:
        """Binds what no earlier argument has bound to the shape and dtype of an argument."""
        if p.variable:
            self.dtypes.setdefault(p.variable, dtype)
        if "T" in p.dtypes and dtype in DTYPES["T"]:
            self.dtypes.setdefault("T", dtype)
        self.extents[p.name] = shape
        self.rank(p, len(shape))
        at = 0
        for d in p.dims:
            count = self.ranks.get(d.name, 1)
            if d.is_letter:
                self.extents.setdefault(d.name, shape[at : at + count])
            at += count

    def binds(self, p: Param) -> bool:
        """Returns True if a parameter has letters that no argument has bound."""
        return any(d.is_letter and d.name not in self.extents for d in p.dims)

    def shape(self, p: Param, *, padded: bool | None = None) -> tuple[int, ...]:
        """Returns a parameter's shape; ``padded`` rounds up all that may be, or nothing."""
        if p.like in self.extents:
            return self.extents[p.like]
        found: list[int] = []
        for d in self.dims(p):
            if d.is_letter:
                found += self.extents[d.name]
            else:
                n = -(-self._extent(d) * d.times // d.block)
                rounds = d.is_padded if padded is None else padded
                found.append(n + -n % d.multiple if rounds else n)
        return tuple(found)
