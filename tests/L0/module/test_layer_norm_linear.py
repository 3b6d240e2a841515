"""LayerNormLinear and LayerNormMLP: what both promise, and what each has alone."""

import pytest
import torch
from checks import DTYPES
from module_cases import (
    ACTIVATIONS,
    GATES,
    RECIPES,
    SCHEMES,
    check_against_torch,
    check_floors,
    same_bits,
    sqnr,
)
from normed_module_cases import NormedModuleCases
from normed_module_uses import NormedModuleUses

from apex_te import fp8_autocast
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP


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


class TestLayerNormMLP(NormedModuleCases, NormedModuleUses):
    kind = LayerNormMLP
    floor = 22.0
    weights = ("fc1_weight", "fc2_weight")
    expected_parameters = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, device, activation, dtype):
        module = self.make(device, activation=activation, params_dtype=dtype)
        check_against_torch(module, self.x(9, 32, dtype=dtype, device=device))

    @pytest.mark.parametrize("recipe", SCHEMES)
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations_in_fp8(self, device, activation, recipe):
        module = self.make(device, features=64, activation=activation)
        # Their derivative jumps where the noise turns a sign.
        backward = 12.0 if activation in ("relu", "reglu", "sreglu") else 17.0
        x = self.x(2, 16, 64, device=device)
        check_floors(module, x, RECIPES[recipe], forward=self.floor, backward=backward)

    @pytest.mark.parametrize("recipe", SCHEMES)
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_only_the_inner_bias_learns(self, activation, recipe):
        module, x, dy = self.make(activation=activation), self.x(8, 32), torch.randn(8, 32)
        found = []
        for rest in (True, False):
            module.fp8_state.reset()
            module.zero_grad()
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(rest or name == "fc1_bias")
            with fp8_autocast(True, RECIPES[recipe]):
                module(x).backward(dy)
            found.append(module.fc1_bias.grad)
        assert found[1] is not None
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        ("recipe", "params"),
        [
            *[(recipe, None) for recipe in (None, *SCHEMES)],
            # Not in FP8: the derivative jumps where the noise passes a limit.
            (None, {"limit": 0.5}),
            (None, {"alpha": 2.0, "limit": 0.3, "glu_linear_offset": 0.0}),
        ],
    )
    def test_clamped_swiglu(self, device, recipe, params):
        """``gate * sigmoid(alpha * gate) * (up + offset)`` of halves that are clamped."""
        module = self.make(
            device, features=64, activation="clamped_swiglu", activation_params=params
        )
        given = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0, **(params or {})}
        x = self.x(4, 16, 64, device=device).requires_grad_()
        with fp8_autocast(recipe is not None, RECIPES[recipe] if recipe else None):
            out = module(x)
        dy = torch.randn_like(out)
        found = [out, *torch.autograd.grad(out, [x, *module.parameters()], dy)]
        norm = torch.nn.functional.layer_norm(
            x, (64,), module.layer_norm_weight, module.layer_norm_bias, module.eps
        )
        hidden = torch.nn.functional.linear(norm, module.fc1_weight, module.fc1_bias)
        gate, up = hidden.chunk(2, -1)
        gate, up = gate.clamp(max=given["limit"]), up.clamp(-given["limit"], given["limit"])
        hidden = gate * torch.sigmoid(given["alpha"] * gate) * (up + given["glu_linear_offset"])
        out = torch.nn.functional.linear(hidden, module.fc2_weight, module.fc2_bias)
        expected = [out, *torch.autograd.grad(out, [x, *module.parameters()], dy)]
        for got, want in zip(found, expected, strict=True):
            if recipe is None:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            else:
                assert sqnr(want, got) > 17.0

    def test_activation_params_are_checked(self):
        for kwargs in (
            {"activation": "swiglu", "activation_params": {"limit": 7.0}},
            {"activation": "clamped_swiglu", "activation_params": {"limits": 7.0}},
        ):
            with pytest.raises(ValueError, match="activation_params must be None, or for 'clamped"):
                LayerNormMLP(16, 16, **kwargs)

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_shapes(self, activation):
        module = self.bare(32, 40, activation=activation)
        inner = 80 if activation in GATES else 40
        assert module.fc1_weight.shape == (inner, 32)
        assert module.fc1_bias.shape == (inner,)
        assert module.fc2_weight.shape == (32, 40)
        assert module.fc2_bias.shape == (32,)
        assert f"activation={activation}" in repr(module)

    def test_each_weight_has_its_init_method(self):
        init = {
            "init_method": torch.nn.init.ones_,
            "output_layer_init_method": torch.nn.init.zeros_,
        }
        module = self.bare(**init)
        assert module.fc1_weight.eq(1).all()
        assert module.fc2_weight.eq(0).all()
        module = self.bare(init_method=torch.nn.init.ones_)
        assert 0 < module.fc2_weight.std() < 0.1

    def test_warm_up_hints_change_nothing(self):
        module = self.bare(seq_length=128, micro_batch_size=2)
        assert list(module.state_dict()) == list(self.bare().state_dict())
        check_against_torch(module, self.x(4, 32))
