"""How LayerNormLinear and LayerNormMLP are used: autocast, freezing, copies, files, bad input."""

import copy
import io

import pytest
import torch
from module_cases import RECIPES, SCHEMES, gradients_for, leaf, outputs, plain, same_bits, sqnr
from normed_module_cases import NormedModuleBase

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.state import TENSORS
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import DelayedScaling


class NormedModuleUses(NormedModuleBase):
    """Circumstances, copies and errors."""

    @pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "mxfp8"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_torch_autocast(self, device, recipe, dtype):
        module, x = self.make(device, features=64), leaf(self.x(8, 64, device=device))
        module.return_layernorm_output = False
        exact = plain(module, {n: p.double() for n, p in module.named_parameters()}, x.double())[0]
        with torch.autocast(device.type, dtype), fp8_autocast(recipe is not None,
                                                              RECIPES.get(recipe)):  # fmt: skip
            out = module(x)
            out.float().sum().backward()  # inside autocast
            assert module(x.detach().to(dtype)).dtype == dtype
        assert out.dtype == dtype
        assert x.grad.dtype == torch.float32
        assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
        assert sqnr(exact, out) >= self.floor

    @pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise"])
    @pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
    def test_eps_may_change(self, device, recipe, normalization):
        """A module computes with the present ``eps``, also where it repeats recorded ops."""
        options = {"normalization": normalization, "device": device}
        module = self.make(eps=1e-5, **options)
        other = self.bare(eps=0.5, **options)
        other.load_state_dict(module.state_dict())
        for step in range(6):
            module.eps = other.eps = 0.5 if step < 3 else 1e-5
            found, expected = (self.run(m, RECIPES.get(recipe)) for m in (module, other))
            assert same_bits(found, expected)
            if step == 2:
                before = found
        assert not same_bits(found, before)
        with pytest.raises(ValueError, match="eps must be at least 0 and below 1, got 2"):
            module.eps = 2

    @pytest.mark.parametrize("recipe", SCHEMES)
    def test_frozen_parts(self, recipe):
        """Whatever is frozen, the others' gradients stay what they are."""
        module = self.make(return_layernorm_output=False)
        x, other = self.x(16, 32), self.x(16, 32)
        grads = gradients_for(module, x, other)

        def learn(names):
            module.fp8_state.reset()
            module.zero_grad()
            inp, rest = x.clone(), other.clone()
            tensors = {"input": inp, "residual": rest} | dict(module.named_parameters())
            for name, tensor in tensors.items():
                tensor.requires_grad_(name in names)
            with fp8_autocast(True, RECIPES[recipe]):
                found = outputs(module, inp, rest)
            torch.autograd.backward(found, grads)
            return {n: t.grad for n, t in tensors.items()}

        names = ["input", "residual", *(n for n, _ in module.named_parameters())]
        full = learn(names)
        assert all(g is not None for g in full.values())
        chosen = [{n} for n in names] + [set(names) - {n} for n in names]
        chosen += [{a, b} for a in self.weights for b in names]
        for wanted in chosen:
            found = learn(wanted)
            for name in names:
                if name in wanted:
                    assert found[name] is not None, f"{name} has no gradient in {wanted}"
                    # A bias alone is summed up in another order.
                    torch.testing.assert_close(found[name], full[name], rtol=1e-6, atol=1e-5)
                else:
                    assert found[name] is None

    @pytest.mark.parametrize("recipe", [None, *SCHEMES])
    def test_used_twice_in_a_region(self, recipe):
        module, xs = self.make(), [self.x(4, 32), 3 * self.x(6, 32)]
        alone = []
        for x in xs:
            module.fp8_state.reset()
            module.zero_grad()
            with fp8_autocast(recipe is not None, RECIPES.get(recipe)):
                module(x).sum().backward()
            alone.append([p.grad.clone() for p in module.parameters()])
        if recipe != "delayed":  # else the second use has the first one's scales
            module.zero_grad()
            with fp8_autocast(recipe is not None, RECIPES.get(recipe)):
                (module(xs[0]).sum() + module(xs[1]).sum()).backward()
            for p, a, b in zip(module.parameters(), *alone, strict=True):
                torch.testing.assert_close(p.grad, a + b, rtol=1e-6, atol=1e-6)
            return
        module.fp8_state.reset()
        with fp8_autocast(True, DelayedScaling()):
            (module(xs[0]).sum() + 5 * module(xs[1]).sum()).backward()
        amax = (
            module.fp8_state.amax_history_fwd[0].clone(),
            module.fp8_state.amax_history_bwd[0].clone(),
        )
        module.fp8_state.reset()
        for x, factor in zip(xs, (1, 5), strict=True):
            with fp8_autocast(True, DelayedScaling(interval=9)):
                (factor * module(x)).sum().backward()
        assert torch.equal(amax[0], module.fp8_state.amax_history_fwd[0])
        assert torch.equal(amax[1], module.fp8_state.amax_history_bwd[0])

    @pytest.mark.parametrize("recipe", [None, *SCHEMES])
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_without_gradients(self, device, recipe, mode):
        module = self.make(device, return_layernorm_output=True)
        x, other = (self.x(2, 8, 32, device=device) for _ in range(2))
        with fp8_autocast(recipe is not None, RECIPES.get(recipe)):
            expected = outputs(module, x, other)
        torch.autograd.backward(expected, gradients_for(module, x, other))
        with fp8_autocast(True, DelayedScaling(interval=9)) if recipe == "delayed" else mode():
            pass  # nothing may be pending while states are compared
        state = (
            [getattr(module.fp8_state, n).clone() for n in TENSORS] if recipe == "delayed" else []
        )
        with mode(), fp8_autocast(recipe is not None, RECIPES.get(recipe)):
            found = outputs(module, x, other)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert not any(t.requires_grad for t in found)
        for old, name in zip(state, TENSORS, strict=False):
            assert torch.equal(old, getattr(module.fp8_state, name))

    @pytest.mark.parametrize("recipe", [None, *SCHEMES])
    def test_double_backward_raises(self, recipe):
        module, x = self.make(), leaf(self.x(4, 32))
        with fp8_autocast(recipe is not None, RECIPES.get(recipe)):
            out = module(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    def test_output_can_be_changed_in_place(self):
        module = self.make()
        for shape in ((4, 32), (2, 3, 32)):
            with fp8_autocast(True, RECIPES["delayed"]):
                out = module(leaf(self.x(*shape)))
            out.mul_(2).sum().backward()

    @pytest.mark.parametrize("recipe", SCHEMES)
    def test_calibrating_computes_in_high_precision(self, recipe):
        module = self.make()
        expected, count = self.run(module), fp8_gemm_count()
        torch.manual_seed(7)
        x = self.x(12, 32)
        grads = gradients_for(module, x)
        x.requires_grad_()
        module.zero_grad()
        with fp8_autocast(False, RECIPES[recipe], calibrating=True):
            out = module(x)
        torch.autograd.backward([out], grads)
        found = {"output 0": out, "input": x.grad}
        found |= {name: p.grad for name, p in module.named_parameters()}
        assert same_bits(found, expected)
        assert fp8_gemm_count() == count
        if recipe != "delayed":
            assert not module.fp8_state.allocated
            return
        norm = module._plain_norm(x, None)[0]
        staged = module.fp8_state.amax_history_fwd[0].tolist()
        assert staged[0] == norm.abs().max()
        for gemm, name in enumerate(self.weights):
            assert staged[3 * gemm + 1] == getattr(module, name).abs().max()
        assert (
            module.fp8_state.amax_history_bwd[0, 2 * len(self.weights) - 2] == grads[0].abs().max()
        )

    # Copies and files.

    def trained(self):
        module = self.make()
        for seed in range(3):
            torch.manual_seed(seed)
            with fp8_autocast(True, RECIPES["delayed"]):
                module(self.x(4, 32)).square().mean().backward()
        return module

    def everything(self, module):
        return {n: getattr(module.fp8_state, n) for n in TENSORS} | dict(module.named_parameters())

    def test_deepcopy(self):
        module = self.trained()
        other = copy.deepcopy(module)
        assert same_bits(self.everything(module), self.everything(other))
        with torch.no_grad():
            getattr(other, self.weights[0]).zero_()
        other.fp8_state.reset()
        assert getattr(module, self.weights[0]).ne(0).any()
        assert module.fp8_state.scale_fwd.ne(1).any()

    @pytest.mark.parametrize("whole", [True, False])
    def test_save_and_load(self, whole):
        module, blob = self.trained(), io.BytesIO()
        torch.save(module if whole else module.state_dict(), blob)
        blob.seek(0)
        if whole:
            other = torch.load(blob, weights_only=False)
        else:
            other = self.make()
            other.load_state_dict(torch.load(blob, weights_only=True), strict=True)
        flush_fp8_state()
        assert same_bits(self.everything(module), self.everything(other))
        found = [self.run(m, RECIPES["delayed"]) for m in (module, other)]
        assert same_bits(*found)

    def test_plain_keys_load_strictly(self):
        module, source = self.trained(), self.make()
        module.load_state_dict(dict(source.named_parameters()), strict=True)
        assert module.fp8_state.scale_fwd.eq(1).all()
        assert same_bits(dict(module.named_parameters()), dict(source.named_parameters()))
        self.bare().load_state_dict(module.state_dict(), strict=True)

    # Errors.

    @pytest.mark.parametrize("recipe", [None, "delayed", "blockwise"])
    def test_rejects_residuals(self, recipe):
        module, name = self.make(), self.kind.__name__
        with fp8_autocast(recipe is not None, RECIPES.get(recipe)):
            with pytest.raises(ValueError, match=rf"^{name}: residual must have shape \[4, 32\]"):
                module.forward_with_residual(self.x(4, 32), self.x(2, 2, 32))
            with pytest.raises(TypeError, match=rf"^{name}: residual must have dtype"):
                module.forward_with_residual(self.x(4, 32), self.x(4, 32, dtype=torch.bfloat16))

    @pytest.mark.parametrize("recipe", [None, "delayed"])
    def test_main_grad_is_checked(self, recipe):
        module = self.make(fuse_wgrad_accumulation=True)
        for name in self.weights:
            weight = getattr(module, name)
            weight.main_grad = torch.zeros(weight.shape)
        getattr(module, self.weights[0]).main_grad = torch.zeros(3)
        with fp8_autocast(recipe is not None, RECIPES.get(recipe)):
            out = module(self.x(4, 32))
        with pytest.raises(ValueError, match=r"main_grad must be contiguous .* got \[3\]"):
            out.sum().backward()
