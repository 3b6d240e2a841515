"""The tests that LayerNormLinear and LayerNormMLP have in common; each file has a class of them."""

import copy

import pytest
import torch
from checks import DTYPES
from module_cases import (
    RECIPES,
    SCHEMES,
    check_against_torch,
    check_floors,
    gradients_for,
    leaf,
    outputs,
    plain,
    randomized,
    results,
    same_bits,
)

from apex_te import fp8_autocast
from apex_te.ops.gemm_common import fp8_gemm_count

NORMS = [("LayerNorm", False), ("LayerNorm", True), ("RMSNorm", False), ("RMSNorm", True)]


class NormedModuleBase:
    """`kind` is the module, `second` its second size, `weights` the names of its matrices."""

    kind = None
    second = 48
    weights = ()
    floor = 25.0  # dB of the output

    def bare(self, features=32, second=None, **options):
        return self.kind(features, self.second if second is None else second, **options)

    def make(self, device="cpu", features=32, second=None, **options):
        return randomized(self.bare(features, second, device=device, **options))

    def x(self, *shape, dtype=torch.float32, device="cpu"):
        return (torch.randn(shape) * 1.5 + 0.2).to(dtype).to(device)

    def run(self, module, recipe=None, shape=(12, 32), **options):
        """Outputs and gradients on inputs that are the same in each call."""
        state = torch.random.get_rng_state()
        torch.manual_seed(7)
        x = self.x(*shape, device=next(module.parameters()).device)
        grads = gradients_for(module, x)
        torch.random.set_rng_state(state)
        return results(module, x, None, grads, recipe, **options)

    def twin(self, module, **options):
        """Another module with the same parameters."""
        other = self.bare(**options)
        other.load_state_dict(module.state_dict())
        return other


class NormedModuleCases(NormedModuleBase):
    """Values and arguments."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("normalization", "centred"), NORMS)
    @pytest.mark.parametrize("bias", [True, False])
    def test_equals_torch(self, device, dtype, normalization, centred, bias):
        module = self.make(
            device, normalization=normalization, zero_centered_gamma=centred, bias=bias,
            params_dtype=dtype, eps=1e-3,
        )  # fmt: skip
        check_against_torch(module, self.x(3, 5, 32, dtype=dtype, device=device))
        assert not module.fp8_state.allocated

    def test_eps_counts(self, device):
        module = self.make(device, eps=0.5)
        assert module.eps == 0.5
        check_against_torch(module, self.x(4, 32, device=device))

    @pytest.mark.parametrize("shape", [(17,), (1, 17), (2, 1, 3, 17), (0, 17), (3, 0, 17)])
    @pytest.mark.parametrize("recipe", [None, *SCHEMES])
    def test_odd_shapes(self, device, shape, recipe):
        module = self.make(device, features=17, second=19)
        x = self.x(*shape, device=device)
        if 0 not in shape:
            if recipe is None:
                check_against_torch(module, x)
            else:
                check_floors(module, x, RECIPES[recipe], forward=18, backward=13)
            return
        found = results(module, x, None, gradients_for(module, x), RECIPES.get(recipe))
        assert found["output 0"].shape == plain(module, dict(module.named_parameters()), x)[0].shape
        assert found["input"].shape == x.shape
        assert all(p.grad.eq(0).all() for p in module.parameters())

    # In FP8.

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_floors(self, device, recipe, dtype):
        module = self.make(device, features=64, second=48, params_dtype=dtype)
        x = self.x(2, 16, 64, dtype=dtype, device=device)
        check_floors(module, x, RECIPES[recipe], forward=self.floor)

    @pytest.mark.parametrize("recipe", SCHEMES)
    @pytest.mark.parametrize(("normalization", "centred"), NORMS[1:])
    def test_floors_of_norms(self, device, recipe, normalization, centred):
        module = self.make(
            device, features=64, normalization=normalization, zero_centered_gamma=centred,
            bias=False,
        )  # fmt: skip
        x = self.x(16, 64, device=device)
        check_floors(module, x, RECIPES[recipe], forward=self.floor)

    @pytest.mark.parametrize("recipe", SCHEMES)
    def test_counts_its_products(self, device, recipe):
        module, before = self.make(device), fp8_gemm_count()
        x = self.x(4, 32, device=device)
        results(module, x, None, gradients_for(module, x), RECIPES[recipe])
        assert fp8_gemm_count() - before == 3 * len(self.weights)

    @pytest.mark.parametrize("recipe", SCHEMES)
    def test_high_precision_wgrad(self, device, recipe):
        import dataclasses

        chosen = dataclasses.replace(
            RECIPES[recipe], override_linear_precision=(False, False, True)
        )
        module, before = self.make(device), fp8_gemm_count()
        check_floors(module, self.x(16, 32, device=device), chosen, forward=self.floor)
        assert fp8_gemm_count() - before == 2 * len(self.weights)

    # Arguments.

    @pytest.mark.parametrize("recipe", [None, *SCHEMES])
    @pytest.mark.parametrize("return_bias", [True, False])
    @pytest.mark.parametrize("return_norm", [True, False])
    @pytest.mark.parametrize("residual", [True, False])
    def test_returns(self, device, recipe, return_bias, return_norm, residual):
        module = self.make(
            device, return_bias=return_bias, return_layernorm_output=return_norm,
            normalization="RMSNorm",
        )  # fmt: skip
        x, other = self.x(2, 8, 32, device=device), None
        if residual:
            other = self.x(2, 8, 32, device=device)
        assert len(outputs(module, x, other)) == 1 + return_bias + return_norm + residual
        if recipe is None:
            check_against_torch(module, x, other)
            return
        found = check_floors(module, x, RECIPES[recipe], other, forward=self.floor)
        if residual:
            total = found[f"output {1 + return_bias + return_norm}"]
            assert torch.equal(total, x + other)
            assert torch.equal(found["input"], found["residual"])

    @pytest.mark.parametrize("recipe", [None, "delayed", "blockwise"])
    def test_residual_without_a_residual(self, recipe):
        """The sum is then the input itself, and its gradient goes into the input's."""
        module, x, dy = self.make(), self.x(2, 4, 32), torch.randn(2, 4, 32)
        found = []
        for shortcut in (True, False):
            inp = leaf(x)
            module.fp8_state.reset()
            with fp8_autocast(recipe is not None, RECIPES.get(recipe)):
                if shortcut:
                    out, total = module.forward_with_residual(inp, None)
                else:
                    out, total = module(inp), inp
            assert torch.equal(total, x)
            torch.autograd.backward([out, total], [torch.ones_like(out), dy])
            found.append(inp.grad)
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("recipe", [None, *SCHEMES])
    def test_only_some_outputs_are_used(self, recipe):
        """A missing gradient counts as zero."""
        module = self.make(return_layernorm_output=True)
        x, other = self.x(4, 32), self.x(4, 32)
        grads = gradients_for(module, x, other)
        for used in range(3):
            kept = [g if i == used else torch.zeros_like(g) for i, g in enumerate(grads)]
            module.fp8_state.reset()
            expected = results(module, x, other, kept, RECIPES.get(recipe))
            module.fp8_state.reset()
            module.zero_grad()
            inp, rest = leaf(x), leaf(other)
            with fp8_autocast(recipe is not None, RECIPES.get(recipe)):
                found = outputs(module, inp, rest)
            found[used].backward(grads[used])
            pairs = {"input": inp.grad, "residual": rest.grad}
            pairs |= {name: p.grad for name, p in module.named_parameters()}
            for name, grad in pairs.items():
                grad = torch.zeros_like(expected[name]) if grad is None else grad
                torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("recipe", [None, *SCHEMES])
    def test_the_norm_alone_is_used_while_it_does_not_learn(self, recipe):
        """Its output then needs no gradient, or has one of zero for the weights."""
        module = self.make(return_layernorm_output=True)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in self.weights)
        with fp8_autocast(recipe is not None, RECIPES.get(recipe)):
            out, norm = module(self.x(4, 32))
        (norm.sum() + 0 * out.sum()).backward()
        assert all(getattr(module, name).grad.eq(0).all() for name in self.weights)
        with fp8_autocast(recipe is not None, RECIPES.get(recipe)):
            norm = module(self.x(4, 32))[1]
        if norm.requires_grad:
            norm.sum().backward()
        assert all(getattr(module, name).grad.eq(0).all() for name in self.weights)

    def test_return_bias_without_a_bias_is_empty(self):
        module, x = self.make(bias=False, return_bias=True), self.x(4, 32)
        out, bias = module(x)
        assert bias.shape == (0,)
        assert torch.equal(out, self.twin(module, bias=False)(x))
        half = self.make(return_bias=True, params_dtype=torch.bfloat16)
        assert half(self.x(4, 32, dtype=torch.bfloat16))[1].dtype == torch.bfloat16

    def test_initialisation(self):
        module = self.bare(256, 256)
        for name, parameter in module.named_parameters():
            if name in self.weights:
                assert abs(parameter.std().item() - 0.023) < 0.001
            else:
                assert parameter.eq(1.0 if name == "layer_norm_weight" else 0.0).all()
        assert self.bare(zero_centered_gamma=True).layer_norm_weight.eq(0).all()
        module = self.bare(init_method=torch.nn.init.ones_)
        assert getattr(module, self.weights[0]).eq(1).all()

    def test_parameters(self):
        names = ["layer_norm_weight", "layer_norm_bias", *self.expected_parameters]
        assert [name for name, _ in self.bare().named_parameters()] == names
        assert list(self.bare().state_dict()) == names
        names = [name for name in names if not name.endswith("bias")]
        module = self.bare(bias=False, normalization="RMSNorm")
        assert [name for name, _ in module.named_parameters()] == names

    @pytest.mark.parametrize("argument", ["params_dtype", "dtype"])
    def test_parameter_dtype(self, argument):
        module = self.bare(**{argument: torch.bfloat16})
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        assert {p.dtype for p in self.bare().parameters()} == {torch.float32}

    def test_name_and_repr(self):
        module = self.bare(name="block 3", normalization="RMSNorm")
        assert module.name == "block 3"
        assert self.bare().name is None
        assert "normalization=RMSNorm" in repr(module)

    @pytest.mark.parametrize("recipe", [None, "delayed", "mxfp8"])
    def test_meta_then_real(self, recipe):
        module = self.bare(device="meta", init_method=torch.nn.init.ones_)
        assert {p.device.type for p in module.parameters()} == {"meta"}
        module.to_empty(device="cpu")
        module.reset_parameters()
        expected = self.bare(init_method=torch.nn.init.ones_)
        assert torch.equal(getattr(module, self.weights[0]), getattr(expected, self.weights[0]))
        assert module.layer_norm_weight.eq(1).all()
        expected.load_state_dict(module.state_dict())
        found = [self.run(m, RECIPES.get(recipe)) for m in (module, expected)]
        assert same_bits(*found)

    @pytest.mark.parametrize("recipe", [None, *SCHEMES])
    @pytest.mark.parametrize("hp_wgrad", [False, True])
    def test_main_grad(self, recipe, hp_wgrad):
        import dataclasses

        chosen = RECIPES.get(recipe)
        if hp_wgrad:
            if recipe is None:
                pytest.skip("a choice of FP8 recipes")
            chosen = dataclasses.replace(chosen, override_linear_precision=(False, False, True))
        usual, fused = self.make(), self.bare(fuse_wgrad_accumulation=True)
        fused.load_state_dict(usual.state_dict())
        total = {}
        for name in self.weights:
            weight = getattr(fused, name)
            weight.main_grad = torch.full(weight.shape, 9.0)
        for first in (True, False, None):
            expected, found = (
                self.run(m, chosen, is_first_microbatch=first) for m in (usual, fused)
            )
            for name, value in expected.items():
                if name not in self.weights:
                    assert torch.equal(value, found[name])
                    continue
                assert found[name] is None
                total[name] = total[name] + value if name in total else value.clone()
                main_grad = getattr(fused, name).main_grad
                torch.testing.assert_close(main_grad, total[name], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("recipe", [None, *SCHEMES])
    @pytest.mark.parametrize("fuse", [False, True])
    def test_delayed_wgrad(self, recipe, fuse):
        usual = self.make(fuse_wgrad_accumulation=fuse)
        later = self.bare(delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
        later.load_state_dict(usual.state_dict())
        gradient = "main_grad" if fuse else "grad"
        for module in (usual, later):
            for name in self.weights:
                getattr(module, name).main_grad = torch.zeros(getattr(module, name).shape)
        for _ in range(2):
            expected = self.run(usual, RECIPES.get(recipe))
            before = [getattr(later, n).main_grad.clone() for n in self.weights]
            found = self.run(later, RECIPES.get(recipe))
            for name, value in expected.items():
                if name in self.weights:
                    assert found[name] is None
                else:
                    assert torch.equal(value, found[name])
            for name, old in zip(self.weights, before, strict=True):
                assert torch.equal(getattr(later, name).main_grad, old)
            for _ in range(2):  # the second has nothing left to do
                later.backward_dw()
                for name in self.weights:
                    made = [getattr(getattr(m, name), gradient) for m in (usual, later)]
                    assert torch.equal(*made)

    def test_delayed_wgrad_adds_up(self):
        usual, later = self.make(), self.bare(delay_wgrad_compute=True)
        later.load_state_dict(usual.state_dict())
        x = self.x(4, 32)
        for module in (usual, later):
            for scale in (1.0, 3.0):
                with fp8_autocast(True, RECIPES["blockwise"]):
                    (module(x) * scale).sum().backward()
        later.backward_dw()
        for name in self.weights:
            assert torch.equal(getattr(usual, name).grad, getattr(later, name).grad)

    @pytest.mark.parametrize("recipe", SCHEMES)
    def test_microbatches(self, recipe):
        """A cached weight gives the bits of one quantized anew, until the weight changes."""
        usual = self.make()
        cached = copy.deepcopy(usual)
        for first in (True, False, False):
            expected = self.run(usual, RECIPES[recipe])
            usual.fp8_state.reset()
            assert same_bits(expected, self.run(cached, RECIPES[recipe], is_first_microbatch=first))
            cached.fp8_state.reset()
        kept = dict(cached._modes.weight_cache)
        assert sorted(kept) == list(range(len(self.weights)))
        self.run(cached, RECIPES[recipe], is_first_microbatch=False)
        assert all(cached._modes.weight_cache[i] is kept[i] for i in kept)
        for module in (usual, cached):
            module.fp8_state.reset()
            with torch.no_grad():
                getattr(module, self.weights[-1]).mul_(-3)
        expected = self.run(usual, RECIPES[recipe])
        assert same_bits(expected, self.run(cached, RECIPES[recipe], is_first_microbatch=False))
        assert cached._modes.weight_cache[len(kept) - 1] is not kept[len(kept) - 1]
