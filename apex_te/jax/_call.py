"""The JAX primitive ``apex_te_call``: one call of a C function of an op in a program."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ..contract import Param
from . import _library, _partition

_NONE = -1


class Stacked(NamedTuple):
    """Stack of equal tensors as one array, or its shape and dtype; dimension 0 is the list."""

    array: Any


class _Plan:
    """Operands, results and attributes of one call, collected parameter by parameter.

    ``aliases`` pairs an operand with the result that overwrites it. ``buffers`` tells the handler
    where each tensor is (``csrc/jax_ffi``). ``places`` has the name, the first result and the
    number of results of each written parameter; the number is None for a single array.
    """

    def __init__(self, function: str) -> None:
        self.function = function
        self.operands: list[Any] = []
        self.outputs: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        self.aliases: list[tuple[int, int]] = []
        self.buffers: list[int] = []
        self.scalars: list[tuple[str, Any]] = []
        self.places: list[tuple[str, int, int | None]] = []

    def refuse(self, kind: type[Exception], place: str, expected: str, actual: str) -> NoReturn:
        """Raises an error in the dispatcher's words."""
        raise kind(f"{self.function}: {place} must {expected}, got {actual}")

    def operand(self, value: Any, place: str) -> int:
        """Adds an array and returns its number."""
        if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
            self.refuse(TypeError, place, "be a jax.Array", type(value).__name__)
        if np.issubdtype(value.dtype, np.complexfloating):
            self.refuse(TypeError, place, "have a real dtype", "a complex dtype")
        self.operands.append(value)
        return len(self.operands) - 1

    def result(self, value: Any, place: str) -> int:
        """Adds a result of the shape and dtype of ``value`` and returns its entry."""
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is None or dtype is None:
            self.refuse(TypeError, place, "be a jax.ShapeDtypeStruct", type(value).__name__)
        self.outputs.append((tuple(shape), np.dtype(dtype)))
        return _NONE - len(self.outputs)

    def tensor(self, value: Any, place: str, is_written: bool, is_result: bool) -> None:
        """Adds the entry of one tensor."""
        if is_result:
            self.buffers.append(self.result(value, place))
            return
        index = self.operand(value, place)
        if is_written:
            self.aliases.append((index, len(self.outputs)))
            index = self.result(value, place)
        self.buffers.append(index)

    def list_of(self, value: Any, p: Param, is_result: bool) -> int | None:
        """Adds the entries of a list of tensors; returns its length, None for a stack."""
        if isinstance(value, Stacked):
            shape: Sequence[int] = getattr(value.array, "shape", ())
            if not shape or shape[0] == 0:
                self.refuse(ValueError, p.name, "stack at least one tensor", f"shape {shape}")
            self.buffers.append(-shape[0])
            self.tensor(value.array, p.name, p.is_written, is_result)
            return None
        if not isinstance(value, (list, tuple)):
            self.refuse(TypeError, p.name, "be a list or tuple", type(value).__name__)
        self.buffers.append(len(value))
        for number, item in enumerate(value):
            self.tensor(item, f"{p.name}[{number}]", p.is_written, is_result)
        return len(value)

    def add(self, p: Param, value: Any, is_result: bool) -> None:
        """Adds one parameter."""
        if is_result and not p.is_written:
            self.refuse(TypeError, p.name, "be an argument", "a result")
        if not p.is_tensor:
            self.scalars.append((p.name, self.scalar(p, value)))
        elif value is None and p.is_optional:
            self.buffers.append(_NONE)
        elif p.kind == "Tensor[]":
            first = len(self.outputs)
            count = self.list_of(value, p, is_result)
            if p.is_written:
                self.places.append((p.name, first, count))
        else:
            if p.is_written:
                self.places.append((p.name, len(self.outputs), None))
            self.tensor(value, p.name, p.is_written, is_result)

    def scalar(self, p: Param, value: Any) -> Any:
        """Returns a scalar, or a tuple for a list of floats, after the dispatcher's checks."""
        if p.kind == "float[]":
            if not isinstance(value, (list, tuple)):
                self.refuse(TypeError, p.name, "be a list or tuple", type(value).__name__)
            return tuple(self.floating(v, f"{p.name}[{i}]") for i, v in enumerate(value))
        if p.kind == "float":
            return self.floating(value, p.name)
        if p.kind == "bool":
            if not isinstance(value, bool):
                self.refuse(TypeError, p.name, "be a bool", type(value).__name__)
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(TypeError, p.name, "be an int", type(value).__name__)
        if not -(2**63) <= value < 2**63:
            self.refuse(ValueError, p.name, "be an int of 64 bits", "one beyond them")
        return value

    def floating(self, value: Any, place: str) -> float:
        """Returns a float or an int as a float."""
        if isinstance(value, bool) or not isinstance(value, (float, int)):
            self.refuse(TypeError, place, "be a float", type(value).__name__)
        try:
            return float(value)
        except OverflowError:
            self.refuse(ValueError, place, "be in the range of a double", "an int beyond it")


def call(
    op: str,
    function: str,
    /,
    results: Mapping[str, Any] | None = None,
    only_read: Any = (),
    **arguments: Any,
) -> dict[str, Any]:
    """Calls a C function of an op; in ``jax.jit`` the call becomes part of the program.

    A parameter that the function writes is passed as a result, which the call allocates, or as an
    argument: XLA passes a copy of an array that is still needed, otherwise its own memory. Returns
    the arrays that the function wrote, by parameter.

    Args:
        results: shape and dtype of each result, by parameter; lists for parameters that are lists.
        only_read: names of parameters that this call does not write.
        arguments: arrays, lists of arrays, ``Stacked`` or Python scalars.
    """
    parameters, made = _library.contract_of(op, function).params, results or {}
    plan = _Plan(function)
    for name in (*arguments, *made):
        if name not in parameters:
            raise TypeError(f"{function}: unknown argument {name}")
    for p in parameters.values():
        if p.name in made and p.name in arguments:
            raise TypeError(f"{function}: got {p.name} twice")
        if p.name not in made and p.name not in arguments and not p.is_optional:
            raise TypeError(f"{function}: missing argument {p.name}")
        is_result = made.get(p.name) is not None
        if p.name in only_read:
            p = p._replace(is_written=False)
        plan.add(p, made[p.name] if is_result else arguments.get(p.name), is_result)
    if not plan.outputs:
        raise TypeError(f"{function}: at least one result must be asked for, got none")
    written = primitive.bind(
        *_partition.vary_alike(plan.operands), op=op, function=function,
        buffers=tuple(plan.buffers), scalars=tuple(plan.scalars), outputs=tuple(plan.outputs),
        aliases=tuple(plan.aliases),
    )  # fmt: skip
    return {
        name: written[first] if count is None else list(written[first : first + count])
        for name, first, count in plan.places
    }


primitive = Primitive("apex_te_call")
primitive.multiple_results = True


@primitive.def_abstract_eval
def _shapes(*operands: Any, outputs: Sequence[Any], **_: Any) -> list[Any]:
    """Returns the abstract values of the results."""
    return [_partition.result_type(operands, shape, dtype) for shape, dtype in outputs]


@functools.lru_cache(maxsize=4096)
def _program(**params: Any) -> Any:
    """Returns a compiled program that is one call."""
    return jax.jit(functools.partial(primitive.bind, **params))


@primitive.def_impl
def _run(*operands: Any, **params: Any) -> Any:
    """Runs a call outside of ``jax.jit``."""
    with jax.disable_jit(False):  # else the program would bind the primitive again
        return _program(**params)(*operands)


def _attribute(value: Any) -> Any:
    """Returns a scalar, or a tuple of floats, as numpy's type of the attribute."""
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, tuple):
        return np.array(value, np.float64)
    return np.float64(value) if isinstance(value, float) else np.int64(value)


def _lower(platform: str, context: Any, *operands: Any, **params: Any) -> Any:
    """Lowers a call to XLA's custom call; the op's library is opened, or built, here."""
    target = _library.bind(params["op"], params["function"], platform)
    attributes = {name: _attribute(value) for name, value in params["scalars"]}
    attributes["buffers"] = np.array(params["buffers"], np.int64)
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=dict(params["aliases"]))
    return rule(context, *operands, **attributes)


for _platform in _library.PLATFORMS:
    mlir.register_lowering(primitive, functools.partial(_lower, _platform), platform=_platform)
