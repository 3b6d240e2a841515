"""Selection of the layers that ``from_torch`` converts: the caller's options and the defaults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..runtime import layer_names
from ..runtime.named_arguments import check_ints, did_you_mean

Choice = Any  # a name, a pattern, a predicate, or several

_EXPERTS = re.compile(r"(.*_)?experts?(_.*)?")
# Names in PEFT's models of what makes prompts (p-tuning, prefix tuning) and chooses adapters.
_PROMPTS = frozenset(("prompt_encoder", "internal_xlora_classifier"))
# Further names of an output layer, for the last child of the whole model only.
_LAST = ("output", "fc")


class Selection:
    """Choice of the layers that ``from_torch`` converts, by its options and by default."""

    def __init__(
        self,
        model: nn.Module,
        include: Choice,
        exclude: Choice,
        keep_first_blocks: int,
        keep_last_blocks: int,
        min_size: int,
        size_multiple: int,
    ) -> None:
        counts = {"keep_first_blocks": keep_first_blocks, "keep_last_blocks": keep_last_blocks}
        check_ints("from_torch", 0, **counts, min_size=min_size)
        check_ints("from_torch", size_multiple=size_multiple)
        names = [name for name, _ in model.named_modules()]
        self._include = None if include is None else _predicates("include", include, names)
        self._exclude = [] if exclude is None else _predicates("exclude", exclude, names)
        self._min_size, self._multiple = min_size, size_multiple
        self._outer = _outer_blocks(model, keep_first_blocks, keep_last_blocks)
        self._defaults = {**_heads(model), **_adapters(model), **_routers(model)}

    def reason(self, name: str, module: nn.Module, sizes: tuple[int, ...] = ()) -> str | None:
        """Returns the reason why ``module`` is not converted, or None."""
        if any(matches(name, module) for matches in self._exclude):
            return "excluded"
        included = self._include is not None
        if self._include is not None and not any(f(name, module) for f in self._include):
            return "not included"
        if not sizes:
            return None
        for block, reason in self._outer.items():
            if name == block or name.startswith(f"{block}."):
                return reason
        if min(sizes) < self._min_size:
            return f"a size of {min(sizes)} is less than min_size, {self._min_size}"
        odd = [size for size in sizes if size % self._multiple]
        if odd:
            return f"a size of {odd[0]} is not a multiple of size_multiple, {self._multiple}"
        return None if included else self._defaults.get(id(module))


def _predicates(
    argument: str, choice: Choice, names: list[str]
) -> list[Callable[[str, nn.Module], Any]]:
    """Turns ``include`` or ``exclude`` of ``from_torch`` into predicates."""
    several = isinstance(choice, Iterable) and not isinstance(choice, str)
    found = []
    for one in choice if several else (choice,):
        if isinstance(one, str):
            found.append(_pattern(argument, one, names))
        elif callable(one):
            found.append(one)
        else:
            raise TypeError(
                f"from_torch: {argument} must be names, patterns or predicates, "
                f"got {type(one).__name__}"
            )
    return found


def _pattern(argument: str, pattern: str, names: list[str]) -> Callable[[str, nn.Module], bool]:
    """Returns a predicate for modules with successive parts of their name that match a pattern."""
    matches = layer_names.pattern(pattern)
    if not any(matches(name) for name in names):
        parts = {part for name in names for part in name.split(".") if not part.isdecimal()}
        hint = did_you_mean(pattern, sorted({*parts, *names} - {""}))
        raise ValueError(f"from_torch: {argument} must match a layer, got {pattern!r}{hint}")
    return lambda name, module: matches(name)


def _outer_blocks(model: nn.Module, first: int, last: int) -> dict[str, str]:
    """Returns the reason to keep the first and last of each list of blocks, by dotted name."""
    if not first and not last:
        return {}
    lists: list[str] = []
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not len(module):
            continue
        if any(name.startswith(f"{outer}.") or not outer for outer in lists):
            continue  # inside a block
        kinds = {type(child) for child in module}
        if len(kinds) > 1 or not any(module[0].children()):
            continue
        lists.append(name)
        for index in range(len(module)):
            label = f"{name}.{index}" if name else str(index)
            if index < first:
                found[label] = f"in one of the first {first} blocks"
            elif index >= len(module) - last:
                found[label] = f"in one of the last {last} blocks"
    if not lists:
        argument, value = ("keep_first_blocks", first) if first else ("keep_last_blocks", last)
        raise ValueError(
            f"from_torch: {argument} must be 0 for a model without a list of blocks, got {value}"
        )
    return found


def _heads(model: nn.Module) -> dict[int, str]:
    """Returns the reason why a layer makes the model's output, by ``id`` of the layer."""
    found: dict[int, str] = {}
    tied = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    last = list(model.named_children())[-1:]
    for name, module in model.named_modules():
        output = _output_embeddings(module)
        if output is not None:
            found.setdefault(id(output), "the model's output embeddings")
        weight = module._parameters.get("weight")
        if weight is None or isinstance(module, nn.Embedding):
            continue
        parts = name.split(".")
        outside = parts[: next((i for i, part in enumerate(parts) if part.isdigit()), None)]
        head = next((part for part in outside if part in layer_names.HEADS), None)
        if id(weight) in tied:
            found.setdefault(
                id(module), f"an output head: its weight is that of {tied[id(weight)]}"
            )
        elif head is not None:
            found.setdefault(id(module), f"an output head by its name, {head}")
        elif last and last[0][1] is module and name in _LAST:
            found.setdefault(id(module), f"an output head by its name, {name}")
        elif outside == parts and size is not None and getattr(module, "out_features", 0) == size:
            found.setdefault(id(module), "an output head: it has an output for each token")
    return found


def _routers(model: nn.Module) -> dict[int, str]:
    """Returns reasons to keep the layers inside of routers or that weight experts, by ``id``."""
    found: dict[int, str] = {}
    for owner in model.modules():
        children = dict(owner.named_children())
        experts = [child for name, child in children.items() if _holds_experts(name, child)]
        counts = {_number_of_experts(child) for child in experts} - {None}
        for name, child in children.items():
            inner = [(at.rpartition(".")[2], part) for at, part in child.named_modules() if at]
            if _holds_experts(name, child) or any(_holds_experts(*one) for one in inner):
                continue
            kind = type(child).__name__
            reason = None
            if experts and layer_names.GATES.fullmatch(name):
                reason = f"a router by its name beside experts, {name}"
            elif layer_names.ROUTERS.fullmatch(name):
                reason = f"a router by its name, {name}"
            elif layer_names.ROUTER_CLASSES.search(kind):
                reason = f"a router by its class, {kind}"
            elif experts and getattr(child, "out_features", None) in counts:
                reason = f"a router: {name} has an output for each expert"
            if reason is not None:
                for part in child.modules():
                    found.setdefault(id(part), reason)
    return found


def _holds_experts(name: str, module: nn.Module) -> bool:
    """Returns True for a module of several experts, by its name and what it holds."""
    named = _EXPERTS.fullmatch(name) is not None and not name.startswith("shared")
    return named and not layer_names.GATES.fullmatch(name) and not isinstance(module, nn.Linear)


def _number_of_experts(module: Any) -> int | None:
    """Returns the number of experts in such a module, None if it does not say."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return len(module)
    count = getattr(module, "num_experts", None)
    if isinstance(count, int):
        return count
    stacked = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3]
    return stacked[0] if stacked else None


def _output_embeddings(module: Any) -> Any:
    """Returns the result of ``get_output_embeddings()``, None if ``module`` does not have it."""
    get = getattr(type(module), "get_output_embeddings", None)
    if get is None:
        return None
    try:
        return get(module)
    except (AttributeError, NotImplementedError):  # of models without one
        return None


def _adapters(model: nn.Module) -> dict[int, str]:
    """Returns reasons to keep the layers that PEFT has added, by ``id`` of the layer."""
    found = {}
    for module in model.modules():
        kinds = type(module).__mro__
        if any(k.__name__ == "BaseTunerLayer" and k.__module__.startswith("peft.") for k in kinds):
            for name, child in module.named_modules():
                if name and name.partition(".")[0] != "base_layer":
                    found[id(child)] = "an adapter of PEFT"
        if any(k.__module__.startswith("peft.") for k in kinds):
            for name in _PROMPTS & dict(module.named_children()).keys():
                for child in module.get_submodule(name).modules():
                    found[id(child)] = "an adapter of PEFT"
    return found
