"""Ways to compute attention: PyTorch's fused kernels, or GEMMs around scaled_softmax."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...ops.scaled_softmax import scaled_softmax
from ...runtime.device import nvidia_capability
from .alibi import Alibi
from .blocks import attend_in_blocks
from .kernels import Call, Extra
from .masks import Visibility, band
from .places import padding_behind
from .sinks import attend_with_sink, weights_beside_sink

# In this order: on Hopper and later cuDNN's kernels are the fastest.
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_FLASH_FIRST = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_HALF = (torch.float16, torch.bfloat16)
# Shorter sequences are bound by the host, and cuDNN plans anew for each shape.
_CUDNN_QUERIES = 512
# Beside equal sizes up to 128, if torch and its cuDNN have them: of queries, of values.
_CUDNN_SIZES = ((192, 128), (256, 256))


@functools.cache
def _varlen_arguments() -> frozenset[str]:
    """Returns the names of arguments of PyTorch's ``varlen_attn``; none before torch 2.10."""
    try:  # here, because importing it takes a second
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen_takes(*names: str) -> bool:
    """Returns True if PyTorch's kernel for packed sequences has arguments of these names."""
    return _varlen_arguments().issuperset(names)


_varlen_takes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_flash_replaced() -> bool:
    """Returns True if ``activate_flash_attention_impl`` (torch 2.11) has replaced PyTorch's own."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is not None and current() is not None


_is_flash_replaced._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _asks_cudnn(size: int, value_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    shape = (1, 1, _CUDNN_QUERIES)
    q = torch.empty(*shape, size, dtype=dtype, device=device, requires_grad=True)
    v = torch.empty(*shape, value_size, dtype=dtype, device=device, requires_grad=True)
    given = torch.backends.cuda.SDPAParams(q, q, v, None, 0.0, True, False)
    return torch.backends.cuda.can_use_cudnn_attention(given)


def _cudnn_has_sizes(size: int, value_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if cuDNN's kernels have heads of these sizes, also in backward."""
    if size == value_size <= 128:
        return size % 8 == 0
    return (size, value_size) in _CUDNN_SIZES and _asks_cudnn(size, value_size, dtype, device)


_cudnn_has_sizes._dynamo_marked_constant = True  # type: ignore[attr-defined]


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

    Path "moved" computes the ``rest`` after it has put padded tokens behind the others. With a
    sink, the path calls ``kernel`` of ``KERNELS`` if it has one.
    """

    name: str
    reason: str
    rest: Path | None = None
    kernel: str | None = None


_CPU_FLASH = Path("sdpa", "PyTorch's fused kernel for CPUs", kernel="cpu")
_CUDNN = Path("sdpa_cudnn", "cuDNN's kernel is the fastest on sm_90 and later", kernel="cudnn")
_ACTIVATED = Path(
    "sdpa_flash",
    "torch.nn.attention.activate_flash_attention_impl has activated a flash kernel",
    kernel="flash",
)
_FLASH = Path("sdpa", "PyTorch's flash kernel", kernel="flash")
_EFFICIENT = Path("sdpa", "PyTorch's memory-efficient kernel", kernel="efficient")
_WINDOW = Path(
    "varlen", "PyTorch's flash kernel for packed sequences has sliding windows", kernel="flash"
)
_DOUBLE = Path("sdpa", "float64 runs in PyTorch's plain maths only")
_DOUBLE_SINK = _DOUBLE._replace(name="softmax")
_EMPTY = Path("softmax", "the tensors are empty")
_BIAS_GRADIENT = Path("softmax", "core_attention_bias needs a gradient")
_CPU_DROPOUT = Path("softmax", "PyTorch has no fused kernel with dropout for CPUs")
_HEAD_SIZES = Path("softmax", "PyTorch's fused kernels refuse these head sizes")
_GROUPS = Path(
    "softmax",
    "with query groups PyTorch's fused kernels take fp16 and bf16 without a mask only",
)
_REPEATABLE = Path(
    "softmax", "torch.use_deterministic_algorithms is on, and only the flash kernel can be repeated"
)


# Under batch_invariant, where flash and cuDNN would choose the order of sums by the lengths.
_INDEPENDENT = Path(
    "sdpa_efficient",
    "under batch_invariant PyTorch's memory-efficient kernel, whose order of sums is fixed",
    kernel="efficient",
)
_BLOCKS = Path(
    "blocks",
    "under batch_invariant GEMMs of one shape, where PyTorch's memory-efficient kernel cannot be "
    "used",
)


class _Attention(NamedTuple):
    """Arguments of one attention, from which its path is chosen without reading values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seen: Visibility
    bias: torch.Tensor | None
    options: Options

    @property
    def has_one_head_size(self) -> bool:
        """Returns True if heads of queries and of values have one size."""
        return bool(self.q.shape[3] == self.v.shape[3])


def _is_plain(a: _Attention) -> bool:
    """Returns True for fp16 or bf16 with at most a causal mask."""
    seen = a.seen
    return (
        seen.hidden is None
        and seen.window is None
        and a.bias is None
        and (seen.causal is None or a.q.shape[2] == a.k.shape[2])
        and a.q.dtype in _HALF
    )


def _takes_flash(a: _Attention) -> bool:
    """Returns True if PyTorch's flash kernel applies."""
    size = a.q.shape[3]
    # Of other sizes only scaled_dot_product_attention itself takes some: it pads them.
    fits = size <= 256 and not (a.options.has_sink and size % 8)
    return fits and _is_plain(a) and a.has_one_head_size


def _takes_cudnn(a: _Attention) -> bool:
    """Returns True if cuDNN's kernel is right and faster than flash.

    It is not used with masks: queries that see nothing would get nonzero outputs and NaN gradients.
    """
    queries, size = a.q.shape[2:]
    return (
        queries == a.k.shape[2]
        and queries >= _CUDNN_QUERIES
        and a.options.dropout == 0.0
        and not torch.are_deterministic_algorithms_enabled()
        and _is_plain(a)
        and nvidia_capability(a.q.device) >= (9, 0)
        and _cudnn_has_sizes(size, a.v.shape[3], a.q.dtype, a.q.device)
    )


def _takes_activated(a: _Attention) -> bool:
    """Returns True if a flash kernel that the user has activated applies; it has no dropout."""
    return _takes_flash(a) and a.options.dropout == 0.0 and _is_flash_replaced()


def _takes_window(a: _Attention) -> bool:
    """Returns True if only a window hides keys, and PyTorch's packed kernel can compute it."""
    has_window = a.seen.window is not None and a.bias is None
    return has_window and varlen_obstacle(a.q, a.v, a.options) is None


# The first path whose condition holds is taken; those behind the CPU's are CUDA's.
_PATHS: tuple[tuple[Path, Callable[[_Attention], bool]], ...] = (
    (_DOUBLE_SINK, lambda a: a.q.dtype is torch.float64 and a.options.has_sink),
    (_EMPTY, lambda a: a.options.has_sink and not (a.q.numel() and a.k.numel())),
    (_DOUBLE, lambda a: a.q.dtype is torch.float64),
    (_BIAS_GRADIENT, lambda a: a.bias is not None and a.bias.requires_grad),
    (_CPU_DROPOUT, lambda a: not a.q.is_cuda and a.options.dropout > 0.0),
    (_CPU_FLASH, lambda a: not a.q.is_cuda and a.has_one_head_size),
    (_HEAD_SIZES, lambda a: not a.q.is_cuda),
    (_ACTIVATED, _takes_activated),
    (_CUDNN, _takes_cudnn),
    (_FLASH, _takes_flash),
    (_WINDOW, _takes_window),
    (_REPEATABLE, lambda a: torch.are_deterministic_algorithms_enabled()),
    (_GROUPS, lambda a: bool(a.q.shape[1] != a.k.shape[1])),
    (_HEAD_SIZES, lambda a: bool(a.q.shape[3] % 8 or a.v.shape[3] % 8)),
)


def choose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Visibility,
    bias: torch.Tensor | None,
    options: Options,
) -> Path:
    """Chooses how to compute an attention; ``bias`` may be ALiBi's slopes."""
    attention = _Attention(q, k, v, seen, bias, options)
    if seen.padded is not None and seen.causal == "upper_left" and bias is None:
        # Then no token sees a padded one: they all come after it.
        rest = _first(attention._replace(seen=Visibility("upper_left")))
        reason = f"padded tokens are put behind the others, then {rest.name}: {rest.reason}"
        return Path("moved", reason, rest)
    return _first(attention)


def _has_efficient(a: _Attention) -> bool:
    """Returns True if PyTorch's memory-efficient kernel applies."""
    return bool(
        a.q.is_cuda
        and a.q.dtype in (*_HALF, torch.float32)
        and not (a.bias is not None and a.bias.requires_grad)
        and not torch.are_deterministic_algorithms_enabled()
        and a.q.numel()
        and a.k.numel()
        and a.q.shape[3] % 8 == a.v.shape[3] % 8 == 0
    )


def _first(attention: _Attention) -> Path:
    if attention.options.independent_rows:
        path = _INDEPENDENT if _has_efficient(attention) else _BLOCKS
        return explained_sink(path, attention.options)
    found = next((path for path, takes in _PATHS if takes(attention)), _EFFICIENT)
    return explained_sink(found, attention.options)


def explained_sink(path: Path, options: Options) -> Path:
    """Returns the path with a reason that says how it adds a sink, if there is one."""
    if not options.has_sink:
        return path
    how = "rescales its output" if path.kernel else "is one more column of scores"
    return path._replace(reason=f"{path.reason}; the softmax sink {how}")


def path_settings() -> tuple[bool, bool]:
    """Returns the settings of torch on which ``choose`` depends besides its arguments."""
    return torch.are_deterministic_algorithms_enabled(), _is_flash_replaced()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    path: Path,
    seen: Visibility,
    options: Options,
    alibi: Alibi | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``softmax(scale * q k^T + bias) v`` [b, h, sq, dv]; 0 for queries that see no key.

    With ``alibi``, ``bias`` has ALiBi's slopes, float32 [h] or [b, h]. With ``options.has_sink``,
    ``sink`` is float32 [h]; None is 0.
    """
    if path.rest is not None:
        return _moved(q, k, v, path.rest, seen, options, sink)
    if alibi is not None:
        assert bias is not None
        bias = alibi.bias(bias, q, k)
    if path.name == _INDEPENDENT.name and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if path.name == "blocks":
        hidden = seen.hidden
        if seen.causal is not None or seen.window is not None:
            hidden = _all_hidden(seen, q.shape[2], k.shape[2], q.device)
        out = attend_in_blocks(q, k, v, bias, sink, hidden, options.scale, options.has_sink)
    elif path.name == "softmax":
        out = _softmax(q, k, v, seen, bias, options, sink)
    elif options.has_sink:
        out = _with_sink(q, k, v, path, seen, bias, options, sink)
    elif path.name == "varlen":
        out = _windowed(q, k, v, seen, options)
    elif path.name == "sdpa_cudnn":
        with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
            out = _sdpa(q, k, v, seen, bias, options)
    elif path.name == _INDEPENDENT.name:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            out = _sdpa(q, k, v, seen, bias, options)
    elif path.name == "sdpa_flash":
        with sdpa_kernel(_FLASH_FIRST, set_priority=True):
            out = _sdpa(q, k, v, seen, bias, options)
    else:
        out = _sdpa(q, k, v, seen, bias, options)
    if seen.fully_masked_queries is not None:
        out = out.masked_fill(seen.fully_masked_queries, 0.0)
    return out


def to_visible(hidden: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the ``attn_mask`` of scaled_dot_product_attention: bool, True = visible, or a bias.

    The bias is -inf where ``hidden`` is True. Returns None if both arguments are None.
    """
    if hidden is None:
        return bias
    if bias is None:
        return hidden.logical_not()
    return bias.masked_fill(hidden, -torch.inf)


def _mask(
    q: torch.Tensor, k: torch.Tensor, seen: Visibility, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, bool]:
    """Returns ``attn_mask`` and ``is_causal`` of scaled_dot_product_attention."""
    hidden, causal = seen.hidden, seen.causal is not None
    if seen.window is not None or (
        causal and (hidden is not None or bias is not None or seen.causal == "bottom_right")
    ):
        hidden, causal = _all_hidden(seen, q.shape[2], k.shape[2], q.device), False
    return to_visible(hidden, bias), causal


def _with_sink(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    path: Path,
    seen: Visibility,
    bias: torch.Tensor | None,
    options: Options,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attends by the path's kernel, with a sink; see ``attend``."""
    assert path.kernel is not None
    if path.name == "varlen":
        assert seen.window is not None
        call = Call(options.scale, window=seen.window)
        return attend_with_sink(q, k, v, sink, path.kernel, Extra(), call)
    mask, causal = _mask(q, k, seen, bias)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    call = Call(options.scale, causal, options.dropout)
    return attend_with_sink(q, k, v, sink, path.kernel, Extra(mask), call)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Visibility,
    bias: torch.Tensor | None,
    options: Options,
) -> torch.Tensor:
    """Attends by PyTorch's scaled_dot_product_attention; see ``attend``."""
    mask, causal = _mask(q, k, seen, bias)
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=causal,
        scale=options.scale,
        enable_gqa=bool(q.shape[1] != k.shape[1]),  # torch.jit.trace gives a tensor
    )


def varlen_obstacle(q: torch.Tensor, v: torch.Tensor, options: Options) -> str | None:
    """Returns why PyTorch's packed kernel cannot be used, as ``Path.reason``; None if it can."""
    if not _varlen_takes("scale", "window_size"):
        return "this PyTorch has no varlen_attn with a scale and a window"
    if not q.is_cuda or q.dtype not in _HALF:
        return "PyTorch's varlen_attn takes fp16 and bf16 on CUDA only"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 256 or q.shape[-1] % 8:
        return "PyTorch's varlen_attn refuses these head sizes"
    if options.dropout > 0.0:
        return "PyTorch's varlen_attn has no dropout"
    return None


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    window: tuple[int, int],
    options: Options,
) -> torch.Tensor:
    """Computes attention within packed sequences by PyTorch's kernel; ``window`` -1 = no limit."""
    from torch.nn.attention.varlen import varlen_attn

    more: dict[str, Any] = {}
    if q.shape[1] != k.shape[1] and _varlen_takes("enable_gqa"):  # before, it was implied
        more["enable_gqa"] = True
    out: Any = varlen_attn(
        q, k, v, *starts, *longest, scale=options.scale, window_size=window, **more
    )
    return out


def _windowed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Visibility, options: Options
) -> torch.Tensor:
    """Attends in a sliding window, with each sequence of the batch as one packed sequence."""
    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    assert seen.window is not None
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    both = (starts * queries, starts * keys)
    out = varlen(q, k, v, both, (queries, keys), seen.window, options)
    return out.unflatten(0, (batch, queries)).transpose(1, 2)


def _moved(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    path: Path,
    seen: Visibility,
    options: Options,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attends causally to tokens that are not padded, which come first; 0 for the others."""
    assert seen.padded is not None
    sequence_first = q.stride(0) < q.stride(2)
    places = padding_behind(seen.padded, q.shape[0], sequence_first)
    order = (2, 0, 1, 3) if sequence_first else (0, 2, 1, 3)  # of memory
    back = (1, 2, 0, 3) if sequence_first else (0, 2, 1, 3)

    def move(x: torch.Tensor, to: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = x.permute(order)
        return to(x.flatten(0, 1)).view(x.shape).permute(back)

    q, k, v = (move(x, places.close) for x in (q, k, v))
    out = attend(q, k, v, None, path, Visibility("upper_left"), options, sink=sink)
    return move(out, places.open)


def _all_hidden(seen: Visibility, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Returns one mask [1 or b, 1 or h, queries, keys] of all that ``seen`` hides."""
    if seen.window is not None:
        return band(queries, keys, keys - queries, *seen.window, device)
    offset = keys - queries if seen.causal == "bottom_right" else 0
    later = band(queries, keys, offset, -1, 0, device)
    return later if seen.hidden is None else later | seen.hidden


def _softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Visibility,
    bias: torch.Tensor | None,
    options: Options,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attends by two batched GEMMs around the fused scaled_softmax; see ``attend``."""
    batch, heads, queries, size = q.shape
    groups, keys = k.shape[1:3]
    hidden, causal = seen.hidden, seen.causal
    if options.has_sink and causal is not None:
        hidden, causal = _all_hidden(seen, queries, keys, q.device), None
    if seen.window is not None or (causal == "upper_left" and queries != keys):
        hidden, causal = _all_hidden(seen, queries, keys, q.device), None
    # The heads of a group are rows of one GEMM with the group's keys.
    shape = (batch * groups, heads // groups * queries, size)
    rows, columns = q.reshape(shape), k.reshape(batch * groups, keys, size).transpose(1, 2)
    scale = options.scale
    if bias is None and q.dtype is not torch.float16:
        scores = torch.bmm(rows, columns).view(batch, heads, queries, keys)
    else:
        # Scaled inside the GEMM, before its rounding, so that fp16 does not overflow.
        alpha, scale = scale / options.layer_scale, options.layer_scale
        scores = torch.baddbmm(q.new_empty(1, 1, 1), rows, columns, beta=0.0, alpha=alpha)
        scores = scores.view(batch, heads, queries, keys)
        if bias is not None:
            scores = torch.add(scores, bias, alpha=1.0 / scale)
    if options.has_sink:
        weights = weights_beside_sink(scores, scale, hidden, sink)
    else:
        weights = scaled_softmax(scores, scale, hidden, causal=causal)
    if options.dropout > 0.0:
        weights = functional.dropout(weights, options.dropout)
    weights = weights.view(*shape[:2], keys)
    out = torch.bmm(weights, v.reshape(batch * groups, keys, v.shape[3]))
    return out.view(batch, heads, queries, v.shape[3])
