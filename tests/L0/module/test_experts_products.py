"""Experts in each recipe, kind of gradient and feature of training, against loops over experts.

Each case trains for some steps, with half of all rows at one expert and none at others. Its results
are compared with those of the same GroupedLinear layers one op at a time and without the feature,
and with those of a GEMM for each expert.
"""

import copy
from itertools import chain

import pytest
import torch
from graph_stand_in import graphs_on_cpu  # noqa: F401
from grouped_splits import assert_close
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from apex_te import fp8_autocast
from apex_te.fp8.model_init import fp8_model_init
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.graphs.graphed_callables import make_graphed_callables
from apex_te.module.grouped import experts as grouped_experts
from apex_te.module.grouped import on_device
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling
from tests.checks import assert_same_bits, sqnr

pytestmark = pytest.mark.filterwarnings("ignore:apex_te")
HIDDEN, RATE, STEPS = 64, 1e-3, 3
SIZES = {1: (100, 1, 32), 22: (200, 2, 128), 128: (150, 2, 32)}  # experts: tokens, top_k, ffn
# With these scales decoding is exact, so that loops have the same bits but for orders of sums.
POW2 = {"amax_history_len": 4, "scaling_factor_compute_algo": "pow2"}
RECIPES = {
    "tensorwise": CurrentScaling(pow2=True),
    "delayed": DelayedScaling(**POW2),
    "first": DelayedScaling(first_step="current", **POW2),
    "blockwise": BlockScaling(),
    "blockwise 1x128": BlockScaling(wgrad_input="1x128"),
}
FEATURES = [
    "plain", "recompute", "reentrant recompute", "graph", "compiled", "delayed wgrad",
    "frozen FC1", "frozen FC2", "microbatches",
]  # fmt: skip


class Experts(torch.nn.Module):
    """SwiGLU experts as one function, or as a loop over GEMMs of one expert each."""

    def __init__(self, count, ffn, single, **options):
        super().__init__()
        self.is_loop = not single
        options = {"bias": False, "single_parameter": single, **options}
        self.fc1 = GroupedLinear(count, HIDDEN, 2 * ffn, **options)
        self.fc2 = GroupedLinear(count, ffn, HIDDEN, **options)

    def forward(self, x, indices, probs, is_first_microbatch=None):
        run = self.loop if self.is_loop else self.fused
        return run(x, indices, probs, is_first_microbatch)

    def fused(self, x, indices, probs, first):
        fc1, fc2 = self.fc1, self.fc2
        return grouped_experts.run_experts(fc1, fc2, x, indices, probs, "swiglu", first)[0]

    def loop(self, x, indices, probs, first):
        flat, count = indices.flatten().long(), self.fc1.num_gemms
        order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
        splits = torch.bincount(flat[flat >= 0], minlength=count).tolist()
        token = order // indices.shape[1]
        gate, up = self.fc1(x[token], splits, first).float().chunk(2, -1)
        hidden = (functional.silu(gate) * up).to(x.dtype).float() * probs.flatten()[order, None]
        rows = self.fc2(hidden.to(x.dtype), splits, first).float()
        return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, rows).to(x.dtype)

    def backward_dw(self):
        self.fc1.backward_dw()
        self.fc2.backward_dw()


def batches_of(count, device, dtype, microbatches):
    """For each step its microbatches: tokens, experts, probabilities and the output's gradient."""
    tokens, top_k, _ = SIZES[count]
    found = []
    for _ in range(STEPS):
        found.append([])
        for _ in range(microbatches):
            indices = torch.zeros(tokens, top_k, dtype=torch.int32)
            if top_k == 2:
                indices[:, 1] = torch.randint(1, count - 2, (tokens,))
                indices[::7, 1] = -1
            x, dy = (torch.randn(tokens, HIDDEN).to(device, dtype) for _ in range(2))
            # Products with powers of two are exact, wherever they are computed.
            probs = 2.0 ** torch.randint(-2, 1, (tokens, top_k))
            found[-1].append((x, indices.to(device), probs.to(device), dy))
    return found


def train(model, call, batches, recipe, main_grad, promises):
    """Results, gradients of inputs, and gradients of weights of each step of gradient descent."""
    outs, probs_grads, weight_grads = [], [], []
    weights = list(model.parameters())
    for value in weights if main_grad and not hasattr(weights[0], "main_grad") else ():
        value.main_grad = torch.zeros(value.shape, device=value.device)
    for step in batches:
        for (x, indices, probs, dy), first in zip(step, promises, strict=True):
            x, probs = (t.clone().requires_grad_() for t in (x, probs))
            with fp8_autocast(recipe is not None, recipe):
                out = call(x, indices, probs, is_first_microbatch=first)
            out.backward(dy)
            outs += [out.detach().clone(), x.grad]
            probs_grads.append(probs.grad)
        model.backward_dw()
        for value in weights:
            grad = value.main_grad if main_grad else value.grad
            if not value.requires_grad:
                assert grad is None or not grad.any()
                continue
            weight_grads.append(grad.clone())
            with torch.no_grad():
                value.add_(grad.to(value.dtype), alpha=-RATE)
                grad.zero_()
            value.grad = None
    return outs, probs_grads, weight_grads


def models_of(count, device, dtype, feature, held, recipe, **options):
    """The experts, the same ones for one op at a time, and a loop over them."""
    _, _, ffn = SIZES[count]
    options |= {"params_dtype": dtype, "device": device}
    delayed = {"delay_wgrad_compute": True} if feature == "delayed wgrad" else {}
    with fp8_model_init(held, recipe):
        model = Experts(count, ffn, True, **options, **delayed)
        other = Experts(count, ffn, True, **options)
        loop = Experts(count, ffn, False, **options)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape) * 0.1)
            assert (type(value) is FP8Parameter) == held
    for each in (other, loop):
        each.load_state_dict(model.state_dict())
    if feature.startswith("frozen"):
        for each in (model, other, loop):
            (each.fc1 if feature == "frozen FC1" else each.fc2).requires_grad_(False)
    return model, other, loop


def stacked(loop, grads, count):
    """Gradients of one weight for each expert as those of stacks."""
    per_step = len(grads) // STEPS
    parts = [grads[at : at + count] for at in range(0, len(grads), count)]
    assert per_step % count == 0
    return [torch.stack(part) for part in parts]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(request, device, feature, monkeypatch):
    """Nothing reads the splits, and a stand-in replaces CUDA graphs."""
    monkeypatch.setattr(on_device, "stays_on_device", lambda device: True)
    if device.type == "cpu" and feature == "graph":
        request.getfixturevalue("graphs_on_cpu")


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("held", [False, True], ids=["bf16 weights", "FP8 weights"])
@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("name", [None, *RECIPES])
def test_product(device, monkeypatch, name, main_grad, held, feature, count):
    dtype = torch.bfloat16
    recipe = RECIPES.get(name)
    if feature == "compiled":
        one_by_one = name in ("delayed", "first") or (name is None and device.type == "cpu")
        if count > (1 if one_by_one else 22):
            pytest.skip("a graph with the GEMMs of each expert takes a minute to make")
    promises = (
        [True, False] if feature == "microbatches" or (feature == "graph" and name) else [None]
    )
    batches = batches_of(count, device, dtype, len(promises))
    model, other, loop = models_of(
        count, device, dtype, feature, held, recipe, fuse_wgrad_accumulation=main_grad
    )
    call = model
    if "recompute" in feature:

        def call(*args, is_first_microbatch):
            return checkpoint(model, *args, use_reentrant=feature == "reentrant recompute")

    elif feature == "compiled":
        whole = name not in ("delayed", "first")
        call = torch.compile(copy.copy(model), fullgraph=whole, backend="aot_eager")
    elif feature == "graph":
        for value in model.parameters():
            value.main_grad = torch.zeros(value.shape, device=device)
        x, indices, probs, _ = batches[0][0]
        given = x.clone().requires_grad_(), indices, probs.clone().requires_grad_()
        make_graphed_callables(
            model, given, fp8_enabled=name is not None, fp8_recipe=recipe,
            fp8_weight_caching=name is not None,
        )  # fmt: skip
    arguments = batches, recipe, main_grad, promises
    if feature == "compiled" and name in ("delayed", "first") and main_grad:
        message = "fuse_wgrad_accumulation and delay_wgrad_compute must be False"
        with pytest.raises(NotImplementedError, match=message):
            train(model, call, *arguments)
        return
    with monkeypatch.context() as patch:
        patch.setattr(grouped_experts, "_fused_calls", lambda *args, **options: None)
        wanted = train(other, other, *arguments)
    looped = train(loop, loop, *arguments)
    calls, apply = [], grouped_experts.ExpertsFunction.apply
    counting = staticmethod(lambda *args: calls.append(1) or apply(*args))
    monkeypatch.setattr(grouped_experts.ExpertsFunction, "apply", counting)
    outs, probs_grads, grads = train(model, call, *arguments)
    ffn = SIZES[count][2]
    is_fused = (
        name is not None
        and feature != "compiled"
        and (not name.startswith("blockwise") or ffn == 128)
    )
    assert bool(calls) == is_fused or (feature == "graph" and device.type == "cuda")
    looped = [*looped[0], *looped[1], *stacked(loop, looped[2], count)]
    # Gradients of probs are rounded to bfloat16 in one; GPUs also sum in other orders.
    floor = 45 if device.type == "cpu" else 30
    for found, due in zip((*outs, *probs_grads, *grads), looped, strict=True):
        assert sqnr(due, found) > floor
    if feature == "compiled":  # masked rows are multiplied, in another order
        for found, due in zip((*outs, *probs_grads, *grads), chain(*wanted), strict=True):
            assert sqnr(due, found) > floor
        return
    assert_same_bits([*outs, *grads], [*wanted[0], *wanted[2]])
    for found, due in zip(probs_grads, wanted[1], strict=True):
        assert_close(found, due)
