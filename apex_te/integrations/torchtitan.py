"""Converters by which torchtitan builds its models with linear layers and experts in FP8."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..fp8.autocast import fp8_autocast
from ..module.grouped.experts import run_ordered
from ..module.linear import Linear
from ..recipe import make_recipe
from .experts import ExpertGemm, set_weights

try:
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.models.common import linear as titan
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError(
        "apex_te.integrations.torchtitan: torchtitan must be installed: pip install torchtitan"
    ) from error

RECIPES = ("tensorwise", "blockwise", "mxfp8")


class FP8Linear(Linear, Module):
    """Linear layer of torchtitan's models that always runs in FP8, with a recipe without state.

    Each forward enters a region of its own, so blocks may be compiled, checkpointed and sharded one
    by one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Linear.Config):
        """Configuration that builds ``FP8Linear`` instead of torchtitan's linear layer.

        Attributes:
            recipe_name: name of the recipe: ``"tensorwise"``, ``"blockwise"`` or ``"mxfp8"``.
        """

        recipe_name: str = "tensorwise"

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features, config.bias)
        self.recipe = make_recipe(config.recipe_name)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Applies the layer in FP8 to ``input`` [..., in_features]; returns [..., out_features]."""
        with fp8_autocast(enabled=True, fp8_recipe=self.recipe):
            out = super().forward(input)
        assert isinstance(out, torch.Tensor)
        return out

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelizes the layer as torchtitan does, over data only."""
        if parallel_dims.tp > 1:
            raise NotImplementedError(
                "FP8Linear: tensor_parallel_degree must be 1, whose DTensor weights apex_te's "
                f"products do not take, got {parallel_dims.tp}"
            )
        super().parallelize(parallel_dims)


class FP8LinearConverter(QuantizationConverter):
    """torchtitan model converter that replaces linear layers by ``FP8Linear``.

    Put it into the list ``converters`` of a model's registry, like torchtitan's own converters.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Configuration of ``FP8LinearConverter``.

        Attributes:
            recipe_name: name of the recipe, such as ``"tensorwise"`` or ``"blockwise"``.
            filter_fqns: substrings of the names of layers to keep in bf16 or fp32; by default the
                output layer and routers. Layers with a size that is not a multiple of 16, and
                subclasses of torchtitan's linear layer, are always kept.
        """

        recipe_name: str = "tensorwise"
        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head", "router.gate"])

    def __init__(self, config: Config) -> None:
        _check_recipe("FP8LinearConverter", config.recipe_name)
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replaces the configurations of linear layers in ``model_config``.

        Args:
            model_config: configuration of a model, changed in place.

        Returns:
            ``model_config``; if it is the configuration of a single linear layer, its replacement.
        """
        for name, linear, parent, attribute in model_config.traverse(titan.Linear.Config):
            if not self._is_wanted(name, linear):
                continue
            new = FP8Linear.Config(
                in_features=linear.in_features,
                out_features=linear.out_features,
                bias=linear.bias,
                param_init=linear.param_init,
                sharding_config=linear.sharding_config,
                recipe_name=self.config.recipe_name,
            )
            model_config = _replaced(model_config, parent, attribute, new)
        return model_config

    def _is_wanted(self, name: str, linear: Any) -> bool:
        """Returns True if a linear layer with configuration ``linear`` is to be FP8."""
        odd = linear.in_features % 16 or linear.out_features % 16
        filtered = any(part in name for part in self.config.filter_fqns)
        return type(linear) is titan.Linear.Config and not odd and not filtered


def _check_recipe(owner: str, name: str) -> None:
    """Raises ValueError unless ``name`` is that of a recipe without state."""
    if name not in RECIPES:
        raise ValueError(
            f"{owner}: recipe_name must be one of {', '.join(RECIPES)}, the recipes without state, "
            f"got {name!r}"
        )


def _replaced(model_config: Any, parent: Any, attribute: Any, new: Any) -> Any:
    """Returns a model's configuration after a part of it, or all for no parent, became ``new``."""
    if parent is None:
        return new
    if isinstance(parent, list):
        parent[attribute] = new
    else:
        setattr(parent, attribute, new)
    return model_config


class FP8GroupedExperts(GroupedExperts):
    """Experts of torchtitan's models that always run in FP8, with a recipe without state.

    The parameters are torchtitan's. FC1 is one GEMM of ``w1`` and ``w3``, whose casts to FP8 go
    into one tensor. With ``tensorwise`` and ``blockwise`` all of ``w2(silu(w1(x)) * w3(x))`` is one
    function. In compiled code, with ``mxfp8``, and with ``blockwise`` for a ``hidden_dim`` on a
    rank that is not a multiple of 128, the layers run one by one, and ``w1`` and ``w3`` are joined
    to a copy.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Configuration that builds ``FP8GroupedExperts`` instead of torchtitan's experts.

        Attributes:
            recipe_name: name of the recipe, as in ``FP8Linear.Config``.
        """

        recipe_name: str = "tensorwise"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recipe = make_recipe(config.recipe_name)
        # Not children, which torchtitan would initialise and save.
        self._gemms = _gemms_of(self.w2_EDF)

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelizes the experts as torchtitan does."""
        super().parallelize(parallel_dims)
        self._gemms = _gemms_of(_local(self.w2_EDF))

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Computes the rows of each expert in FP8, as torchtitan's experts do in bf16.

        Args:
            x_RD: ``[rows, dim]`` in the order of experts.
            num_tokens_per_expert_E: integers ``[experts of this rank]``.

        Returns:
            ``[rows, dim]`` in the dtype of ``x_RD``; zeros in rows after the last expert's.
        """
        w1, w2, w3 = (_local(w) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        fc1, fc2 = self._gemms
        if (fc2.num_gemms, fc2.out_features, fc2.in_features) != w2.shape:  # sharded in another way
            fc1, fc2 = self._gemms = _gemms_of(w2)
        for gemm in (fc1, fc2):
            gemm.training = self.training
        x, splits = x_RD.to(w2.dtype), num_tokens_per_expert_E.to(torch.int32)
        with (
            set_weights((fc1, fc2), (w1, w3), (w2,)),
            fp8_autocast(enabled=True, fp8_recipe=self.recipe),
        ):
            return run_ordered(fc1, fc2, x, splits, "swiglu").to(x_RD.dtype)


def _local(weight: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _gemms_of(w2: torch.Tensor) -> tuple[ExpertGemm, ExpertGemm]:
    """Returns the layers of experts whose FC2 is ``w2`` ``[experts, dim, hidden_dim]``."""
    experts, outer, inner = w2.shape
    return (
        ExpertGemm(experts, outer, 2 * inner, w2.dtype),
        ExpertGemm(experts, inner, outer, w2.dtype),
    )


class FP8GroupedExpertsConverter(QuantizationConverter):
    """torchtitan model converter that replaces experts by ``FP8GroupedExperts``.

    The token dispatcher is kept; rows need no padding.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Configuration of ``FP8GroupedExpertsConverter``.

        Attributes:
            recipe_name: name of the recipe, such as ``"tensorwise"`` or ``"blockwise"``.
            filter_fqns: substrings of the names of experts to keep in bf16. Experts with a size
                that is not a multiple of 16, and subclasses of torchtitan's experts, are always
                kept.
        """

        recipe_name: str = "tensorwise"
        filter_fqns: list[str] = field(default_factory=list)

    def __init__(self, config: Config) -> None:
        _check_recipe("FP8GroupedExpertsConverter", config.recipe_name)
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replaces the configurations of experts in ``model_config``.

        Args:
            model_config: configuration of a model, changed in place.

        Returns:
            ``model_config``; if it is the configuration of experts alone, its replacement.
        """
        for name, experts, parent, attribute in model_config.traverse(GroupedExperts.Config):
            odd = experts.dim % 16 or experts.hidden_dim % 16
            filtered = any(part in name for part in self.config.filter_fqns)
            if type(experts) is not GroupedExperts.Config or odd or filtered:
                continue
            new = FP8GroupedExperts.Config(
                **{each.name: getattr(experts, each.name) for each in fields(experts)},
                recipe_name=self.config.recipe_name,
            )
            model_config = _replaced(model_config, parent, attribute, new)
        return model_config
