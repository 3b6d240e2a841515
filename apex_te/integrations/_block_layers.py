"""Layers of a block that ``from_torch(fuse=True)`` joins, found by where its tensors go."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from . import _matching as matching
from ._forward_source import Flow, read_forward
from ._function_source import assigned_in, files_of
from ._mlp_formula import MLPFormula, mlp_formula
from ._norm_formula import known_norm

_SHORT = {"query": "q", "key": "k", "value": "v"}
_SUFFIX = "_proj"


class Projections(NamedTuple):
    """Linear layers with a common input, and the norm before them, that can become one layer."""

    linears: tuple[str, ...]
    path: str
    norm: str | None = None
    transposed: bool = False


class MLPLayers(NamedTuple):
    """A norm and the MLP that alone reads its output, to be one ``LayerNormMLP``."""

    norm: str
    path: str
    formula: MLPFormula
    transposed: bool = False


class Apart(NamedTuple):
    """A norm of the block that no layer is joined with, and the reason."""

    norm: str
    reason: str


Layers = Projections | MLPLayers


def layers_to_join(block: nn.Module) -> tuple[list[Layers], list[Apart]]:
    """Returns the groups of a block's layers that can each become one layer, and other norms.

    Linear layers with one parent and one input are a group if all or none of them run. A norm joins
    them if they are all that reads its output, if they read nothing else, and if no code outside of
    the block's forward calls it.
    """
    found = _Block(block)
    groups = found.groups()
    return groups, found.apart({group.norm for group in groups})


def _is_leaf(module: nn.Module) -> bool:
    """Returns True for the layers that may be joined, and others in their place."""
    return (
        isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm))
        or matching.is_conv1d(module)
        or known_norm(module) is not None
    )


class _Block:
    """A block with the calls in its forward."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.names = {id(module): name for name, module in block.named_modules()}
        self.modules = dict(block.named_modules())
        self.flow: Flow = read_forward(block, _is_leaf)
        self.inputs: dict[int, set[Any]] = {}
        self.places: dict[int, set[Any]] = {}
        for call in self.flow.calls:
            self.inputs.setdefault(id(call.module), set()).add(call.tensors)
            self.places.setdefault(id(call.module), set()).add(call.where)

    def groups(self) -> list[Layers]:
        """Returns what ``layers_to_join`` returns."""
        linears = [m for m in self.modules.values() if self.input_of(m) and _is_linear(m)]
        found: list[Layers] = []
        taken: set[int] = set()
        for name, norm in self.modules.items():
            if not _is_leaf(norm) or _is_linear(norm) or not self.input_of(norm, several=True):
                continue
            if _unfit(norm) is not None:
                continue
            readers = self.readers(norm)
            group = self.with_norm(name, [m for m in linears if id(m) in readers], readers)
            if group is not None:
                found.append(group)
                taken.update(readers)
        rest: dict[Any, list[str]] = {}
        for linear in linears:
            if id(linear) not in taken:
                name = self.names[id(linear)]
                where = frozenset(self.places[id(linear)])
                key = name.rpartition(".")[0], self.input_of(linear), where, _is_transposed(linear)
                rest.setdefault(key, []).append(name)
        for (parent, _, _, transposed), names in rest.items():
            if len(names) > 1:
                found.append(Projections(tuple(names), self.path(parent, names), None, transposed))
        return found

    def apart(self, joined: set[str | None]) -> list[Apart]:
        """Returns the block's own norms that are called, but not ``joined``."""
        found = []
        for name, norm in self.modules.items():
            own = "." not in name and _is_leaf(norm) and not _is_linear(norm)
            if own and name not in joined and id(norm) in self.inputs:
                reader = self.flow.readers.get(id(norm), "more than one group of layers")
                found.append(Apart(name, _unfit(norm) or f"{reader} reads its output, too"))
        return found

    def input_of(self, module: nn.Module, several: bool = False) -> Any:
        """Returns the one input of a layer that is only called, and with nothing else; or None."""
        found = self.inputs.get(id(module), {None})
        if self.is_set(self.names.get(id(module), "")):
            return None
        if id(module) in self.flow.inspected or None in found or (len(found) > 1 and not several):
            return None
        changed = any(tensors & self.flow.changed for tensors in found)
        return None if changed or frozenset() in found else next(iter(found))

    def readers(self, norm: nn.Module) -> set[int]:
        """Returns the ``id`` of each layer that reads a norm's output, if nothing else does."""
        output = id(norm)
        if output in self.flow.readers or output in self.flow.changed:
            return set()
        calls = [call for call in self.flow.calls if call.tensors and output in call.tensors]
        if any(call.tensors != {output} for call in calls):
            return set()
        found = {id(call.module) for call in calls if _is_leaf(call.module)}
        return found if all(self.inputs[one] == {frozenset({output})} for one in found) else set()

    def with_norm(self, name: str, linears: list[nn.Module], readers: set[int]) -> Layers | None:
        """Returns the group of a norm and the linear layers that read it; None if there is none."""
        kinds = {_is_transposed(linear) for linear in linears}
        if not linears or len(linears) != len(readers) or len(kinds) > 1:
            return None
        names = [self.names[id(linear)] for linear in linears]
        if any(self.calls_elsewhere(called) for called in (name, *names)):
            return None
        parents = {one.rpartition(".")[0] for one in names}
        norm = frozenset({id(self.modules[name])})
        for path, module in self.modules.items():
            inside = [one.removeprefix(f"{path}.") for one in names if one.startswith(f"{path}.")]
            if len(inside) == len(names) and self.inputs.get(id(module)) == {norm}:
                formula = mlp_formula(module)
                if formula is not None and set(formula.first) == set(inside):
                    second = f"{path}.{formula.second}"
                    if self.input_of(self.modules[second]) and not self.calls_elsewhere(second):
                        return MLPLayers(name, path, formula, *kinds)
        places = {frozenset(self.places[id(linear)]) for linear in linears}
        if len(parents) > 1 or len(places) > 1:  # one may run without the others
            return None
        path = names[0] if len(names) == 1 else self.path(parents.pop(), names)
        return Projections(tuple(names), path, name, *kinds)

    def is_set(self, name: str) -> bool:
        """Returns True if code other than ``__init__`` may replace a layer or one around it."""
        while name:
            owner, _, last = name.rpartition(".")
            if any(last in assigned_in(file) for file in files_of(type(self.modules[owner]))):
                return True
            name = owner
        return False

    def calls_elsewhere(self, name: str) -> bool:
        """Returns True if code outside of the block's forward may call a layer or one around it."""
        while name:
            owner, _, last = name.rpartition(".")
            if self.flow.calls_elsewhere(self.modules[owner], last):
                return True
            name = owner
        return False

    def path(self, parent: str, names: list[str]) -> str:
        """Returns a name for the joined layer: qkv_proj for q_proj, k_proj and v_proj."""
        own = [name.rpartition(".")[2] for name in names]
        suffix = _SUFFIX if all(name.endswith(_SUFFIX) for name in own) else ""
        stems = [name.removesuffix(suffix) for name in own]
        stems = [_SHORT.get(stem, stem) for stem in stems]
        joined = ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems) + suffix
        while hasattr(self.modules[parent], joined):
            joined += "_joined"
        return f"{parent}.{joined}" if parent else joined


def _unfit(norm: Any) -> str | None:
    """Returns the reason why a joined layer cannot have such a norm, or None."""
    formula = known_norm(norm)
    if formula is None:
        return f"{type(norm).__name__} is not known"
    if norm.weight is None or not (formula.is_rms or getattr(norm, "bias", None) is not None):
        return "it lacks a weight or a bias"
    return None if norm.weight.dim() == 1 else "its weight has several dimensions"


def _is_linear(module: nn.Module) -> bool:
    """Returns True for a linear layer, also of a class that cannot be joined."""
    return isinstance(module, nn.Linear) or matching.is_conv1d(module)


def _is_transposed(module: nn.Module) -> bool:
    """Returns True for a layer whose weight is ``[in, out]``."""
    return matching.is_conv1d(module)
