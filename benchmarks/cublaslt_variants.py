"""cuBLASLt called directly through ctypes, to time what its options and its proposals change.

``Product`` is one FP8 product in the form in which ``fp8_gemm`` asks for it, with every choice that
a caller has: workspace, alignments, scale mode, accumulation, the order of the output.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_FP8 = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_NOT_TRANSPOSED, _TRANSPOSED = 0, 1
_ROW_ORDER = 1
# cublasLtMatmulDescAttributes_t
_TRANSA, _TRANSB, _A_SCALE, _B_SCALE, _FAST, _A_MODE, _B_MODE = 3, 4, 17, 18, 25, 31, 32
_LAYOUT_ORDER = 1  # cublasLtMatrixLayoutAttribute_t
# cublasLtMatmulPreferenceAttributes_t
_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
# cublasLtMatmulAlgoConfigAttributes_t: name and bytes; clusters are 16-bit
_CONFIG = {"id": (0, 4), "tile": (1, 4), "stages": (6, 4), "splitk": (2, 4), "reduce": (3, 4),
           "swizzle": (4, 4), "custom": (5, 4), "inner": (7, 2), "cluster": (8, 2)}  # fmt: skip
_MAX_PROPOSALS = 32


class _Algo(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algo", _Algo),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Options:
    """Choices of a caller of cuBLASLt besides operands.

    Attributes:
        workspace: bytes that an algorithm may use.
        alignment: bytes by which all pointers are said to be aligned; None says nothing.
        scale_mode: say that scales are one float32 per tensor, which is the default.
        fast: keep partial sums in the tensor cores' precision.
        row_order: multiply a by b in this order, into an output in row order.
    """

    workspace: int = 32 << 20
    alignment: int | None = 256
    scale_mode: bool = False
    fast: bool = True
    row_order: bool = False


class CublasLtError(RuntimeError):
    """A call of cuBLASLt that failed, such as an option that no algorithm supports."""


class CublasLt:
    """The library that torch has loaded, with one handle."""

    def __init__(self) -> None:
        major = str(torch.version.cuda).partition(".")[0]
        torch.zeros(1, device="cuda")
        self.library = ctypes.CDLL(f"libcublasLt.so.{major}")
        self.handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self.scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library; raises CublasLtError unless it succeeds."""
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise CublasLtError(f"{name}: status {status}")

    def set(self, kind: str, described: ctypes.c_void_p, attribute: int, value: Any) -> None:
        """Sets an attribute of a descriptor.

        Args:
            kind: ``"MatmulDesc"``, ``"MatrixLayout"`` or ``"MatmulPreference"``.
            described: the descriptor.
            attribute: its number in the kind's enum.
            value: a ctypes value of the attribute's type.
        """
        size = ctypes.c_size_t(ctypes.sizeof(value))
        name = f"cublasLt{kind}SetAttribute"
        self.call(name, described, ctypes.c_int(attribute), ctypes.byref(value), size)


class Product:
    """``out[M, N] = a[M, K] @ b[N, K].T`` in bf16, and what cuBLASLt proposes for it.

    Args:
        library: the loaded cuBLASLt.
        a, b: FP8 operands.
        scale_inv: one float32 element, the multiplier of both.
        out: the output.
        options: the caller's choices.

    Attributes:
        proposals: the heuristic's list, best first by its own estimate.
    """

    def __init__(
        self,
        library: CublasLt,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_inv: torch.Tensor,
        out: torch.Tensor,
        options: Options,
    ) -> None:
        self._library, self._options = library, options
        self._first, self._second = (a, b) if options.row_order else (b, a)
        self._out, self._scale_inv = out, scale_inv
        self._matmul = self._description()
        self._layouts = [self._layout(t) for t in (self._first, self._second)]
        self._layouts.append(self._output_layout())
        self.proposals = self._ask()

    def _description(self) -> ctypes.c_void_p:
        made, options, library = ctypes.c_void_p(), self._options, self._library
        library.call("cublasLtMatmulDescCreate", ctypes.byref(made), _COMPUTE_32F, _R_32F)
        values = {
            _TRANSA: ctypes.c_int32(_TRANSPOSED),
            _TRANSB: ctypes.c_int32(_NOT_TRANSPOSED),
            _FAST: ctypes.c_int8(options.fast),
            _A_SCALE: ctypes.c_void_p(self._scale_inv.data_ptr()),
            _B_SCALE: ctypes.c_void_p(self._scale_inv.data_ptr()),
        }
        if options.scale_mode:
            values |= {_A_MODE: ctypes.c_int32(0), _B_MODE: ctypes.c_int32(0)}
        for attribute, value in values.items():
            library.set("MatmulDesc", made, attribute, value)
        return made

    def _layout(self, x: torch.Tensor) -> ctypes.c_void_p:
        """Returns the layout of a row-major matrix, to cuBLAS the column-major transpose."""
        kind = _FP8.get(x.dtype, _R_16BF)
        return self._made_layout(kind, x.shape[1], x.shape[0], x.shape[1])

    def _output_layout(self) -> ctypes.c_void_p:
        if not self._options.row_order:
            return self._layout(self._out)
        rows, cols = self._out.shape
        layout = self._made_layout(_R_16BF, rows, cols, cols)
        self._library.set("MatrixLayout", layout, _LAYOUT_ORDER, ctypes.c_int32(_ROW_ORDER))
        return layout

    def _made_layout(self, kind: int, rows: int, cols: int, stride: int) -> ctypes.c_void_p:
        made, size = ctypes.c_void_p(), ctypes.c_uint64
        self._library.call(
            "cublasLtMatrixLayoutCreate", ctypes.byref(made), kind, size(rows), size(cols),
            ctypes.c_int64(stride),
        )  # fmt: skip
        return made

    def _ask(self) -> list[_Proposal]:
        """Returns the heuristic's proposals."""
        library, preference = self._library, ctypes.c_void_p()
        library.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        workspace = ctypes.c_uint64(self._options.workspace)
        library.set("MatmulPreference", preference, _WORKSPACE, workspace)
        if self._options.alignment is not None:
            for attribute in _ALIGNMENTS:
                value = ctypes.c_uint32(self._options.alignment)
                library.set("MatmulPreference", preference, attribute, value)
        found, count = (_Proposal * _MAX_PROPOSALS)(), ctypes.c_int()
        first, second, out = self._layouts
        library.call(
            "cublasLtMatmulAlgoGetHeuristic", library.handle, self._matmul, first, second, out, out,
            preference, _MAX_PROPOSALS, found, ctypes.byref(count),
        )  # fmt: skip
        library.call("cublasLtMatmulPreferenceDestroy", preference)
        return list(found[: count.value])

    def run(self, index: int = 0) -> None:
        """Launches the product with one of the proposals on the current stream."""
        proposal, pointer = self.proposals[index], ctypes.c_void_p
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        first, second, out = self._layouts
        target = pointer(self._out.data_ptr())
        self._library.call(
            "cublasLtMatmul", self._library.handle, self._matmul, ctypes.byref(one),
            pointer(self._first.data_ptr()), first, pointer(self._second.data_ptr()), second,
            ctypes.byref(zero), target, out, target, out, ctypes.byref(proposal.algo),
            pointer(self._library.scratch.data_ptr()), ctypes.c_size_t(proposal.workspace),
            pointer(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def algorithm(self, index: int = 0) -> bytes:
        """Returns what identifies a proposal's algorithm with its configuration."""
        return bytes(self.proposals[index].algo)

    def configuration(self, index: int = 0) -> str:
        """Returns a proposal's tile, stages, split and so on as short text."""
        parts = []
        for name, (attribute, size) in _CONFIG.items():
            value = ctypes.c_uint32()
            try:
                self._library.call(
                    "cublasLtMatmulAlgoConfigGetAttribute",
                    ctypes.byref(self.proposals[index].algo), attribute, ctypes.byref(value),
                    ctypes.c_size_t(size), None,
                )  # fmt: skip
            except CublasLtError:
                continue
            if value.value:
                parts.append(f"{name}{value.value}")
        return " ".join([*parts, f"ws{self.proposals[index].workspace >> 10}K"])
