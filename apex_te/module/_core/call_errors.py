"""Errors of failed calls that name the module and its input; inputs are examined only then."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.argument_errors import check_dense
from ...runtime.named_arguments import argument_names, renamed
from ...runtime.tracing import is_traced

# What torch and Python raise for an input that does not fit.
VAGUE = (
    AssertionError, AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


def is_vague(module: torch.nn.Module, error: Exception) -> bool:
    """Returns True if an input may have caused the error, and the error does not say so."""
    own = str(error).startswith(f"{type(module).__name__}: ")
    return type(error) in VAGUE and not own and not is_traced()


def explain(
    module: torch.nn.Module,
    error: Exception,
    inputs: dict[str, Any],
    optional: dict[str, Any] | None = None,
    **names: str,
) -> None:
    """Raises a better error for a failed call of a module, if an input is wrong; else returns.

    ``names`` maps argument names of an inner function to the module's names for them.
    """
    if not is_vague(module, error):
        return
    owner = type(module).__name__
    given = {name: x for name, x in (optional or {}).items() if x is not None}
    for name, value in (inputs | given).items():
        if not isinstance(value, torch.Tensor):
            hint = "; torch.as_tensor makes a tensor of it" if _is_array(value) else ""
            got = type(value).__name__ if value is not None else "None"
            raise TypeError(f"{owner}: {name} must be a torch.Tensor, got {got}{hint}") from error
    _check_devices(owner, error, module, inputs | given)
    better = renamed(error, owner, argument_names(type(module).forward), names)
    if better is not None:
        raise better.with_traceback(error.__traceback__) from error.__cause__


def _is_array(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or hasattr(value, "__array__")


def _check_devices(
    owner: str, error: Exception, module: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> None:
    """Checks that tensors are dense and on the device of the module's parameters."""
    place = "the parameters"
    first: torch.Tensor | None = next(module.parameters(), None)
    if first is None:
        place, first = next(iter(tensors.items()))
    elif first.is_meta and not next(iter(tensors.values())).is_meta:
        raise ValueError(
            f"{owner}: parameters must have values, got parameters on the meta device; call "
            "reset_parameters(), or to_empty(device=...) and load a state dict"
        ) from error
    for name, value in tensors.items():
        try:
            check_dense(owner, **{name: value})
        except TypeError as better:
            raise better from error
        if value.device != first.device:
            raise ValueError(
                f"{owner}: {name} must be on {first.device} like {place}, got {value.device}"
            ) from error


def explain_attention(
    module: Any,
    error: Exception,
    layout: tuple[str, str],
    call: dict[str, Any],
    **names: str,
) -> None:
    """Raises a better error for a failed call of a module around attention; else returns."""
    if not is_vague(module, error):
        return
    owner, (layout_name, form) = type(module).__name__, layout
    x, memory, angles = (call[n] for n in ("hidden_states", "encoder_output", "rotary_pos_emb"))
    optional = {"encoder_output": memory, "core_attention_bias": call["core_attention_bias"]}
    for name, value in (("rotary_pos_emb", angles), ("attention_mask", call["attention_mask"])):
        if isinstance(value, torch.Tensor):  # else perhaps a pair of them
            optional[name] = value
    about_memory = _is_about(error, memory) and not _is_about(error, x)
    inp = "encoder_output" if about_memory else "hidden_states"
    explain(module, error, {"hidden_states": x}, optional, inp=inp, **names)
    dims = len(form) - 1
    for name, value in (("hidden_states", x), ("encoder_output", memory)):
        if value is not None and value.dim() != dims:
            shape = ", ".join([*form[: dims - 1], "hidden_size"])
            raise ValueError(
                f"{owner}: {name} must have shape [{shape}] with {layout_name} {form!r}, "
                f"got {list(value.shape)}"
            ) from error
    if (
        memory is not None
        and "b" in form
        and memory.shape[form.index("b")] != x.shape[form.index("b")]
    ):
        raise ValueError(
            f"{owner}: encoder_output must have the batch of hidden_states, {list(x.shape)}, "
            f"got {list(memory.shape)}"
        ) from error
    params = call["inference_params"]
    if params is not None and not hasattr(params, "step_of"):
        raise TypeError(
            f"{owner}: inference_params must be an InferenceParams, got {type(params).__name__}"
        ) from error
    if params is not None and not isinstance(params.sequence_len_offset, int):
        raise TypeError(
            f"{owner}: inference_params.sequence_len_offset must be an int, "
            f"got {type(params.sequence_len_offset).__name__}"
        ) from error
    if angles is not None and str(error).startswith("rope"):
        tokens = f"{x.shape[form.index('s')]} positions or more" if "s" in form else "all positions"
        tables = angles if isinstance(angles, (tuple, list)) else (angles,)
        got = " and ".join(f"{table.dtype} {list(table.shape)}" for table in tables)
        raise ValueError(
            f"{owner}: rotary_pos_emb must be floating-point angles of {tokens} and of at most a "
            f"head's elements, got {got}"
        ) from error


def has_passed(error: Exception, module: Any) -> bool:
    """Returns True if the error was raised inside of a method of ``module``."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_locals.get("self") is module:
            return True
        trace = trace.tb_next
    return False


def _is_about(error: Exception, x: Any) -> bool:
    """Returns True if the error ends with the shape or dtype of ``x``."""
    if not isinstance(x, torch.Tensor):
        return False
    return str(error).endswith((f"got {list(x.shape)}", f"got {x.dtype}"))
