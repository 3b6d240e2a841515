"""Kernels that can compute an attention, and what each cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...runtime.device import nvidia_capability
from .cudnn import cudnn_drops, cudnn_has_sizes, cudnn_is_right
from .masks import Visibility

_HALF = (torch.float16, torch.bfloat16)
_WITH_GRADIENT = ("gradient", "alone")
# Elements of scores [b, h, sq, sk] above which it is worth time not to keep them.
MANY_SCORES = 2**31


def is_flash_replaced() -> bool:
    """Returns True if ``activate_flash_attention_impl`` (torch 2.11) has replaced PyTorch's own."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is not None and current() is not None


is_flash_replaced._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Options(NamedTuple):
    """Numbers that attention needs besides tensors.

    ``scale`` multiplies ``q k^T``. Scores are divided by ``layer_scale`` before they are stored,
    and multiplied by it in the softmax. With ``has_sink`` the softmax has a sink, see ``sinks``;
    with ``independent_rows`` a query's bits do not depend on what is computed with it.
    """

    scale: float
    dropout: float = 0.0
    layer_scale: float = 1.0
    has_sink: bool = False
    independent_rows: bool = False


class Path(NamedTuple):
    """Way to compute attention, as ``DotProductAttention.explain`` shows it.

    Paths with a ``rest`` change the tensors and compute it; "widened" and "alibi", for example,
    widen heads. Other paths call ``kernel`` of ``kernels.KERNELS``, where
    scaled_dot_product_attention does not have what they need.
    """

    name: str
    reason: str
    rest: Path | None = None
    kernel: str | None = None


class Problem(NamedTuple):
    """Features of an attention that the choice of its kernel depends on.

    Attributes:
        form: keys that a query sees: ``"full"``, all; ``"causal"``, those up to its own position,
            of as many keys as queries; ``"window"``, those around its position, counted from the
            last; ``"mask"``, any; ``"packed"``, those of its own sequence, all or such a window.
        bias: ``"none"``, ``"constant"``, ``"gradient"``, or ``"alone"`` if no other tensor requires
            a gradient.
        independent_rows: see ``Options``.
        deterministic: ``torch.use_deterministic_algorithms`` is on.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    size: int
    value_size: int
    form: str = "full"
    bias: str = "none"
    dropout: float = 0.0
    has_sink: bool = False
    independent_rows: bool = False
    deterministic: bool = False

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seen: Visibility,
        bias: torch.Tensor | None,
        options: Options,
    ) -> Problem:
        """Returns the problem of an attention to q [b, h, sq, d]."""
        batch, heads, queries, size = q.shape
        groups, keys = k.shape[1:3]
        form = "full"
        if seen.packed is not None:
            form = "packed"
        elif seen.hidden is not None or (seen.causal == "upper_left" and queries != keys):
            form = "mask"
        elif seen.window is not None or seen.causal == "bottom_right":
            form = "window"
        elif seen.causal is not None:
            form = "causal"
        needs = "none"
        if bias is not None:
            needs = "constant"
            if bias.requires_grad:
                needs = "gradient" if any(x.requires_grad for x in (q, k, v)) else "alone"
        return cls(
            q.device, q.dtype, batch, heads, groups, queries, keys, size, v.shape[3], form, needs,
            options.dropout, options.has_sink, options.independent_rows,
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip

    @property
    def is_empty(self) -> bool:
        """Returns True if q or k is empty."""
        return not (self.batch and self.queries and self.keys)

    @property
    def is_cuda(self) -> bool:
        """Returns True on a GPU."""
        return self.device.type == "cuda"

    @property
    def is_wide(self) -> bool:
        """Returns True if heads of queries and of values have several sizes."""
        return self.size != self.value_size


# Each returns why a kernel cannot compute a problem, "" where that needs no mention, or None.

_SIZES = "PyTorch's fused kernels refuse these head sizes"
_EMPTY = "the tensors are empty"
_GROUPS = "with query groups PyTorch's fused kernels take fp16 and bf16 without a mask only"
_REPEATABLE = "torch.use_deterministic_algorithms is on, and only the flash kernel can be repeated"
_DOUBLE = "float64 runs in PyTorch's plain maths only"


def _no_maths(p: Problem) -> str | None:
    if p.dtype is not torch.float64 or p.form == "packed":
        return ""
    return _DOUBLE if p.has_sink else None


def _no_cpu(p: Problem) -> str | None:
    if p.is_cuda or p.form == "packed":
        return ""
    if p.dtype is torch.float64:
        return _DOUBLE
    if p.has_sink and p.is_empty:
        return _EMPTY
    if p.bias in _WITH_GRADIENT:
        return "core_attention_bias needs a gradient"
    if p.dropout > 0.0:
        return "PyTorch's fused kernel for CPUs does not support dropout"
    return _SIZES if p.is_wide else None


def _no_cudnn(p: Problem) -> str | None:
    """Masks are refused: queries that see nothing would get nonzero outputs and NaN gradients."""
    if p.dtype not in _HALF:
        return "cuDNN's kernel takes fp16 and bf16 only"
    if p.form not in ("full", "causal") or p.bias != "none":
        return "cuDNN's kernel supports only causal masks"
    if p.deterministic:
        return "torch.use_deterministic_algorithms is on, for which PyTorch refuses cuDNN's kernel"
    if p.batch > 65535 or p.heads > 65535:
        return "cuDNN's kernel takes up to 65535 sequences and heads"
    if p.dropout * 16 % 1:
        return "cuDNN's kernel drops multiples of 1/16 only"
    if p.dropout > 0.0 and not cudnn_drops():
        return "this cuDNN's dropout may be wrong"
    if nvidia_capability(p.device) < (9, 0):
        return "cuDNN's kernel is the fastest on sm_90 and later only"
    if not cudnn_has_sizes(p.size, p.value_size, p.dtype, p.device):
        return "cuDNN's kernel refuses these head sizes"
    if not cudnn_is_right(p.size, p.value_size, p.dtype, p.device, p.form):
        return "this cuDNN's results differ from those of plain maths"
    return None


def _no_flash_at_all(p: Problem) -> str | None:
    """Returns why neither of the flash kernel's two ways can be taken."""
    if p.dtype not in _HALF:
        return "PyTorch's flash kernel takes fp16 and bf16 only"
    if p.bias != "none" or p.form == "mask":
        return "PyTorch's flash kernel supports only causal masks and windows"
    if is_flash_replaced():
        if p.dropout > 0.0:
            return "the activated flash kernel does not support dropout"
        if p.deterministic and p.size > 192:
            return "the activated flash kernel cannot be repeated for heads above 192"
    return None


def _no_flash(p: Problem) -> str | None:
    if p.form not in ("full", "causal"):
        return "scaled_dot_product_attention does not support windows"
    # Of other sizes only scaled_dot_product_attention itself takes some: it pads them.
    if p.is_wide or p.size > 256 or (p.has_sink and p.size % 8):
        return _SIZES
    if p.has_sink and p.is_empty:
        return _EMPTY
    return _no_flash_at_all(p)


def _no_activated(p: Problem) -> str | None:
    return _no_flash(p) if is_flash_replaced() else ""


def _no_operator(p: Problem) -> str | None:
    """Returns why the flash kernel cannot be called for windows or packed sequences."""
    if not p.is_cuda or p.dtype not in _HALF:
        return "PyTorch's flash kernel takes fp16 and bf16 on CUDA only"
    if p.is_wide or p.size > 256 or p.size % 8:
        return "PyTorch's flash kernel refuses these head sizes"
    if p.is_empty:
        return _EMPTY
    return _no_flash_at_all(p)


def _no_windowed(p: Problem) -> str | None:
    return _no_operator(p) if p.form == "window" else ""


def _no_varlen(p: Problem) -> str | None:
    return _no_operator(p) if p.form == "packed" else ""


def _widened(
    obstacle_of: Callable[[Problem], str | None],
) -> Callable[[Problem], str | None]:
    """Returns the obstacles of a kernel that takes heads of two sizes padded to one."""

    def obstacle(p: Problem) -> str | None:
        if not p.is_wide:
            return ""
        size = -(-max(p.size, p.value_size) // 8) * 8
        return obstacle_of(p._replace(size=size, value_size=size))

    return obstacle


def _no_efficient(p: Problem) -> str | None:
    if p.form == "packed":
        return ""
    if p.dtype is torch.float64:
        return _DOUBLE
    if p.has_sink and p.is_empty:
        return _EMPTY
    if p.bias == "alone" or (p.bias == "gradient" and p.has_sink):
        # The gradient of a bias needs the log-sum-exp, which torch keeps for those of q, k and v.
        return "core_attention_bias needs a gradient"
    if p.deterministic:
        return _REPEATABLE
    if p.groups != p.heads:
        return _GROUPS
    return _SIZES if p.size % 8 or p.value_size % 8 else None


def _no_independent(p: Problem) -> str | None:
    fits = p.is_cuda and p.dtype in (*_HALF, torch.float32) and p.bias not in _WITH_GRADIENT
    fits = fits and not p.deterministic and not p.is_empty
    return None if fits and not (p.size % 8 or p.value_size % 8) else ""


def _no_expanded(p: Problem) -> str | None:
    if p.groups == p.heads:
        return ""
    obstacle = _no_efficient(p._replace(groups=p.heads))
    few = p.batch * p.heads * p.queries * p.keys < MANY_SCORES
    if obstacle is None and few and p.dtype in _HALF:
        return _GROUPS  # GEMMs are faster, and their scores fit
    return obstacle


class Candidate(NamedTuple):
    """Kernel that the table may name: the path that takes it, and what it cannot compute."""

    path: Path
    obstacle: Callable[[Problem], str | None]


_FLASH = Path("sdpa", "PyTorch's flash kernel", kernel="flash")
_WINDOWED = Path("flash", "PyTorch's flash kernel has sliding windows", kernel="flash")
_VARLEN = Path("varlen", "PyTorch's flash kernel for packed sequences", kernel="flash")
_EFFICIENT = Path("sdpa", "PyTorch's memory-efficient kernel", kernel="efficient")


def _widened_path(rest: Path) -> Path:
    return Path(
        "widened", f"heads of values get zeros behind, then {rest.name}: {rest.reason}", rest
    )


CANDIDATES = {
    "maths": Candidate(Path("sdpa", _DOUBLE), _no_maths),
    "cpu": Candidate(Path("sdpa", "PyTorch's fused kernel for CPUs", kernel="cpu"), _no_cpu),
    "activated": Candidate(
        Path(
            "sdpa_flash",
            "torch.nn.attention.activate_flash_attention_impl has activated a flash kernel",
            kernel="flash",
        ),
        _no_activated,
    ),
    "cudnn": Candidate(
        Path("sdpa_cudnn", "cuDNN's kernel is the fastest on sm_90 and later", kernel="cudnn"),
        _no_cudnn,
    ),
    "flash": Candidate(_FLASH, _no_flash),
    "windowed": Candidate(_WINDOWED, _no_windowed),
    "varlen": Candidate(_VARLEN, _no_varlen),
    "widened flash": Candidate(_widened_path(_FLASH), _widened(_no_flash)),
    "widened windowed": Candidate(_widened_path(_WINDOWED), _widened(_no_windowed)),
    "widened varlen": Candidate(_widened_path(_VARLEN), _widened(_no_varlen)),
    "efficient": Candidate(_EFFICIENT, _no_efficient),
    "expanded": Candidate(
        Path(
            "expanded",
            f"keys and values are repeated for each head, then {_EFFICIENT.name}: "
            f"{_EFFICIENT.reason}",
            _EFFICIENT,
        ),
        _no_expanded,
    ),
    # Under batch_invariant, where flash and cuDNN would choose the order of sums by the lengths.
    "independent": Candidate(
        Path(
            "sdpa_efficient",
            "under batch_invariant PyTorch's memory-efficient kernel, whose order of sums is fixed",
            kernel="efficient",
        ),
        _no_independent,
    ),
    "blocks": Candidate(
        Path(
            "blocks",
            "under batch_invariant GEMMs of one shape, where PyTorch's memory-efficient kernel "
            "cannot be used",
        ),
        lambda p: "" if p.form == "packed" else None,
    ),
    "softmax": Candidate(Path("softmax", ""), lambda p: "" if p.form == "packed" else None),
    "padded": Candidate(Path("padded", ""), lambda p: None if p.form == "packed" else ""),
}
