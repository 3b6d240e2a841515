"""``from_torch``, which turns a model's layers into those of apex_te, in place."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..fp8.model_init import fp8_model_init, settings
from ..module._core.arguments import class_name
from ..module._core.norm_module import NormModule
from ..module.layer_norm import LayerNorm
from ..module.linear import Linear
from ..module.rms_norm import RMSNorm
from ..runtime.named_arguments import check_model, named_arguments
from . import _matching as matching
from . import summary
from ._derived import Derived, derived
from ._fp8_weights import count_fp8_weights, hold_in_fp8
from ._norm_formula import known_norm
from ._selection import Selection
from .attention import register_attention
from .conv1d import Conv1DLinear, conv1d_linear
from .experts import StackedExperts, is_experts, stacked_experts
from .fusion import JoinedNorm, blocks_of, fuse_blocks, key_map, refuse_optimized
from .saving import save_without_fp8_state
from .summary import ConversionSummary, Layer, numbered


class _OwnForward(NormModule):
    """Norm whose former forward computes inputs of another dtype than its parameters'."""

    def _plain_forward(self) -> Callable[[torch.Tensor], torch.Tensor]:
        forward: Callable[[torch.Tensor], torch.Tensor] = super(Derived, self).forward  # type: ignore
        return forward


class FamilyRMSNorm(_OwnForward, RMSNorm):
    """Norm of another class that computes what ``RMSNorm`` does."""


class FamilyLayerNorm(_OwnForward, LayerNorm):
    """Norm of another class that computes what ``LayerNorm`` does."""


class T5RMSNorm(RMSNorm):
    """Class of T5's norms in models that were pickled by an earlier release."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        from transformers.models.t5.modeling_t5 import T5LayerNorm

        vars(self)["variance_epsilon"] = self.eps
        self.__class__ = derived(FamilyRMSNorm, T5LayerNorm, "RMSNorm")


_LOG = logging.getLogger(__name__)
_NORM_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_REPLACED = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
_REPLACING = (Linear, LayerNorm, RMSNorm, Conv1DLinear, StackedExperts, JoinedNorm)
# Attributes that every nn.Module has; a converted module keeps the values it had.
_KEPT = frozenset(vars(nn.Module()))
_NOTHING = (
    "nothing was converted: the model does not contain torch.nn.Linear, LayerNorm or RMSNorm, nor"
    " norms that compute alike, nor Hugging Face's Conv1D or experts"
)
_NOT_JOINED = (
    "fuse=True joined no layers, since it reads blocks of Hugging Face's models only; layers were"
    " converted one to one. Call from_torch without fuse, or build the blocks of"
    " apex_te.LayerNormLinear and apex_te.LayerNormMLP"
)


@named_arguments()
def from_torch(
    model: nn.Module,
    fuse: bool = False,
    *,
    include: Any = None,
    exclude: Any = None,
    keep_first_blocks: int = 0,
    keep_last_blocks: int = 0,
    min_size: int = 0,
    size_multiple: int = 1,
    optimizer: Any = None,
) -> nn.Module:
    """Makes the layers of ``model`` compute in FP8 inside ``fp8_autocast``, in place.

    These layers change their class: ``nn.Linear``, ``nn.LayerNorm``, ``nn.RMSNorm``, norms of any
    class that compute what these do, and, in models of Hugging Face, GPT-2's Conv1D and experts
    with stacked weights. To tell what a norm computes, its forward is called once, on a copy with
    random parameters. The module objects, Parameters, keys, hooks, modes, dtypes and devices
    (``meta`` included) stay, and outputs outside FP8 are the same. A Parameter that two layers
    share stays shared. Optimizers made before or after see the same Parameters.

    Routers, and the linear layers in them, are not converted. Routers are layers called router,
    layers called gate beside experts, layers of a router's class, and linear layers with one output
    for each of the experts beside them.

    Linear layers that compute the model's output are not converted, either. These are the ones that
    ``get_output_embeddings`` returns, that share an embedding's weight, that have one output for
    each token of the vocabulary, or that have the name of a head (``lm_head``, ``classifier``,
    ``score``, ...) outside blocks. The same holds for PEFT's adapters. ``include`` converts any of
    these if it names them.

    Some layers cannot be converted; one warning names them, with reasons. These are instances of
    subclasses, such as quantized layers (they may have another forward), layers whose forward was
    replaced on the instance (as accelerate's hooks do), parametrized layers, norms whose dtype is
    not fp32, fp16 or bf16, and other classes of norms and experts of Hugging Face.
    ``apex_te.conversion_summary(model)`` lists the layers that were converted and those that were
    kept, with reasons. The list is logged, too.

    Inside ``fp8_model_init`` the weights of converted layers become Parameters that hold them in
    FP8 only. Exceptions, named in the warning, are weights of Conv1D and experts, which are
    transposed or stacked, and weights shared with layers that are not converted. Make optimizers
    afterwards.

    ``save_pretrained`` of a converted model of Hugging Face writes FP8 state to a separate file for
    ``load_fp8_state``; ``save_pretrained(..., fp8_state=False)`` writes none.

    Args:
        model: any model or layer.
        fuse: also join layers in blocks of Hugging Face's models, by the source of the blocks'
            forwards: linear layers with the same input, such as query, key and value projections,
            become one ``Linear``, with the norm before them one ``LayerNormLinear``, and a norm
            before an MLP and the MLP become one ``LayerNormMLP``. A norm is joined only if the
            source shows that nothing else reads its output; the summary names the others. Joining
            makes new Parameters under new names, except for norms, which keep theirs. State dicts
            still have the original keys, and loading accepts both.
            ``apex_te.integrations.key_map(model)`` translates other dicts whose keys are parameter
            names. Layers that cannot be joined (hooks, shared or differing parameters) are
            converted one to one and named in the warning. Adapters (PEFT) need ``fuse=False``,
            because joined layers leave no projection to attach them to.
        include: layers to convert: a name or pattern (``*``, ``?``, ``[]``) that successive parts
            of a layer's dotted name match, a predicate ``(name, module) -> bool``, or several of
            them; None converts all but routers, output heads and adapters. ``include="*"`` converts
            these, too.
        exclude: layers not to convert, given as in ``include``; takes precedence over it.
        keep_first_blocks, keep_last_blocks: number of blocks at the start and end of each list of
            blocks (a ``ModuleList`` or ``Sequential`` of modules of one class) whose linear layers
            are not converted.
        min_size: do not convert linear layers with fewer input or output features than this.
        size_multiple: do not convert linear layers with features that are not multiples of this.
        optimizer: an optimizer, or several, to check for parameters of the model, with
            ``fuse=True`` and in ``fp8_model_init``. All existing optimizers of ``torch.optim`` are
            checked anyway.

    Returns:
        ``model``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a pattern matches nothing, or a number is out of range; with ``fuse=True`` or in
            ``fp8_model_init``, an optimizer holds a parameter of ``model`` that may be replaced.
    """
    check_model("from_torch", model)
    if not isinstance(fuse, bool):
        raise TypeError(f"from_torch: fuse must be a bool, got {type(fuse).__name__}")
    selection = Selection(
        model, include, exclude, keep_first_blocks, keep_last_blocks, min_size, size_multiple
    )
    before = summary.conversion_summary(model).converted
    first = not key_map(model).entries
    held = settings()
    for wanted, what in (
        (fuse, "fuse must be False"),
        (held is not None, "fp8_model_init must be left"),
    ):
        if wanted:
            refuse_optimized(model, optimizer, what)
    with fp8_model_init(enabled=False):
        layers, left = _converted(model, fuse, selection)
    if held is not None:
        left += hold_in_fp8(model, [layer.name for layer in layers if layer.after], held)
        count_fp8_weights(model)
    vars(model)[summary.ATTRIBUTE] = ConversionSummary([*before, *layers])
    _LOG.info("from_torch: %r", summary.conversion_summary(model))
    save_without_fp8_state(model)
    register_attention()
    told = []
    if left:
        named = ", ".join(f"{label} ({reason})" for label, reason in _together(left))
        told.append(f"left as they are: {named}")
    if fuse and left and (joined := [x.name for x in layers if x.after and ", " in x.before]):
        told.append(f"joined: {', '.join(summary.grouped(joined))}")
    elif fuse and first and not blocks_of(model):
        told.append(_NOT_JOINED)
    elif not any(x.after for x in (*before, *layers)) and not _has_our_layers(model):
        told.append(_NOTHING)
    if told:
        warnings.warn(f"from_torch: {'; '.join(told)}", stacklevel=3)
    return model


def _has_our_layers(model: nn.Module) -> bool:
    """Returns True if the model has a layer that was or could be converted, or one of apex_te."""
    return any(
        is_replaceable(module) or type(module).__module__.startswith("apex_te.")
        for module in model.modules()
    )


def _converted(
    model: nn.Module, fuse: bool, selection: Selection
) -> tuple[list[Layer], list[tuple[str, str]]]:
    """Joins and converts layers of ``model``; returns entries of the summary and of the warning."""
    layers: list[Layer] = []
    left: list[tuple[str, str]] = []
    if fuse:
        layers, left = fuse_blocks(
            model, lambda name, m: selection.reason(name, m, feature_sizes(m))
        )
    for name, module in list(model.named_modules()):
        before = type(module).__name__
        named = class_name(type(module))
        if is_replaceable(module):
            cannot = reason_to_keep(module)
            if cannot:
                left.append((name or before, cannot))
            reason = cannot or selection.reason(name, module, feature_sizes(module))
            if reason is None:
                convert_layer(module)
            after = class_name(type(module)) if reason is None else None
            layers.append(Layer(name, named, after, reason))
        elif _has_weights(module):
            layers.append(Layer(name, named, None, "no layer that from_torch converts"))
            if matching.resembles_norm(module) and selection.reason(name, module) is None:
                left.append((name, f"from_torch does not know {before}"))
    return layers, left


def _together(left: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Joins entries of the warning whose names differ by numbers only, shown as ``*``."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in left:
        groups.setdefault((numbered(name), reason), []).append(name)
    return [
        (f"{len(names)} of {key}" if len(names) > 1 else names[0], reason)
        for (key, reason), names in groups.items()
    ]


def is_replaceable(module: nn.Module) -> bool:
    """Returns True if ``from_torch`` may convert ``module`` and has not converted it yet."""
    if isinstance(module, _REPLACING):
        return False
    return isinstance(module, _REPLACED) or _is_alike(module)


def _has_weights(module: nn.Module) -> bool:
    """Returns True if ``module`` itself has parameters and its class is none of apex_te's."""
    own = any(p is not None for p in module._parameters.values())
    return own and not type(module).__module__.startswith("apex_te.")


def feature_sizes(module: Any) -> tuple[int, ...]:
    """Returns input and output features of a linear layer or experts; () for a norm."""
    if matching.is_conv1d(module):
        return tuple(module.weight.shape)
    if is_experts(module):
        return tuple(module.down_proj.shape[1:])
    if isinstance(module, nn.Linear):  # some models compute a size with tensors
        return int(module.in_features), int(module.out_features)
    return ()


def reason_to_keep(module: Any) -> str | None:
    """Returns the reason why ``module`` cannot become an apex_te layer; None if it can."""
    if 0 in feature_sizes(module):
        return "it has no features"
    reason = matching.unsupported(module)
    known = matching.is_plain(module, *_REPLACED) or _is_alike(module)
    if reason is None and not known:
        reason = f"{type(module).__name__} is a subclass"
    if reason is None and not feature_sizes(module) and module.weight is not None:
        dtype = module.weight.dtype
        if dtype not in _NORM_DTYPES:
            reason = f"norms of {dtype} are not available"
    return reason


def _is_alike(module: nn.Module) -> bool:
    """Returns True for a Conv1D, stacked experts, and a norm that computes what apex_te's do."""
    return matching.is_conv1d(module) or is_experts(module) or known_norm(module) is not None


def convert_layer(module: Any) -> None:
    """Changes the class of a linear layer or norm to the one of apex_te."""
    if is_experts(module):
        module.__class__ = stacked_experts(type(module))
        module.make_gemms()
    elif matching.is_conv1d(module):
        _become(module, conv1d_linear(type(module)), _linear(module, *module.weight.shape))
    elif isinstance(module, nn.Linear):
        _become(module, Linear, _linear(module, *feature_sizes(module)))
    else:
        _convert_norm(module)


def _linear(module: Any, in_features: int, out_features: int) -> Linear:
    """Returns a ``Linear`` without parameters, a template for the attributes of ``module``."""
    return Linear(
        in_features,
        out_features,
        module.bias is not None,
        skip_weight_param_allocation=True,
        params_dtype=module.weight.dtype,
    )


def _convert_norm(module: Any) -> None:
    """Changes the class of a norm to ``RMSNorm`` or ``LayerNorm``, or to a subclass of its own."""
    formula, own = known_norm(module), type(module)
    assert formula is not None
    is_torch = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    shape = module.normalized_shape if is_torch else tuple(module.weight.shape)
    kind: Any = RMSNorm if formula.is_rms else LayerNorm
    template = kind(shape, formula.eps, zero_centered_gamma=formula.zero_centered, device="meta")
    template.elementwise_affine = module.weight is not None
    if not is_torch:
        for name in kind._PARAMETERS:
            module._parameters.setdefault(name, None)
        family = FamilyRMSNorm if formula.is_rms else FamilyLayerNorm
        kind = derived(family, own, kind.__name__)
    _become(module, kind, template)


def _become(module: nn.Module, kind: type[nn.Module], template: nn.Module) -> None:
    """Changes the class of ``module``, in place, so that references to it stay valid."""
    attributes = vars(module)
    attributes.update({k: v for k, v in vars(template).items() if k not in _KEPT})
    module.__class__ = kind
