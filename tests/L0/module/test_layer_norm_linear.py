"""LayerNormLinear against F.layer_norm / F.rms_norm and F.linear."""

import pytest
import torch
from module_cases import RECIPES, SCHEMES, check_against_torch, same_bits
from normed_module_cases import NormedModuleCases
from normed_module_uses import NormedModuleUses

from apex_te.module.layer_norm_linear import LayerNormLinear


class TestLayerNormLinear(NormedModuleCases, NormedModuleUses):
    kind = LayerNormLinear
    weights = ("weight",)
    expected_parameters = ("weight", "bias")

    @pytest.mark.parametrize("recipe", [None, *SCHEMES])
    @pytest.mark.parametrize("split", [("q", "k", "v"), {"q": 32, "kv": 16}], ids=str)
    @pytest.mark.parametrize("bias", [True, False])
    def test_parameters_split(self, recipe, split, bias):
        whole = self.make(bias=bias)
        module = self.bare(parameters_split=split, bias=bias)
        rows = [16, 16, 16] if isinstance(split, tuple) else list(split.values())
        with torch.no_grad():
            module.layer_norm_weight.copy_(whole.layer_norm_weight)
            module.layer_norm_bias.copy_(whole.layer_norm_bias)
            for kind in ("weight", "bias") if bias else ("weight",):
                for part, value in zip(split, getattr(whole, kind).split(rows), strict=True):
                    getattr(module, f"{part}_{kind}").copy_(value)
        assert not hasattr(module, "weight")
        found, expected = (self.run(m, RECIPES.get(recipe)) for m in (module, whole))
        for kind in ("weight", "bias") if bias else ("weight",):
            parts = [found.pop(f"{part}_{kind}") for part in split]
            found[kind] = torch.cat(parts)
        assert same_bits(found, expected)
        check_against_torch(module, self.x(4, 32))

    @pytest.mark.parametrize("recipe", SCHEMES)
    def test_split_weight_is_cached(self, recipe):
        module = self.make(parameters_split=("a", "b"))
        expected = self.run(module, RECIPES[recipe])
        for first in (True, False):
            module.fp8_state.reset()
            assert same_bits(expected, self.run(module, RECIPES[recipe], is_first_microbatch=first))
        kept = module._modes.weight_cache[0]
        self.run(module, RECIPES[recipe], is_first_microbatch=False)
        assert module._modes.weight_cache[0] is kept
        with torch.no_grad():
            module.b_weight.mul_(2)
        module.fp8_state.reset()
        expected = self.run(module, RECIPES[recipe])
        module.fp8_state.reset()
        found = self.run(module, RECIPES[recipe], is_first_microbatch=False)
        assert same_bits(expected, found)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"parameters_split": "qkv"}, TypeError, "parameters_split must be names .* got str"),
            ({"parameters_split": ("a",) * 2}, ValueError, "must have unique names"),
            ({"parameters_split": list("abcde")}, ValueError, "must divide out_features=48, got 5"),
            ({"parameters_split": {"a": 47}}, ValueError, "must have out_features=48 rows, got 47"),
            ({"parameters_split": {"a": 0, "b": 48}}, ValueError, "rows above 0"),
            ({"parameters_split": {"a b": 48}}, ValueError, "must have identifiers"),
            (
                {"parameters_split": ("a", "b"), "fuse_wgrad_accumulation": True},
                ValueError,
                "parameters_split must be None with fuse_wgrad_accumulation=True",
            ),
            (
                {"parameters_split": ("a", "b"), "delay_wgrad_compute": True},
                ValueError,
                "parameters_split must be None with delay_wgrad_compute=True",
            ),
            ({"parallel_mode": "row"}, ValueError, "parallel_mode must be None or 'column'"),
            ({"parallel_mode": "both"}, ValueError, "parallel_mode must be .* got 'both'"),
        ],
    )
    def test_rejects_its_arguments(self, options, error, message):
        with pytest.raises(error, match=f"^LayerNormLinear: .*{message}"):
            self.bare(**options)
