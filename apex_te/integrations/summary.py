"""Summary of the layers that ``from_torch`` converted and kept, with reasons."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from ..module._core.fp8_module import FP8Module
from ..runtime.named_arguments import check_model, named_arguments
from .experts import StackedExperts

ATTRIBUTE = "_apex_te_conversion"


class Layer(NamedTuple):
    """Layer that ``from_torch`` converted or kept.

    Attributes:
        name: dotted name of the layer in the model.
        before: name of its class or, for a joined layer, the names of its original layers.
        after: name of the class that replaced it; None if it was kept.
        reason: why it was kept; for a converted layer with a checkpoint's weights, how these are
            held, else None.
    """

    name: str
    before: str
    after: str | None
    reason: str | None = None


def numbered(name: str) -> str:
    """Returns a dotted name in which ``*`` replaces each part that is a number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


class Share(NamedTuple):
    """Numbers of elements in a model: weights of FP8 layers, all weights of GEMMs, all parameters.

    Shared elements count once. ``padded`` has the names of layers in FP8 with a size that is not a
    multiple of 16, ``rest`` the reasons why parameters are not in FP8 with the number of their
    elements, largest first.
    """

    fp8: int
    matmul: int
    total: int
    padded: tuple[str, ...] = ()
    rest: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        parts = f"{self.fp8 / self.total:.1%} of parameters"
        if self.matmul:
            parts += f", {self.fp8 / self.matmul:.1%} of matmul weights"
        return f"in FP8 inside fp8_autocast: {parts}"


class ConversionSummary:
    """Layers that ``from_torch`` converted and kept: joined ones first, then in the model's order.

    Args:
        layers: one entry for each layer that was converted or kept.
        share: as the attribute.

    Attributes:
        converted: the entries of layers that became apex_te modules.
        kept: the entries of layers that stayed as they were, with the reason.
        share: numbers of elements: weights of FP8 layers, all weights of GEMMs, all parameters;
            None if they were not counted.
    """

    share: Share | None = None  # of summaries that an earlier release pickled

    def __init__(self, layers: Iterable[Layer] = (), share: Share | None = None) -> None:
        layers = tuple(layers)
        self.converted = tuple(layer for layer in layers if layer.after is not None)
        self.kept = tuple(layer for layer in layers if layer.after is None)
        self.share = share

    def __repr__(self) -> str:
        """Returns a list of the layers, in which names that differ only by numbers share a line."""
        lines = [f"ConversionSummary: {len(self.converted)} converted, {len(self.kept)} kept"]
        if self.share is not None and self.share.total:
            lines.append(str(self.share))
            if self.share.rest:
                lines.append("not in FP8, of all parameters:")
            lines += [f"  {n / self.share.total:.1%}: {reason}" for reason, n in self.share.rest]
        for title, layers in (("converted", self.converted), ("kept", self.kept)):
            groups: dict[tuple, list[str]] = {}
            for layer in layers:
                key = (
                    numbered(layer.name),
                    layer.before,
                    layer.after,
                    layer.reason,
                )
                groups.setdefault(key, []).append(layer.name)
            if groups:
                lines.append(f"{title}:")
            for (_, before, after, reason), names in groups.items():
                text = f"{before} -> {after}" if after is not None else before
                text += f": {reason}" if reason else ""
                lines.append(f"  {grouped(names)[0]}: {text}")
        if self.share is not None and self.share.padded:
            lines.append("padded in FP8, which costs time (a size is not a multiple of 16):")
            lines += [f"  {name}" for name in grouped(self.share.padded)]
        return "\n".join(lines)


def grouped(names: Iterable[str]) -> list[str]:
    """Returns names with ``*`` for their numbers, each once, and with a count if it is not 1."""
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(numbered(name), []).append(name)
    return [
        f"{key} ({len(found)})" if len(found) > 1 else found[0] or "(the model)"
        for key, found in counts.items()
    ]


@named_arguments()
def conversion_summary(model: nn.Module) -> ConversionSummary:
    """Returns the layers that ``from_torch`` has converted and kept in a model.

    Args:
        model: the model that was given to ``from_torch``, or a wrapper of it, such as PEFT's or
            DDP's. If it contains no converted model, the summary is empty.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_model("conversion_summary", model)
    converted, kept = {}, {}  # in order; a part may have been converted apart from the whole
    found = False
    for prefix, module in model.named_modules():
        own = vars(module).get(ATTRIBUTE)
        if own is None:
            continue
        found = True
        converted.update(dict.fromkeys(_inside(prefix, own.converted)))
        kept.update(dict.fromkeys(_inside(prefix, own.kept)))
    if not found:
        return ConversionSummary()
    names = {layer.name for layer in converted}
    left = [layer for layer in kept if layer.name not in names]
    return ConversionSummary([*converted, *left], _share(model, left))


def _inside(prefix: str, layers: Iterable[Layer]) -> list[Layer]:
    """Returns entries of a module of that dotted name with the names in the model around it."""
    return [layer._replace(name=".".join(filter(None, (prefix, layer.name)))) for layer in layers]


def _share(model: nn.Module, kept: Iterable[Layer]) -> Share:
    """Counts the elements of ``model``'s parameters, each parameter once."""
    sizes = {id(p): p.numel() for p in model.parameters()}
    fp8: set[int] = set()
    matmul: set[int] = set()
    padded = []
    for name, module in model.named_modules():
        ours = isinstance(module, (FP8Module, StackedExperts))
        least = 3 if isinstance(module, StackedExperts) else 2  # their biases are stacked, too
        own = [p for p in module._parameters.values() if p is not None and p.dim() >= least]
        if not ours and not _multiplies(module, own):
            continue
        matmul.update(map(id, own))
        if ours:
            fp8.update(map(id, own))
            if any(size % 16 for p in own for size in p.shape[-2:]):
                padded.append(name)
    total = sum(sizes.values())
    return Share(
        sum(sizes[i] for i in fp8 if i in sizes),
        sum(sizes[i] for i in matmul if i in sizes),
        total,
        tuple(padded),
        _rest(model, kept, fp8),
    )


def _rest(model: nn.Module, kept: Iterable[Layer], fp8: set[int]) -> tuple[tuple[str, int], ...]:
    """Counts the elements of parameters that are not in ``fp8``, by the reason."""
    modules, reasons = dict(model.named_modules()), {}
    for layer in kept:
        own = modules[layer.name]._parameters if layer.name in modules else {}
        reasons.update({id(p): f"{layer.before}: {layer.reason}" for p in own.values()})
    found: dict[str, int] = {}
    for p in model.parameters():
        if id(p) not in fp8:
            reason = reasons.get(id(p), "norms and biases")
            found[reason] = found.get(reason, 0) + p.numel()
    return tuple(sorted(found.items(), key=lambda item: -item[1]))


def _multiplies(module: nn.Module, own: list[torch.Tensor]) -> bool:
    """Returns True for a linear layer, or a module with stacked weights as experts have them."""
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    experts = any(p.dim() == 3 for p in own) and not isinstance(module, nn.modules.conv._ConvNd)
    return linear or experts
