"""Signatures of ops' C functions, taken apart."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..op_builder import get_builder


class Parameter(NamedTuple):
    """One parameter of a C function.

    ``kind`` is "Tensor", "Tensor[]", "int", "float", "float[]" or "bool".
    """

    name: str
    kind: str
    is_optional: bool
    is_written: bool

    @property
    def is_tensor(self) -> bool:
        """True for a tensor or a list of tensors."""
        return self.kind.startswith("Tensor")


def parse(function: str, signature: str) -> tuple[Parameter, ...]:
    """Returns the parameters of a signature such as "x: Tensor, out: Tensor!".

    Raises:
        NotImplementedError: the function returns a value.
    """
    if "->" in signature:
        raise NotImplementedError(
            f"{function}: the function must return nothing to be called from JAX, got {signature!r}"
        )
    found = []
    for text in filter(str.strip, signature.split(",")):
        name, _, kind = (part.strip() for part in text.partition(":"))
        plain = kind.replace("!", "")
        found.append(Parameter(name, plain.rstrip("?"), plain.endswith("?"), "!" in kind))
    return tuple(found)


@functools.cache
def parameters_of(op: str, function: str) -> tuple[Parameter, ...]:
    """Returns the parameters of a C function from the op's header."""
    spec = get_builder(op).functions().get(function)
    if spec is None:
        raise AttributeError(f"op {op} has no function {function}")
    return parse(function, spec.signature)
