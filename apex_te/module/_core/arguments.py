"""Checks of the modules' arguments, errors that name them, and first values of parameters."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch

from ...fp8 import model_init
from ...fp8.parameter.parameter import FP8Parameter
from ...ops.binding import check_dense
from ...runtime.named_arguments import argument_names, check_count, nearest, renamed
from ...runtime.tracing import is_traced


def class_name(kind: type) -> str:
    """Returns ``apex_te.Linear``, ``torch.nn.Linear``, or the bare name of any other class."""
    package = kind.__module__.split(".")
    if package[0] == "apex_te":
        return f"apex_te.{kind.__name__}"
    return f"torch.nn.{kind.__name__}" if package[:2] == ["torch", "nn"] else kind.__name__


def shown_name(module: torch.nn.Module) -> str:
    """Returns the class name for ``repr``; a user's subclass keeps its own."""
    return class_name(type(module))


INIT_STD = 0.023
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def params_dtype_of(
    owner: str, params_dtype: torch.dtype | None, dtype: torch.dtype | None
) -> torch.dtype:
    """Returns ``params_dtype`` or its other name ``dtype``; None for both: torch's default."""
    if params_dtype is not None and dtype is not None and params_dtype != dtype:
        raise ValueError(f"{owner}: dtype must equal params_dtype, got {dtype} and {params_dtype}")
    name, chosen = ("params_dtype", params_dtype) if dtype is None else ("dtype", dtype)
    chosen = torch.get_default_dtype() if chosen is None else chosen
    if not isinstance(chosen, torch.dtype):
        near = nearest(chosen, _DTYPES) or "bfloat16"
        raise TypeError(
            f"{owner}: {name} must be a torch.dtype such as torch.{near}, got {chosen!r}"
        )
    if str(chosen).removeprefix("torch.") not in _DTYPES:
        instead = "; fp8_model_init makes weights in FP8" if "float8" in str(chosen) else ""
        raise TypeError(
            f"{owner}: {name} must be {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}, "
            f"got {chosen}{instead}"
        )
    return chosen


def autocast_dtype(owner: str, name: str, x: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype of ``torch.autocast`` on the device of ``x``; None if autocast is off."""
    device_type = x.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    if not x.is_floating_point():
        raise TypeError(f"{owner}: {name} must be a floating-point tensor, got {x.dtype}")
    return torch.get_autocast_dtype(device_type)


def parameter(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str | int | None,
    gemm_weight: bool | None = None,
) -> torch.nn.Parameter:
    """Makes a parameter without values, in FP8 if it is a GEMM weight inside ``fp8_model_init``.

    ``gemm_weight=None`` treats every matrix as a GEMM weight.
    """
    kept = model_init.settings()
    if kept is not None and (len(shape) == 2 if gemm_weight is None else gemm_weight):
        preserve = kept.preserve_high_precision_init_val
        held = FP8Parameter.empty(shape, kept.recipe, dtype, device, preserve)
        return torch.nn.Parameter(held)
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def fill(weight: torch.Tensor | None, init_method: Callable[[torch.Tensor], Any] | None) -> None:
    """Fills a weight, or each of a stack, by ``init_method``; None draws from N(0, 0.023^2)."""
    if weight is None:
        return
    method = _normal if init_method is None else init_method

    def each(value: torch.Tensor) -> None:
        for matrix in value.detach() if value.dim() == 3 else (value,):
            method(matrix)

    with torch.no_grad():
        if type(weight) is FP8Parameter:
            weight.initialize(each)
        else:
            each(weight)


def _normal(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, 0.0, INIT_STD)


def split_names(owner: str, parameters_split: Any, out_features: int) -> dict[str, int] | None:
    """Returns a weight's parts with the number of rows of each; None if it is not split."""
    if parameters_split is None:
        return None
    if isinstance(parameters_split, dict):
        parts = dict(parameters_split)
        if not all(isinstance(n, int) and n > 0 for n in parts.values()):
            raise ValueError(
                f"{owner}: parameters_split must map names to rows above 0, got {parts}"
            )
    elif isinstance(parameters_split, (tuple, list)) and parameters_split:
        names = list(parameters_split)
        if len(set(names)) != len(names):
            raise ValueError(f"{owner}: parameters_split must have unique names, got {names}")
        rows, rest = divmod(out_features, len(names))
        if rest:
            raise ValueError(
                f"{owner}: parameters_split must divide out_features={out_features}, "
                f"got {len(names)} names"
            )
        parts = dict.fromkeys(names, rows)
    else:
        raise TypeError(
            f"{owner}: parameters_split must be names or a dict of name to rows, "
            f"got {type(parameters_split).__name__}"
        )
    if not all(isinstance(name, str) and name.isidentifier() for name in parts):
        raise ValueError(f"{owner}: parameters_split must have identifiers, got {list(parts)}")
    if sum(parts.values()) != out_features:
        raise ValueError(
            f"{owner}: parameters_split must have out_features={out_features} rows, "
            f"got {sum(parts.values())}"
        )
    return parts


def checked_groups(owner: str, num_attention_heads: Any, num_gqa_groups: Any) -> int:
    """Returns the number of key heads, by default ``num_attention_heads``, after checks."""
    check_count(owner, "num_attention_heads", num_attention_heads)
    if num_gqa_groups is None:
        return num_attention_heads
    check_count(owner, "num_gqa_groups", num_gqa_groups)
    if num_attention_heads % num_gqa_groups:
        raise ValueError(
            f"{owner}: num_gqa_groups must divide num_attention_heads={num_attention_heads}, "
            f"got {num_gqa_groups}"
        )
    return num_gqa_groups


def checked_eps(owner: str, name: str, eps: Any) -> float:
    """Returns the epsilon of a norm; refuses 1 or more, most likely a misplaced argument."""
    value = checked_number(owner, name, eps)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{owner}: {name} must be at least 0 and below 1, got {eps}")
    return value


def checked_number(owner: str, name: str, value: Any) -> float:
    """Returns the argument ``name`` as a float; raises TypeError if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{owner}: {name} must be a float, got {type(value).__name__}")
    return float(value)


def checked_splits(
    owner: str, num_gemms: int, m_splits: Any, rows: int | None = None
) -> tuple[int, ...]:
    """Returns ``m_splits`` as a tuple after checks; the sum must not exceed ``rows``, if given."""
    if not isinstance(m_splits, (list, tuple)):
        raise TypeError(f"{owner}: m_splits must be a list of ints, got {type(m_splits).__name__}")
    for split in m_splits:
        if isinstance(split, bool) or not isinstance(split, int):
            raise TypeError(f"{owner}: m_splits must hold ints, got {type(split).__name__}")
    if len(m_splits) != num_gemms or min(m_splits) < 0:
        raise ValueError(
            f"{owner}: m_splits must be {num_gemms} counts of rows, got {list(m_splits)}"
        )
    if rows is not None and sum(m_splits) > rows:
        raise ValueError(
            f"{owner}: m_splits must be counts of at most the {rows} rows of inp, "
            f"got {list(m_splits)}"
        )
    return tuple(m_splits)


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


def initialize(module: torch.nn.Module) -> None:
    """Gives a new module's parameters their first values, unless they are on the meta device."""
    if not _is_on_meta(module):
        module.reset_parameters()  # type: ignore[operator]


def materialize(module: torch.nn.Module) -> None:
    """Moves a module's own parameters, not its children's, from the meta device to a real one.

    They get uninitialized memory on the default device, or on a GPU, if any, if that is the CPU.
    """
    if not _is_on_meta(module):
        return
    device = torch.get_default_device()
    if device.type == "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type != "meta":
        module.to_empty(device=device, recurse=False)


def _is_on_meta(module: torch.nn.Module) -> bool:
    return any(p is not None and p.is_meta for p in module._parameters.values())
