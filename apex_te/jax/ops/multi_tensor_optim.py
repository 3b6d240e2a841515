"""Optimizer steps over lists of arrays: Adam / AdamW, SGD and LAMB, each in a few launches.

Parameters and gradients are float32, float16 or bfloat16, in any combination; moments and master
weights are float32. A parameter that has a master weight is not read: it becomes the updated master
weight, rounded. What a step updates is returned, in the memory of what was given where that was
donated to the program.

Devices of a mesh update their parts, but for LAMB, whose steps need norms of whole arrays: they
run whole on every device. What changes between steps may be an array of one element: ``lr``,
``step``, ``inv_scale`` and ``found_inf``, which skips the step if it is not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ...runtime import scratch_sizes
from .._call import call
from .._partition import shared, varying_along
from .._rule import parse
from . import _checks
from ._checked import checked

__all__ = ["AdamStep", "SgdStep", "adam", "lamb", "sgd"]

# XLA takes long to compile a call with more arrays that are updated in place.
MOST_TENSORS = 64
_Arrays = Sequence[jax.Array]
_S = jax.ShapeDtypeStruct


class AdamStep(NamedTuple):
    """Arrays after a step of Adam or LAMB, lists in the order of the parameters.

    Attributes:
        params, exp_avgs, exp_avg_sqs: updated arrays, in the dtypes that were given.
        masters: updated master weights; empty if none were given.
    """

    params: list[jax.Array]
    exp_avgs: list[jax.Array]
    exp_avg_sqs: list[jax.Array]
    masters: list[jax.Array]


class SgdStep(NamedTuple):
    """Arrays after a step of SGD, lists in the order of the parameters.

    Attributes:
        params: updated parameters, in their dtypes.
        momentums: updated momentum buffers; empty without momentum.
        masters: updated master weights; empty if none were given.
    """

    params: list[jax.Array]
    momentums: list[jax.Array]
    masters: list[jax.Array]


@checked
def adam(
    params: _Arrays,
    grads: _Arrays,
    exp_avgs: _Arrays,
    exp_avg_sqs: _Arrays,
    *,
    step: int | jax.Array,
    lr: float | jax.Array,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw: bool = True,
    bias_correction: bool = True,
    maximize: bool = False,
    masters: _Arrays | None = None,
    inv_scale: jax.Array | None = None,
    found_inf: jax.Array | None = None,
) -> AdamStep:
    """Computes one AdamW or Adam step, as ``torch.optim`` does.

    Args:
        params: arrays in float32, float16 or bfloat16; not read if ``masters`` is given.
        grads: arrays in params' shapes; each in any of the three dtypes.
        exp_avgs, exp_avg_sqs: float32 arrays in params' shapes.
        step: the number of this update, 1 for the first: a number, or one float32 or int32 element.
        lr: learning rate: a number, or one float32 element.
        betas: decay rates of ``exp_avgs`` and ``exp_avg_sqs``, each in [0, 1).
        eps: added to the denominator.
        weight_decay: coefficient of weight decay.
        adamw: decay the weights directly (AdamW) instead of adding the decay to the gradient
            (Adam).
        bias_correction: divide the averages by 1 - beta**step.
        maximize: maximise instead of minimise.
        masters: master weights, float32, in params' shapes; params become these, rounded. None
            updates params directly.
        inv_scale: one float32 element, multiplies every gradient: 1 / loss scale.
        found_inf: one float32 or int32 element; a value other than 0 skips the step.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or list length does not match, or ``betas`` or ``step`` is out of range.
        jax.errors.JaxRuntimeError: ``eps`` is negative; raised when the program runs.
    """
    name = "multi_tensor_adam"
    columns = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    lists = _columns(name, params, grads, columns, masters)
    arrays, numbers = _moment_options(
        name, lr, step, betas, eps, weight_decay, adamw, bias_correction
    )
    arrays |= _scaling(name, inv_scale, found_inf)
    numbers |= {"maximize": maximize, "eps_inside_sqrt": False, "unscale_grads": False}
    made = _run(name, lists, arrays, numbers)
    return AdamStep(*(made.get(each, []) for each in AdamStep._fields))


@checked
def sgd(
    params: _Arrays,
    grads: _Arrays,
    momentums: _Arrays | None = None,
    *,
    lr: float | jax.Array,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first_step: bool = False,
    maximize: bool = False,
    masters: _Arrays | None = None,
    inv_scale: jax.Array | None = None,
    found_inf: jax.Array | None = None,
) -> SgdStep:
    """Computes one step of stochastic gradient descent, as ``torch.optim.SGD`` does.

    Args:
        params: arrays in float32, float16 or bfloat16; not read if ``masters`` is given.
        grads: arrays in params' shapes; each in any of the three dtypes.
        momentums: momentum buffers, float32, in params' shapes; required if ``momentum`` is not 0.
        lr: learning rate: a number, or one float32 element.
        momentum: factor of the momentum buffers.
        dampening: the gradient enters the momentum buffers with weight 1 - dampening.
        weight_decay: L2 coefficient.
        nesterov: use Nesterov momentum.
        first_step: overwrite the momentum buffers with the gradient, without reading them.
        maximize: maximise instead of minimise.
        masters: master weights, float32, in params' shapes; params become these, rounded. None
            updates params directly.
        inv_scale: one float32 element, multiplies every gradient: 1 / loss scale.
        found_inf: one float32 or int32 element; a value other than 0 skips the step.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or list length does not match, or ``momentums`` is missing.
    """
    name = "multi_tensor_sgd"
    if momentum and not momentums and params:
        raise ValueError(f"{name}: momentums must have {len(params)} entries like params, got 0")
    columns = {"momentums": (momentums or []) if momentum else []}
    lists = _columns(name, params, grads, columns, masters)
    rate, arrays = _number_or_array(name, "lr", lr)
    arrays |= _scaling(name, inv_scale, found_inf)
    numbers = {
        "lr": rate, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
        "nesterov": nesterov, "first_step": first_step, "maximize": maximize,
        "unscale_grads": False,
    }  # fmt: skip
    made = _run(name, lists, arrays, numbers)
    return SgdStep(*(made.get(each, []) for each in SgdStep._fields))


@checked
def lamb(
    params: _Arrays,
    grads: _Arrays,
    exp_avgs: _Arrays,
    exp_avg_sqs: _Arrays,
    *,
    step: int | jax.Array,
    lr: float | jax.Array,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    adamw: bool = True,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    nvlamb: bool = False,
    max_grad_norm: float = 0.0,
    grad_norm: jax.Array | None = None,
    masters: _Arrays | None = None,
    inv_scale: jax.Array | None = None,
    found_inf: jax.Array | None = None,
) -> AdamStep:
    """Computes one LAMB step (arXiv 1904.00962): Adam with a trust ratio for each tensor.

    A tensor's learning rate is lr * |param| / |update|. Exceptions: it is lr if one of these norms
    is 0, and for all tensors if ``weight_decay`` is 0 and ``nvlamb`` is False.

    Args:
        params: arrays in float32, float16 or bfloat16; not read if ``masters`` is given.
        grads: arrays in params' shapes; each in any of the three dtypes.
        exp_avgs, exp_avg_sqs: float32 arrays in params' shapes.
        step: the number of this update, 1 for the first: a number, or one float32 or int32 element.
        lr: learning rate: a number, or one float32 element.
        betas: decay rates of ``exp_avgs`` and ``exp_avg_sqs``, each in [0, 1).
        eps: added to the denominator.
        weight_decay: coefficient of weight decay.
        bias_correction: divide the averages by 1 - beta**step.
        masters: master weights, float32, in params' shapes; params become these, rounded. None
            updates params directly.
        inv_scale: one float32 element, multiplies every gradient: 1 / loss scale.
        found_inf: one float32 or int32 element; a value other than 0 skips the step.
        adamw: add weight decay to the update instead of the gradient.
        grad_averaging: the gradient enters exp_avg with weight 1 - betas[0] instead of 1.
        nvlamb: apply the trust ratio even if ``weight_decay`` is 0.
        max_grad_norm: global norm to which the gradients, after ``inv_scale``, are clipped; 0 does
            not clip.
        grad_norm: global norm of ``grads`` before ``inv_scale``, one float32 element; None computes
            it if needed.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or list length does not match, or ``betas`` or ``step`` is out of range.
        jax.errors.JaxRuntimeError: ``eps`` is negative; raised when the program runs.
    """
    name = "multi_tensor_lamb"
    columns = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    lists = _columns(name, params, grads, columns, masters)
    arrays, numbers = _moment_options(
        name, lr, step, betas, eps, weight_decay, adamw, bias_correction
    )
    arrays |= _scaling(name, inv_scale, found_inf)
    numbers |= {"grad_averaging": grad_averaging, "nvlamb": nvlamb}
    numbers |= {"max_grad_norm": max_grad_norm, "unscale_grads": False}
    if max_grad_norm > 0 and params:
        norm = l2norm(grads) if grad_norm is None else grad_norm
        arrays["grad_norm"] = _checks.is_scalar(name, "grad_norm", norm)
    made = _run(name, lists, arrays, numbers, sums=2)
    return AdamStep(*(made.get(each, []) for each in AdamStep._fields))


def l2norm(tensors: _Arrays) -> jax.Array:
    """Computes the L2 norm over all arrays as one float32 element, deterministically.

    ``tensors`` are arrays of any shapes in float32, float16 or bfloat16. On a mesh every device
    computes the whole norm.
    """
    name = "multi_tensor_l2norm"
    found = [
        _checks.has_dtype(name, f"tensors[{i}]", x, _checks.FLOATS) for i, x in enumerate(tensors)
    ]
    words = scratch_sizes.list_words(len(found), 1)

    def body(*arrays: jax.Array) -> tuple[jax.Array]:
        asked = {"total": _S((1,), jnp.float32), "workspace": _S((words,), jnp.float32)}
        return (call("multi_tensor", name, asked, tensors=list(arrays))["total"],)

    rule = ", ".join(f"tensors{i}: _" for i in range(len(found))) + " -> total: _"
    return shared(parse(name, rule, "", {}), body)(*found)[0]


def _columns(
    function: str,
    params: _Arrays,
    grads: _Arrays,
    moments: Mapping[str, _Arrays],
    masters: _Arrays | None,
) -> dict[str, list[jax.Array]]:
    """Returns the lists of a step by parameter, after checks; ``moments`` must be float32."""
    lists = {"params": params, "grads": grads, **moments, "masters": masters or []}
    found: dict[str, list[jax.Array]] = {name: [] for name in lists}
    for name in ("masters", "momentums"):
        if not lists.get(name, ()):
            lists.pop(name, None)
    for name, arrays in lists.items():
        if len(arrays) != len(params):
            raise ValueError(
                f"{function}: {name} must have {len(params)} entries like params, got {len(arrays)}"
            )
    for i in range(len(params)):
        for name, arrays in lists.items():
            allowed = _checks.FLOATS if name in ("params", "grads") else ("float32",)
            place = f"{name}[{i}]"
            shape = jnp.shape(params[i])
            found[name].append(_checks.has_dtype(function, place, arrays[i], allowed, shape))
    return found


def _number_or_array(
    function: str, name: str, value: Any, dtypes: Sequence[str] = ("float32",)
) -> tuple[Any, dict[str, jax.Array]]:
    """Returns (number, {}) for a number, (0, {parameter: array}) for an array of one element."""
    if isinstance(value, (int, float)):
        return value, {}
    parameter = f"{name}_tensor"
    found = _checks.has_dtype(function, parameter, value, dtypes)
    return 0, {parameter: _checks.is_scalar(function, parameter, found, found.dtype.name)}


def _moment_options(
    function: str,
    lr: Any,
    step: Any,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adamw: bool,
    bias_correction: bool,
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Returns the options that Adam and LAMB share as two dicts by name: arrays, plain numbers."""
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{function}: {name} must be at least 0 and below 1, got {beta:g}")
    rate, arrays = _number_or_array(function, "lr", lr)
    count, more = _number_or_array(function, "step", step, ("float32", "int32"))
    if not more and bias_correction and count < 1:
        raise ValueError(f"{function}: step must be at least 1, got {count}")
    numbers = {
        "lr": rate, "beta1": betas[0], "beta2": betas[1], "eps": eps,
        "weight_decay": weight_decay, "step": count, "adamw": adamw,
        "bias_correction": bias_correction,
    }  # fmt: skip
    return {**arrays, **more}, numbers


def _scaling(function: str, inv_scale: Any, found_inf: Any) -> dict[str, jax.Array]:
    """Returns the inverse loss scale and the flag that skips the step, those that are given."""
    found = {}
    if inv_scale is not None:
        found["inv_scale"] = _checks.is_scalar(function, "inv_scale", inv_scale)
    if found_inf is not None:
        flag = _checks.has_dtype(function, "found_inf", found_inf, ("float32", "int32"))
        found["found_inf"] = _checks.is_scalar(function, "found_inf", flag, flag.dtype.name)
    return found


def _run(
    function: str,
    lists: Mapping[str, Sequence[jax.Array]],
    arrays: Mapping[str, jax.Array],
    numbers: Mapping[str, Any],
    sums: int = 0,
) -> dict[str, list[jax.Array]]:
    """Calls a step's function for some arrays at a time and returns the lists that it updates."""
    given = {name: every for name, every in lists.items() if every}
    made: dict[str, list[Any]] = {n: [None] * len(v) for n, v in lists.items() if n != "grads"}
    groups: dict[frozenset[str], list[int]] = {}
    for i in range(len(lists["params"])):
        # In a shard_map what is the same on some devices stays so, beside arrays that are not.
        groups.setdefault(varying_along([v[i] for v in given.values()]), []).append(i)
    for group in groups.values():
        for first in range(0, len(group), MOST_TENSORS):
            places = group[first : first + MOST_TENSORS]
            part = {name: [every[i] for i in places if every] for name, every in lists.items()}
            for name, updated in _run_part(function, part, arrays, numbers, sums).items():
                for i, x in zip(places, updated, strict=True):
                    made[name][i] = x.reshape(lists["params"][i].shape)
    return made


def _run_part(
    function: str,
    lists: Mapping[str, Sequence[jax.Array]],
    arrays: Mapping[str, jax.Array],
    numbers: Mapping[str, Any],
    sums: int,
) -> dict[str, list[jax.Array]]:
    """Calls a step's function once; the arguments are those of ``_run``."""
    count = len(lists["params"])
    dtypes = [x.dtype for x in lists["params"]]
    read = {name: every for name, every in lists.items() if every}
    empty = [name for name in lists if name not in read]
    written = [name for name in read if name != "grads"]
    # With master weights parameters are written, not read; a step that is skipped writes nothing.
    only_made = "masters" in read and "found_inf" not in arrays
    if only_made:
        del read["params"]

    def body(*given: jax.Array) -> tuple[jax.Array, ...]:
        columns = {n: list(given[i * count : (i + 1) * count]) for i, n in enumerate(read)}
        options = dict(zip(arrays, given[len(read) * count :], strict=True))
        asked: dict[str, Any] = {}
        if only_made:
            masters = columns["masters"]
            asked["params"] = [_S(x.shape, d) for x, d in zip(masters, dtypes, strict=True)]
        if sums:
            words = scratch_sizes.list_words(count, sums)
            asked["workspace"] = _S((words,), jnp.float32)
        columns |= {name: [] for name in empty}
        made = call(
            "multi_tensor", function, asked, only_read=("grads",), **columns, **options, **numbers
        )
        return tuple(x for name in written for x in made[name])

    shapes = [x.shape or (1,) for x in lists["params"]]
    # A name for each dimension, so that no array is reshaped on its way to the call.
    dims = [[f"t{i}x{d}" for d in range(len(shape))] for i, shape in enumerate(shapes)]

    def terms(names: Sequence[str]) -> list[str]:
        return [f"{name}{i}: {' '.join(each)}" for name in names for i, each in enumerate(dims)]

    rule = ", ".join([*terms(list(read)), *(f"{name}: _" for name in arrays)])
    rule = f"{rule} -> {', '.join(terms(written))}"
    split = "" if sums else " ".join(name for each in dims for name in each)
    run = _unmapped(function, shared(parse(function, rule, split, {}), body))
    given = [x.reshape(s) for v in read.values() for x, s in zip(v, shapes, strict=True)]
    made = run(*given, *arrays.values())
    return {n: list(made[i * count : (i + 1) * count]) for i, n in enumerate(written)}


def _unmapped(function: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that ``jax.vmap`` refuses to map."""
    mapped = custom_vmap(run)

    @mapped.def_vmap
    def _batched(*_: Any) -> Any:
        raise NotImplementedError(
            f"{function}: params must be whole arrays, got jax.vmap over them"
        )

    return mapped
