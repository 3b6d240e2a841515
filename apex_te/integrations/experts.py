"""``StackedExperts``, the experts of Hugging Face's models computed in FP8 inside a region."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..fp8.autocast import graph_task_id, local
from ..module._core.arguments import shown_name
from ..module._core.fp8_entries import joined_scales, save_parameters
from ..module.grouped.experts import run_experts
from ..module.grouped.linear import GroupedLinear
from ._mlp_formula import gate_formula

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def _gate_of(experts: Any) -> Any:
    """Returns the activation of experts as ``run_experts`` takes it, else their own function."""
    own = experts.__dict__
    if "_apply_gate" in own:
        return own["_apply_gate"]
    if "_apex_te_gate" not in own:
        own["_apex_te_gate"] = gate_formula(experts)
    return own["_apex_te_gate"] or experts._apply_gate


def is_experts(module: Any) -> bool:
    """Returns True for experts of Hugging Face that have their weights in two stacked Parameters.

    These are ``gate_up_proj`` ``[experts, 2 ffn, hidden]`` and ``down_proj``
    ``[experts, hidden, ffn]``, or transposed, for transformers' own grouped GEMMs, and
    ``gate_up_proj_bias`` and ``down_proj_bias``, or no biases. The flags that transformers' choice
    of an implementation goes by say which.
    """
    if not hasattr(type(module), "_apply_gate") or isinstance(module, StackedExperts):
        return False
    if "forward" in vars(module) or not all(hasattr(module, flag) for flag in _FLAGS):
        return False
    own, weights = module._parameters, {"gate_up_proj", "down_proj"}
    biases = {f"{name}_bias" for name in weights} if module.has_bias else set()
    return (
        own.keys() == weights | biases
        and all(p is not None and p.dim() == 2 + (name in weights) for name, p in own.items())
        and module.has_gate
        and (module.is_concatenated or not callable(_gate_of(module)))
        and not getattr(module, "has_post_expert_norm", False)  # older transformers have none
    )


class ExpertGemm(GroupedLinear):
    """``GroupedLinear`` over stacked Parameters of the experts, who set them for each call."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool = False,
    ) -> None:
        super().__init__(
            num_gemms, in_features, out_features, bias=bias, params_dtype=dtype, device="meta",
            single_parameter=True,
        )  # fmt: skip
        for key in list(self._parameters):
            self.register_parameter(key, None)
        self._stacks: tuple[torch.Tensor, ...] = ()
        self._bias: torch.Tensor | None = None

    def reset_parameters(self) -> None:
        """Does nothing: the layer has no parameters of its own."""

    def _stacked_weights(self) -> tuple[torch.Tensor, ...]:
        return self._stacks

    def _stacked_bias(self) -> torch.Tensor | None:
        return self._bias

    def _weights_and_biases(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        stacks = self._stacks
        weights = stacks if len(stacks) == 1 else (torch.cat(stacks, 1),)
        return weights, () if self._bias is None else (self._bias,)


@contextlib.contextmanager
def set_weights(
    gemms: tuple[ExpertGemm, ExpertGemm],
    *stacks: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Iterator[None]:
    """Context in which two layers have weights, and biases or None."""
    try:
        for gemm, own, bias in zip(gemms, stacks, biases, strict=True):
            gemm._stacks, gemm._bias = own, bias
        yield
    finally:
        for gemm in gemms:
            gemm._stacks, gemm._bias = (), None


def _gemms_of(experts: Any) -> tuple[ExpertGemm, ExpertGemm]:
    """Returns layers over the experts' weights."""
    (up, bias), _ = _parameters_of(experts)
    count, outer, inner = up.shape
    dtype, training = up.dtype, experts.training
    return (
        ExpertGemm(count, inner, outer, dtype, bias is not None).train(training),
        ExpertGemm(count, outer // 2, inner, dtype, bias is not None).train(training),
    )


def _parameters_of(experts: Any) -> Any:
    """Returns weight ``[experts, out, in]`` and bias, or None, of both layers."""

    def pair(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = getattr(experts, name)
        if experts.is_transposed:
            weight = weight.transpose(1, 2)
        return weight, getattr(experts, f"{name}_bias") if experts.has_bias else None

    return pair("gate_up_proj"), pair("down_proj")


def _run(
    experts: Any,
    gemms: tuple[ExpertGemm, ExpertGemm],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Computes experts by layers over their weights; a gate that is not known stays theirs."""
    gate = _gate_of(experts)
    (w1, b1), (w2, b2) = _parameters_of(experts)
    with set_weights(gemms, (w1,), (w2,), biases=(b1, b2)):
        return run_experts(
            *gemms, hidden_states, top_k_index, top_k_weights, gate,
            interleaved=not experts.is_concatenated,
        )[0]  # fmt: skip


def register_experts(name: str = "apex_te") -> None:
    """Registers apex_te's experts as an experts implementation of transformers, called ``name``.

    An unconverted model uses them after ``model.set_experts_implementation(name)``, or with
    ``experts_implementation=name`` in ``from_pretrained``: grouped GEMMs in FP8 inside
    ``fp8_autocast``, and in bf16 elsewhere. Unlike for experts that ``from_torch`` converts, state
    dicts do not contain their FP8 state of delayed scaling.

    Raises:
        ImportError: transformers, 5 or later, is not installed.
        NotImplementedError: in a forward, for experts without a gate, with a norm, with weights
            distributed over ranks, or with interleaved weights and a gate other than gpt-oss's.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, _registered_forward)


def _registered_forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Computes unconverted experts, whose layers are made in the first call."""
    interleaved = not getattr(experts, "is_concatenated", True)
    for is_refused, what in (
        (not getattr(experts, "has_gate", True), "no gate"),
        (getattr(experts, "has_post_expert_norm", False), "a norm"),
        (getattr(experts, "_is_expert_parallel", False), "weights spread over ranks"),
        (
            interleaved and callable(_gate_of(experts)),
            "interleaved weights and a gate of their own",
        ),
    ):
        if is_refused:
            raise NotImplementedError(
                f"{type(experts).__name__}: experts_implementation must be another than that of "
                f"apex_te for experts with {what}"
            )
    weight = experts.gate_up_proj
    made = experts.__dict__.get("_apex_te_gemms")
    if made is None or made[1:] != (weight.device, weight.dtype):
        # Not as children: the model's state dict keeps its keys.
        made = experts.__dict__["_apex_te_gemms"] = (
            _gemms_of(experts), weight.device, weight.dtype
        )  # fmt: skip
    for gemm in made[0]:
        gemm.training = experts.training
    return _run(experts, made[0], hidden_states, top_k_index, top_k_weights)


def hold_upright(experts: Any) -> None:
    """Records that weights which the class has transposed are ``[experts, out, in]`` by now."""
    experts.is_transposed = False
    experts._apex_te_upright = True


class StackedExperts(nn.Module):
    """Experts that have the weights of each linear layer in one Parameter, in FP8 inside a region.

    A layer that ``from_torch`` converts gets a subclass of this class and of the experts' own,
    whose forward computes outside of ``fp8_autocast``. Inside, tokens are sorted by expert. The
    weights are ``[experts, 2 ffn, hidden]`` and ``[experts, hidden, ffn]``, or the model's own
    transposed ones, whose gates and ups may alternate; they stay as they are.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    act_fn: nn.Module
    gate_up_gemm: ExpertGemm
    down_gemm: ExpertGemm
    _get_name = shown_name
    _apply_gate: Any

    def make_gemms(self) -> None:
        """Adds the ``ExpertGemm`` layers, and notes what the gate computes."""
        self.gate_up_gemm, self.down_gemm = _gemms_of(self)
        _gate_of(self)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns, for each token, the weighted sum of its ``k`` experts' results.

        ``top_k_index`` and ``top_k_weights`` are ``[tokens, k]``.
        """
        if not self._in_fp8() and not self.__dict__.get("_apex_te_upright"):
            out: torch.Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return out
        if self._is_spread():
            raise NotImplementedError(
                "StackedExperts: experts must be on one rank in fp8_autocast, got experts that "
                "transformers has spread over ranks"
            )
        gemms = self.gate_up_gemm, self.down_gemm
        return _run(self, gemms, hidden_states, top_k_index, top_k_weights)

    def _is_spread(self) -> bool:
        """Returns True if transformers has given each rank a part of the experts."""
        held = self.gate_up_proj.shape[0]  # inside the forward that versions before 5.20 wrap
        return getattr(self, "_is_expert_parallel", False) or held != self.gate_up_gemm.num_gemms

    def _in_fp8(self) -> bool:
        """Returns True if GEMMs run in FP8 or record amax values; a recompute does as before."""
        gemms = self.gate_up_gemm, self.down_gemm
        if not torch.compiler.is_compiling() and graph_task_id() != -1:
            return gemms[0]._modes.recompute is not None
        region = local.region
        found = region is not None and (region.enabled or region.calibrating)
        if not found and not torch.compiler.is_compiling():
            for gemm in gemms:  # nothing to repeat in backward
                gemm._modes.recompute, gemm._modes.recompute_fp8 = None, False
        return found

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            save_parameters(self, destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            joined_scales(self, state_dict, prefix, error_msgs), prefix, local_metadata, strict,
            missing_keys, unexpected_keys, error_msgs,
        )  # fmt: skip

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns instructions for pickle that derive the layer's class from the experts' own."""
        kind = type(self)
        base = kind.__mro__[kind.__mro__.index(StackedExperts) + 1]
        return _new, (base,), self.__dict__.copy()


_CLASSES: dict[type, type[StackedExperts]] = {}


def stacked_experts(base: type[nn.Module]) -> type[StackedExperts]:
    """Returns the subclass of ``StackedExperts`` and ``base``, one for each ``base``."""
    if base not in _CLASSES:
        namespace = {"__module__": __name__, "__doc__": StackedExperts.__doc__}
        _CLASSES[base] = type("StackedExperts", (StackedExperts, base), namespace)
    return _CLASSES[base]


def _new(base: type[nn.Module]) -> StackedExperts:
    """Returns empty experts, for pickle to fill."""
    kind = stacked_experts(base)
    return kind.__new__(kind)
