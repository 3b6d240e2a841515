"""NVTX ranges around the forwards and backwards of modules, for profilers; off by default.

``APEX_TE_NVTX=1`` in the environment or ``enable(True)`` turns them on. Turned off they cost
nothing: they live in hooks that are registered only while they are on.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.modules import module as module_hooks

from .op_builder.jit import env

__all__ = ["enable", "is_enabled"]

VARIABLE = "APEX_TE_NVTX"
_OURS = f"{__package__}.module."
_hooks: list[Any] = []


def is_enabled() -> bool:
    """Returns True if NVTX ranges are on in this process."""
    return bool(_hooks)


def enable(enabled: bool = True) -> None:
    """Turns the ranges on or off for the whole process.

    Modules of apex_te, and of classes derived from them, have ranges. A range is labelled with the
    module's ``name``, else its class, with its ``layer_number`` if it has one, and ``forward`` or
    ``backward``; ranges of submodules nest inside. A backward range begins when the gradient of the
    module's first output arrives and ends when the gradients of its inputs are computed. Code that
    torch.compile has compiled has no ranges.

    Args:
        enabled: True to register the hooks that make ranges, False to remove them.

    Raises:
        TypeError: ``enabled`` is not a bool.
        RuntimeError: PyTorch was built without NVTX.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"nvtx.enable: enabled must be a bool, got {type(enabled).__name__}")
    if enabled == is_enabled():
        return
    if not enabled:
        while _hooks:
            handle = _hooks.pop()
            handle.remove()
            # The handle leaves this mark behind, and torch.compile would still see a global hook.
            module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)
        return
    if not _is_available():
        raise RuntimeError("nvtx.enable: NVTX needs a CUDA build of PyTorch, got one without it")
    _hooks.append(module_hooks.register_module_forward_pre_hook(_before))
    _hooks.append(
        module_hooks.register_module_forward_hook(_after, with_kwargs=True, always_call=True)
    )


def _is_available() -> bool:
    return hasattr(torch._C, "_nvtx")


def _has_ranges(module: torch.nn.Module) -> bool:
    """Returns True if the module's class is one of apex_te.module, or derived from one."""
    return any(base.__module__.startswith(_OURS) for base in type(module).__mro__)


def _label(module: torch.nn.Module) -> str:
    """Returns the label of a module: its ``name``, else its class and its ``layer_number``."""
    name = getattr(module, "name", None)
    if isinstance(name, str) and name:
        return name
    layer = getattr(module, "layer_number", None)
    kind = type(module).__name__
    return kind if layer is None else f"{kind} {layer}"


def _before(module: torch.nn.Module, args: Any) -> None:
    """Begins the range of a forward, as a global forward pre-hook."""
    if not torch.compiler.is_compiling() and _has_ranges(module):
        torch.cuda.nvtx.range_push(f"{_label(module)} forward")


def _after(module: torch.nn.Module, args: Any, *rest: Any) -> None:
    """Ends the range of a forward and prepares that of its backward, as a global forward hook."""
    if torch.compiler.is_compiling() or not _has_ranges(module):
        return
    torch.cuda.nvtx.range_pop()
    if len(rest) != 2:
        return
    kwargs, output = rest
    for out in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(out, torch.Tensor) and out.grad_fn is not None:
            given = (*args, *kwargs.values())
            inputs = [a for a in given if isinstance(a, torch.Tensor) and a.requires_grad]
            _Backward(f"{_label(module)} backward").attach(out.grad_fn, inputs)
            return


class _Backward:
    """Profiler range of one module's backward.

    The range is started and ended by handle, not pushed and popped on a stack, because autograd
    need not run the backwards of modules nested.
    """

    __slots__ = ("label", "running")

    def __init__(self, label: str) -> None:
        self.label = label
        self.running: Any = None

    def attach(self, node: Any, inputs: list[torch.Tensor]) -> None:
        """Hooks the range to the autograd graph.

        Module hooks of the full backward are not used: they would forbid in-place use of the
        outputs.
        """
        node.register_prehook(self.begin)
        if inputs:
            torch.autograd.graph.register_multi_grad_hook(inputs, self.end)
        else:  # only parameters learn: the range is that of the last operation
            node.register_hook(self.end)

    def begin(self, *_: Any) -> None:
        """Starts the range, unless it runs already."""
        if self.running is None:
            self.running = torch.cuda.nvtx.range_start(self.label)

    def end(self, *_: Any) -> None:
        """Ends the range, if it runs."""
        if self.running is not None:
            torch.cuda.nvtx.range_end(self.running)
            self.running = None


def _from_environment() -> None:
    """Turns the ranges on if ``APEX_TE_NVTX`` asks for them; warns if PyTorch has no NVTX."""
    if not env.boolean(VARIABLE, False):
        return
    if _is_available():
        enable(True)
    else:
        warnings.warn(f"{VARIABLE}: NVTX needs a CUDA build of PyTorch", stacklevel=2)


_from_environment()
