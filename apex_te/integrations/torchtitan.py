"""``FP8LinearConverter``, by which torchtitan builds its models with linear layers in FP8."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..fp8.autocast import fp8_autocast
from ..module.linear import Linear
from ..recipe import make_recipe

try:
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.models.common import linear as titan
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
        """Applies the layer in FP8."""
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
    """Converter of a model's configuration that replaces linear layers by ``FP8Linear``.

    Put it into the list ``converters`` of a model's registry, like torchtitan's own converters.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Configuration of ``FP8LinearConverter``.

        Attributes:
            recipe_name: name of the recipe, as in ``FP8Linear.Config``.
            filter_fqns: substrings of the names of layers to keep in bf16 or fp32; by default the
                output layer and routers. Also kept are layers with a size that is not a multiple of
                16, and subclasses of torchtitan's linear layer.
        """

        recipe_name: str = "tensorwise"
        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head", "router.gate"])

    def __init__(self, config: Config) -> None:
        if config.recipe_name not in RECIPES:
            raise ValueError(
                f"FP8LinearConverter: recipe_name must be one of {', '.join(RECIPES)}, the recipes "
                f"without state, got {config.recipe_name!r}"
            )
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
            if parent is None:
                model_config = new
            elif isinstance(parent, list):
                parent[attribute] = new
            else:
                setattr(parent, attribute, new)
        return model_config

    def _is_wanted(self, name: str, linear: Any) -> bool:
        """Returns True if a linear layer with configuration ``linear`` is to be FP8."""
        odd = linear.in_features % 16 or linear.out_features % 16
        filtered = any(part in name for part in self.config.filter_fqns)
        return type(linear) is titan.Linear.Config and not odd and not filtered
