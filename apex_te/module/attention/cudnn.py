"""Head sizes of cuDNN's attention, and whether its results are right."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...runtime.tracing import dispatch_modes, transforms_active

# Beside equal sizes up to 128, if torch and its cuDNN have them: of queries, of values.
_SIZES = ((192, 128), (256, 256))
_TOKENS = 520  # not a multiple of 128: NaN in cuDNN 9.15.0 and before (pytorch #169849)
# Without a known fault in what is asked of them here: 9.15.1 to 9.20. Faults of others are listed
# in Transformer Engine's get_attention_backend.
_TRUSTED = range(91501, 92100)
_MOST_ERROR = 5e-2  # bf16's roundings give a tenth of it, a wrong kernel more or NaN


@functools.cache
def _asks_cudnn(size: int, value_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    shape = (1, 1, _TOKENS)
    q = torch.empty(*shape, size, dtype=dtype, device=device, requires_grad=True)
    v = torch.empty(*shape, value_size, dtype=dtype, device=device, requires_grad=True)
    given = torch.backends.cuda.SDPAParams(q, q, v, None, 0.0, True, False)
    return torch.backends.cuda.can_use_cudnn_attention(given)


def cudnn_has_sizes(size: int, value_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if cuDNN's kernels have heads of these sizes, also in backward."""
    if size == value_size <= 128:
        return size % 8 == 0
    return (size, value_size) in _SIZES and _asks_cudnn(size, value_size, dtype, device)


cudnn_has_sizes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def cudnn_drops() -> bool:
    """Returns True if cuDNN's dropout is right, which is unknown before 9.15.1."""
    version = torch.backends.cudnn.version()
    return version is None or version >= _TRUSTED.start


cudnn_drops._dynamo_marked_constant = True  # type: ignore[attr-defined]

_checked: dict[tuple[object, ...], bool] = {}


def cudnn_is_right(
    size: int, value_size: int, dtype: torch.dtype, device: torch.device, form: str
) -> bool:
    """Returns True if cuDNN's results are right for such heads, "causal" or "full".

    Releases with known faults, and later ones, compute a small attention first, once in a process.
    Where that cannot be done, in a graph's capture or on tensors without data, they count as wrong.
    """
    version = torch.backends.cudnn.version()
    if version is None or version in _TRUSTED:
        return True
    key = (size, value_size, dtype, device, form)
    found = _checked.get(key)
    if found is None:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or dispatch_modes() or transforms_active():
            return False
        found = _checked[key] = _agrees(size, value_size, dtype, device, form == "causal")
    return found


cudnn_is_right._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _agrees(
    size: int, value_size: int, dtype: torch.dtype, device: torch.device, causal: bool,
    kernel: SDPBackend = SDPBackend.CUDNN_ATTENTION,
) -> bool:  # fmt: skip
    """Returns True if a kernel's output and gradients are those of plain maths in float32."""
    random = torch.Generator(device).manual_seed(0)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):

        def normal(heads: int, width: int) -> torch.Tensor:
            shape = (1, heads, _TOKENS, width)
            return torch.randn(shape, generator=random, device=device, dtype=dtype)

        inputs = [normal(2, size), normal(1, size), normal(1, value_size)]
        grad = normal(2, value_size)

        def results(backend: SDPBackend, to: torch.dtype) -> list[torch.Tensor]:
            leaves = [x.to(to, copy=True).requires_grad_() for x in inputs]
            with sdpa_kernel(backend):
                q, k, v = leaves
                out = functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=True
                )
                return [out, *torch.autograd.grad(out, leaves, grad.to(to))]

        try:
            found = results(kernel, dtype)
        except RuntimeError:  # which PyTorch raises where it refuses the kernel
            return False
        wanted = results(SDPBackend.MATH, torch.float32)
        return all(
            bool((x.float() - y).norm() <= _MOST_ERROR * y.norm())
            for x, y in zip(found, wanted, strict=True)
        )
