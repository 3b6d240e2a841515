"""MoELayer against a loop over experts in float64, and with the features of training."""

import contextlib
import copy
import math
import pickle

import pytest
import torch
from schemes import chosen
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from apex_te import MoELayer, fp8_autocast
from apex_te import checkpoint as own_checkpoint
from apex_te.module._core.fused_casts import ACTIVATIONS
from apex_te.module.grouped.experts import ExpertsFunction
from apex_te.ops.moe_router import reference as routed
from tests.checks import assert_same_bits, needs_cuda, sqnr

pytestmark = pytest.mark.filterwarnings("ignore:apex_te")
HIDDEN, FFN, EXPERTS, TOKENS = 32, 128, 8, 40
RECIPES = {"none": None, **chosen("delayed", "tensorwise", "blockwise", "mxfp8")}
GROUPED = [name for name in RECIPES if name != "mxfp8"]  # recipes with products of all groups
every_recipe = pytest.mark.parametrize("name", RECIPES)
WITH_ALL = {
    "bias": True, "aux_loss_coeff": 0.1, "z_loss_coeff": 0.05, "shared_expert_ffn_hidden_size": 16,
    "shared_expert_gate": True,
}  # fmt: skip
OPTIONS = {
    "plain": {},
    "all": WITH_ALL,
    "one": {"top_k": 1, "use_pre_softmax": True},
    "gpt-oss": {
        "top_k": 4,
        "bias": True,
        "activation": "clamped_swiglu",
        "activation_params": {"limit": 3},
    },
    "every": {"top_k": EXPERTS, "aux_loss_coeff": 0.1},
    "sigmoid": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "groups": {"num_groups": 4, "group_topk": 2, "score_function": "sqrtsoftplus", "top_k": 4},
    "losses beside a bias": {
        "score_function": "sigmoid",
        "expert_bias": True,
        "aux_loss_coeff": 0.1,
        "z_loss_coeff": 0.1,
    },
    "losses beside groups": {"num_groups": 4, "group_topk": 1, "aux_loss_coeff": 0.1},
    "sequences": {"aux_loss_coeff": 0.1, "sequence_aux_loss": True},
    "sequence first": {"aux_loss_coeff": 1, "sequence_aux_loss": True, "sequence_first": True},
    "best": {"capacity_factor": 0.6, "aux_loss_coeff": 0.1},
    "first": {"capacity_factor": 0.6, "token_drop_policy": "position", **WITH_ALL},
    "roomy": {"capacity_factor": 4.0, "top_k": 3},
    "sigmoid, capacity and all": {
        "score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5,
        "capacity_factor": 0.6, **WITH_ALL,
    },
}  # fmt: skip


def wide(weight):
    torch.nn.init.normal_(weight, 0.0, 0.2)


def layer_of(device="cpu", dtype=torch.float32, experts=EXPERTS, **options):
    """A layer whose weights make results near 1, and whose biases are not zero."""
    torch.manual_seed(1)
    layer = MoELayer(
        HIDDEN, FFN, experts, params_dtype=dtype, device=device,
        init_method=wide, **options,
    )  # fmt: skip
    with torch.no_grad():
        layer.fc2.weight.normal_(0.0, 0.2)
        layer.router.weight.mul_(2)
        for name, value in layer.named_parameters():
            if name.endswith("bias"):
                value.normal_()
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.normal_(0.0, 0.2)
    return layer


def region(name):
    return fp8_autocast(RECIPES[name] is not None, RECIPES[name])


def inputs(device="cpu", dtype=torch.float32, shape=(5, 8, HIDDEN)):
    torch.manual_seed(2)
    return [torch.randn(shape).to(device, dtype) for _ in range(2)]


def plain_balance_loss(logits, top_k, coeff, score_function="softmax"):
    scores = logits.softmax(-1)
    if score_function == "sigmoid":
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    counts = torch.zeros(EXPERTS).index_add(
        0, scores.topk(top_k).indices.flatten(), torch.ones(logits.shape[0] * top_k)
    )
    return coeff * EXPERTS / (top_k * logits.shape[0] ** 2) * (counts * scores.sum(0)).sum()


def plain(layer, hidden_states, values, options):
    """Result and losses of float64 ``values``, expert by expert and token by token."""
    x = hidden_states.reshape(-1, HIDDEN)
    top_k = options.get("top_k", 2)
    logits = x @ values["router.weight"].T
    bias = layer.router.expert_bias
    made = routed(
        logits, top_k, options.get("score_function", "softmax"),
        use_pre_softmax=options.get("use_pre_softmax", False),
        num_groups=options.get("num_groups"), group_topk=options.get("group_topk"),
        scaling_factor=options.get("scaling_factor"),
        expert_bias=None if bias is None else bias.detach().cpu().double(),
    )  # fmt: skip
    kept = torch.ones_like(made.index, dtype=torch.bool)
    if "capacity_factor" in options:
        capacity = math.ceil(x.shape[0] * top_k / EXPERTS * options["capacity_factor"])
        for expert in range(EXPERTS):
            copies = (made.index == expert).nonzero().tolist()
            if options.get("token_drop_policy") != "position":
                copies.sort(key=lambda at: -made.probs[at[0], at[1]].item())
            for token, place in copies[capacity:]:
                kept[token, place] = False
        assert kept.all() == (options["capacity_factor"] > 1)
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, place = ((made.index == expert) & kept).nonzero().unbind(1)
        hidden = x[token] @ values["fc1.weight"][expert].T
        hidden = hidden + values["fc1.bias"][expert] if "fc1.bias" in values else hidden
        if "activation" in options:
            # Whether a gradient passes the clamp is decided by what FC1 gives, in its dtype.
            given = hidden.detach()
            hidden = hidden + (given.to(layer.fc1.weight.dtype).to(given.dtype) - given)
            gate, up = hidden.chunk(2, -1)
            gate, up = gate.clamp(max=3), up.clamp(-3, 3)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            gate, up = hidden.chunk(2, -1)
            hidden = functional.silu(gate) * up
        rows = hidden @ values["fc2.weight"][expert].T
        rows = rows + values["fc2.bias"][expert] if "fc2.bias" in values else rows
        out = out.index_add(0, token, rows * made.probs[token, place, None])
    if "shared_expert.fc1.weight" in values:
        gate, up = (x @ values["shared_expert.fc1.weight"].T).chunk(2, -1)
        rows = functional.silu(gate) * up @ values["shared_expert.fc2.weight"].T
        out = out + rows * torch.sigmoid(x @ values["shared_expert.gate_weight"].T)
    aux = z = None
    coeff = options.get("aux_loss_coeff", 0.0)
    if coeff:
        parts = [logits]
        if options.get("sequence_aux_loss"):
            dim = 1 if options.get("sequence_first") else 0
            parts = logits.view(*hidden_states.shape[:-1], EXPERTS).unbind(dim)
        rest = top_k, coeff, options.get("score_function", "softmax")
        aux = torch.stack([plain_balance_loss(part, *rest) for part in parts]).mean()
    if "z_loss_coeff" in options:
        z = logits.logsumexp(-1).square().mean() * options["z_loss_coeff"]
    return out.view(hidden_states.shape), aux, z, made.index


def expected(layer, x, dy, options):
    """Result, losses and gradients, by name, in float64 on the CPU."""
    values = {n: p.detach().cpu().double().requires_grad_() for n, p in layer.named_parameters()}
    x = x.detach().cpu().double().requires_grad_()
    out, aux, z, index = plain(layer, x, values, options)
    total = (out * dy.cpu().double()).sum()
    for loss in (aux, z):
        total = total if loss is None else total + layer.loss_scale * loss
    total.backward()
    found = {"out": out, "x": x.grad, **{n: v.grad for n, v in values.items()}}
    return {n: v.detach() for n, v in found.items() if v is not None}, aux, z, index


def run(layer, x, dy, name="none", *rest):
    x = x.clone().requires_grad_()
    with region(name):
        out = layer(x, *rest)
    out.backward(dy)
    return out, x.grad


def gradients(layer):
    return {name: value.grad for name, value in layer.named_parameters()}


@pytest.mark.parametrize("kind", OPTIONS)
def test_equals_a_loop_over_experts(device, kind):
    options = OPTIONS[kind]
    layer = layer_of(device, **options)
    layer.loss_scale = 3.0
    x, dy = inputs(device)
    out, grad = run(layer, x, dy)
    wanted, aux, z, index = expected(layer, x, dy, options)
    found = {"out": out, "x": grad, **gradients(layer)}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name].cpu().double(), value, rtol=1e-4, atol=1e-4 * value.abs().max().item(),
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip
    for loss, value in ((layer.aux_loss, aux), (layer.z_loss, z)):
        assert (loss is None) == (value is None)
        if loss is not None:
            assert loss.dtype is torch.float32
            assert not loss.requires_grad
            torch.testing.assert_close(loss.cpu().double(), value, rtol=1e-5, atol=0.0,
                                       check_dtype=False)  # fmt: skip
    counts = index.flatten().bincount(minlength=EXPERTS)
    assert layer.tokens_per_expert.tolist() == counts.tolist()
    assert layer.tokens_per_expert.dtype is torch.int32


@every_recipe
@pytest.mark.parametrize("kind", ["all", "best", "gpt-oss"])
def test_recipes(device, name, kind):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = layer_of(device, dtype, **OPTIONS[kind])
    x, dy = inputs(device, dtype)
    for _ in range(2):
        layer.zero_grad()
        out, grad = run(layer, x, dy, name)
    assert out.dtype is dtype
    wanted, _, _, _ = expected(layer, x, dy, OPTIONS[kind])
    found = {"out": out, "x": grad, **gradients(layer)}
    for key, value in wanted.items():
        least = 17 if name != "none" else 35
        assert sqnr(value, found[key]) > least, key


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(device, activation):
    """Each expert is that of a layer with the weights of one expert and no choice."""
    layer = layer_of(device, activation=activation, top_k=EXPERTS)
    x, dy = inputs(device)
    out, _ = run(layer, x, dy)
    one = MoELayer(HIDDEN, FFN, 1, 1, activation=activation, device=device)
    probs = (x @ layer.router.weight.T).softmax(-1)
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        one.fc1.weight.data.copy_(layer.fc1.weight[expert])
        one.fc2.weight.data.copy_(layer.fc2.weight[expert])
        total += one(x).detach() * probs[..., expert, None]
    torch.testing.assert_close(out, total, rtol=1e-4, atol=1e-4 * total.abs().max().item())


def test_an_expert_without_tokens(device):
    layer = layer_of(device, aux_loss_coeff=0.1, bias=True)
    with torch.no_grad():
        layer.router.weight[3] = 0.0
    x, dy = inputs(device)
    for name in RECIPES:
        layer.zero_grad()
        x = x.abs()
        with torch.no_grad():
            layer.router.weight[3] = -1.0
        out, _ = run(layer, x, dy, name)
        assert layer.tokens_per_expert[3] == 0
        assert out.isfinite().all()
        for part in ("weight", "bias"):
            assert not getattr(layer.fc1, part).grad[3].any()
            assert not getattr(layer.fc2, part).grad[3].any()
        assert layer.fc1.weight.grad.any()


@pytest.mark.parametrize("kind", ["all", "best", "sequences"])
@pytest.mark.parametrize("name", ["none", "delayed"])
def test_empty_input(device, kind, name):
    layer = layer_of(device, **OPTIONS[kind])
    x = torch.empty(3, 0, HIDDEN, device=device, requires_grad=True)
    with region(name):
        out = layer(x)
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape
    assert layer.aux_loss == 0
    assert not any(grad.any() for grad in gradients(layer).values() if grad is not None)


def test_router_stays_out_of_fp8_and_autocast(device):
    layer = layer_of(device)
    x, dy = inputs(device)
    run(layer, x, dy)
    counts = layer.tokens_per_expert
    for name in RECIPES:
        run(layer, x, dy, name)
        assert_same_bits(layer.tokens_per_expert, counts)
    seen = []
    layer.router.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.autocast(device.type, torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.bfloat16
    assert seen[0].probs.dtype is torch.float32
    layer(x)
    assert_same_bits(seen[0].probs, seen[1].probs)
    layer = layer_of(device, router_dtype=torch.bfloat16)
    layer.router.register_forward_hook(lambda module, args, out: seen.append(out))
    layer(x)
    assert not torch.equal(seen[0].probs, seen[2].probs)


@pytest.mark.parametrize("kind", ["plain", "best", "sigmoid", "all", "gpt-oss"])
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_experts_run_as_one_function_in_fp8(device, monkeypatch, name, kind):
    calls, apply = [], ExpertsFunction.apply
    monkeypatch.setattr(ExpertsFunction, "apply", lambda *args: calls.append(1) or apply(*args))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = layer_of(device, dtype, **OPTIONS[kind])
    run(layer, *inputs(device, dtype), name)
    assert calls == [1]


@every_recipe
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("within", [True, False])
def test_recompute(device, name, reentrant, within):
    """Bitwise equal to a run without it, also with the region ``within``; tokens count once."""
    # torch's reentrant one hides from a region within it that a backward follows.
    own = reentrant and within and name == "delayed"
    recompute = own_checkpoint if own else checkpoint
    layer = layer_of(device, score_function="sigmoid", expert_bias=True, aux_loss_coeff=0.1)
    other = copy.deepcopy(layer)
    x, dy = inputs(device)
    for _ in range(2):
        first = run(layer, x, dy, name)
        again = x.clone().requires_grad_()

        def call(x):
            with region(name):
                return other(x)

        with contextlib.nullcontext() if within else region(name):
            out = recompute(call if within else other, again, use_reentrant=reentrant)
        out.backward(dy)
        assert_same_bits((out, again.grad), first)
    assert_same_bits(list(gradients(layer).values()), list(gradients(other).values()))
    counts = layer.router.local_tokens_per_expert
    assert int(counts.sum()) == 2 * TOKENS * 2
    assert_same_bits(counts, other.router.local_tokens_per_expert)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("none", "plain"), ("tensorwise", "sigmoid, capacity and all"),
        *(
            pytest.param(name, kind, marks=pytest.mark.long)
            for name in ("none", "tensorwise", "blockwise")
            for kind in ("all", "sigmoid", "best", "gpt-oss")
        ),
    ],
)  # fmt: skip
def test_compiled(device, name, kind):
    layer = layer_of(device, experts=3, **{**OPTIONS[kind], "top_k": 2})
    other = copy.deepcopy(layer)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    x, dy = inputs(device)
    results = [run(each, x, dy, name) for each in (layer, compiled)]
    found = [[*result, *gradients(each).values()] for each, result in
             zip((layer, other), results, strict=True)]  # fmt: skip
    for value, eager in zip(found[1], found[0], strict=True):
        if name == "none":
            torch.testing.assert_close(
                value, eager, rtol=1e-4, atol=1e-4 * eager.abs().max().item()
            )
        else:
            assert sqnr(eager, value) > 30
    for attribute in ("aux_loss", "z_loss", "tokens_per_expert"):
        values = [getattr(each, attribute) for each in (layer, other)]
        assert (values[0] is None) == (values[1] is None)
        if values[0] is not None:
            torch.testing.assert_close(*values)


@pytest.mark.parametrize("name", GROUPED)
def test_main_grad_of_microbatches(device, name):
    layer, options = layer_of(device, **WITH_ALL), {"fuse_wgrad_accumulation": True}
    fused = layer_of(device, **WITH_ALL, **options)
    gemms = [n for n in gradients(fused) if n.endswith(("fc1.weight", "fc2.weight"))]
    for key in gemms:
        weight = fused.get_parameter(key)
        weight.main_grad = torch.full_like(weight, 7.0)
    torch.manual_seed(3)
    for first in (True, False, False):
        x, dy = torch.randn(2, TOKENS, HIDDEN).to(device)
        outs = [run(each, x, dy, name, first) for each in (layer, fused)]
        assert_same_bits(*outs)
    for key, grad in gradients(layer).items():
        if key in gemms:
            added = fused.get_parameter(key).main_grad
            # Of FP8 products, what goes to .grad is rounded to bfloat16 before.
            bound = (1e-4 if name == "none" else 3 * 2.0**-8) * grad.abs().max().item()
            torch.testing.assert_close(added, grad, rtol=1e-4, atol=bound)
        else:
            assert_same_bits(fused.get_parameter(key).grad, grad)
    assert len(gemms) == 4


@pytest.mark.parametrize("name", GROUPED)
def test_delayed_weight_gradients(device, name):
    options = {"shared_expert_ffn_hidden_size": 16}
    layer, later = layer_of(device, **options), layer_of(
        device, delay_wgrad_compute=True, **options
    )  # fmt: skip
    x, dy = inputs(device)
    assert_same_bits(*[run(each, x, dy, name) for each in (layer, later)])
    assert later.fc1.weight.grad is None
    assert later.router.weight.grad is not None
    later.backward_dw()
    assert_same_bits(list(gradients(layer).values()), list(gradients(later).values()))


def test_bias_balances_a_skewed_router(device):
    layer = layer_of(device, score_function="sigmoid", expert_bias=True, bias_update_rate=0.02)
    with torch.no_grad():
        layer.router.expert_bias.zero_()
        layer.router.weight[0] = 0.5
    torch.manual_seed(4)
    x = torch.randn(64, 16, HIDDEN).to(device) + 0.3

    def largest_share():
        counts = layer.tokens_per_expert.double()
        return (counts.max() / counts.mean()).item()

    layer(x)
    assert largest_share() > 2
    layer.router.local_tokens_per_expert.zero_()
    for _ in range(40):
        layer(x)
        layer(x)
        layer.update_expert_bias()
        assert not layer.router.local_tokens_per_expert.any()
    layer.eval()
    layer(x)
    assert largest_share() < 1.3
    assert not layer.router.local_tokens_per_expert.any()
    assert layer.aux_loss is None


@pytest.mark.parametrize("name", ["aux_loss", "z_loss"])
def test_losses_reach_the_router_through_backward_alone(device, name):
    """One balances a skewed router, the other makes its logits smaller."""
    layer = layer_of(device, **{f"{name}_coeff": 1.0})
    torch.manual_seed(4)
    x = torch.randn(512, HIDDEN).to(device) + 0.5
    optimizer = torch.optim.Adam(layer.parameters(), lr=5e-3)
    seen = []
    for _ in range(30):
        (layer(x).sum() * 0.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(getattr(layer, name).item())
    assert seen[-1] < (1.05 if name == "aux_loss" else 0.9 * seen[0])
    assert name == "z_loss" or seen[0] > 1.2
    before = layer.router.weight.detach().clone()
    layer.eval()
    layer(x).sum().mul(0.0).backward()
    assert not layer.router.weight.grad.any()
    assert torch.equal(before, layer.router.weight)


def test_loss_scale_as_a_tensor(device):
    layer = layer_of(device, aux_loss_coeff=0.1)
    x, dy = inputs(device)
    grads = []
    for scale in (1.0, 4.0, torch.tensor([4.0], device=device)):
        layer.loss_scale = scale
        layer.zero_grad()
        run(layer, x, torch.zeros_like(dy))
        grads.append(layer.router.weight.grad)
    assert_same_bits(grads[1], 4 * grads[0])
    assert_same_bits(grads[1], grads[2])


def test_state_dicts_and_copies(tmp_path):
    layer = layer_of(score_function="sigmoid", expert_bias=True, **WITH_ALL)
    x, dy = inputs()
    run(layer, x, dy)
    assert {name: list(value.shape) for name, value in layer.state_dict().items()} == {
        "router.weight": [EXPERTS, HIDDEN],
        "router.expert_bias": [EXPERTS],
        "fc1.weight": [EXPERTS, 2 * FFN, HIDDEN],
        "fc1.bias": [EXPERTS, 2 * FFN],
        "fc2.weight": [EXPERTS, HIDDEN, FFN],
        "fc2.bias": [EXPERTS, HIDDEN],
        "shared_expert.fc1.weight": [32, HIDDEN],
        "shared_expert.fc2.weight": [HIDDEN, 16],
        "shared_expert.gate_weight": [1, HIDDEN],
    }
    again = MoELayer(
        HIDDEN, FFN, EXPERTS, score_function="sigmoid", expert_bias=True, **WITH_ALL, device="meta"
    )
    again.to_empty(device="cpu")
    assert not again.router.local_tokens_per_expert.any()
    each = {}
    for name, value in layer.state_dict().items():
        stacked = name.startswith("fc")
        each |= {f"{name}{i}": part for i, part in enumerate(value)} if stacked else {name: value}
    again.load_state_dict(each)
    torch.save(layer, tmp_path / "layer.pt")
    others = [
        again, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)),
        torch.load(tmp_path / "layer.pt", weights_only=False),
    ]  # fmt: skip
    for other in others:
        assert_same_bits(list(other.state_dict().values()), list(layer.state_dict().values()))
        assert_same_bits(other(x), layer(x))


def test_meta_device_and_casts():
    torch.manual_seed(0)
    options = {"score_function": "sigmoid", "expert_bias": True, **WITH_ALL}
    hidden = 1024  # gate_weight has as many elements, whose deviation is known to 2%
    layer = MoELayer(hidden, FFN, EXPERTS, **options, device="meta")
    assert all(value.is_meta for value in layer.state_dict().values())
    layer.reset_parameters()
    assert not any(value.is_meta for value in layer.state_dict().values())
    assert not layer.router.expert_bias.any()
    assert not layer.router.local_tokens_per_expert.any()
    assert 0.02 < layer.router.weight.std() < 0.026
    assert 0.02 < layer.shared_expert.gate_weight.std() < 0.026
    layer.router.expert_bias.fill_(1e-3)
    layer.bfloat16()
    assert layer.router.expert_bias.dtype is torch.float32
    assert bool((layer.router.expert_bias == 1e-3).all())
    assert layer.router.weight.dtype is torch.bfloat16
    x = torch.randn(4, hidden, device=layer.router.weight.device).bfloat16()
    assert layer(x).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_k": 9}, ValueError, "top_k must be from 1 to the 8 experts, got 9"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int, got float"),
        ({"num_experts": 0}, ValueError, "num_experts must be at least 1, got 0"),
        ({"num_experts": 1024}, NotImplementedError, "num_experts must be at most 1023, got 1024"),
        ({"activation": "swish"}, ValueError, "activation must be one of .*, got 'swish'"),
        ({"score_function": "relu"}, ValueError, "score_function must be 'softmax', .* got 'relu'"),
        ({"group_topk": 2}, ValueError, "num_groups must divide 8 experts .* got None"),
        ({"expert_bias": True}, ValueError, "expert_bias must be False with score_function"),
        ({"capacity_factor": 0.0}, ValueError, "capacity_factor must be above 0 and finite, got"),
        ({"capacity_factor": "1"}, TypeError, "capacity_factor must be a float, got str"),
        ({"aux_loss_coeff": -1.0}, ValueError, "aux_loss_coeff must be at least 0 and finite, got"),
        ({"aux_loss_coeff": None}, TypeError, "aux_loss_coeff must be a float, got NoneType"),
        ({"z_loss_coeff": math.inf}, ValueError, "z_loss_coeff must be at least 0 and finite, got"),
        ({"token_drop_policy": "prob"}, ValueError, "token_drop_policy must be 'probs' or .* mean"),
        ({"exchange": "ring"}, ValueError, "exchange must be one of all_to_all, all_gather, got"),
        ({"router_dtype": torch.float64}, TypeError, "router_dtype must be torch.float32, "),
        ({"shared_expert_gate": True}, ValueError, "shared_expert_gate must be False without"),
        ({"shared_expert_ffn_hidden_size": 0}, ValueError, "shared_expert_ffn_hidden_size must be"),
        ({"expert_group": 2}, TypeError, "expert_group must be a torch.distributed.ProcessGroup"),
        ({"bias": "no"}, TypeError, "bias must be a bool, got 'no'"),
        ({"topk": 2}, TypeError, "unexpected argument 'topk'.*top_k"),
    ],
)  # fmt: skip
def test_refused_arguments(options, error, message):
    with pytest.raises(error, match=f"MoELayer: {message}"):
        MoELayer(HIDDEN, FFN, **{"num_experts": EXPERTS, **options})


def test_refused_calls():
    layer = layer_of()
    for x, error, message in (
        (torch.randn(4, 31), ValueError, r"hidden_states must have a last dimension of 32, got"),
        (torch.randn(4, HIDDEN).double(), TypeError, "hidden_states must have"),
        (torch.ones(4, HIDDEN, dtype=torch.int64), TypeError, "hidden_states must have"),
        ([1.0], TypeError, "hidden_states must be a torch.Tensor, got list"),
        (torch.randn(4, HIDDEN, device="meta"), ValueError, "hidden_states must be on cpu like"),
    ):
        with pytest.raises(error, match=f"MoELayer: {message}"):
            layer(x)
    with pytest.raises(TypeError, match="is_first_microbatch must be None or a bool, got int"):
        layer(torch.randn(4, HIDDEN), 1)
    with pytest.raises(ValueError, match="MoELayer: expert_bias must be True for an update"):
        layer.update_expert_bias()
    with pytest.raises(TypeError, match="MoELayer: loss_scale must be a float, got str"):
        layer.loss_scale = "2"
    with pytest.raises(ValueError, match="MoELayer: loss_scale must have one element"):
        layer.loss_scale = torch.ones(2)
    with pytest.raises(TypeError, match="MoELayer: expert_group must be a process group, got None"):
        layer.set_expert_group(None)
    with pytest.raises(ValueError, match="must have a dimension of tokens with sequence_aux_loss"):
        layer_of(**OPTIONS["sequences"])(torch.randn(HIDDEN))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("kind", ["all", "sigmoid", "best", "first", "gpt-oss"])
def test_nothing_waits_for_the_device(name, kind):
    layer = layer_of("cuda", torch.bfloat16, **OPTIONS[kind])
    x, dy = inputs("cuda", torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            out, grad = run(layer, x, dy, name)
            if layer.router.expert_bias is not None:
                layer.update_expert_bias()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("kind", ["all", "sigmoid", "best", "gpt-oss"])
def test_captured(name, kind):
    """One graph, replayed on tokens with other experts than those of its capture."""
    layer = layer_of("cuda", torch.bfloat16, **OPTIONS[kind])
    other = copy.deepcopy(layer)
    x, dy = inputs("cuda", torch.bfloat16)
    x.requires_grad_()
    for each in (layer, other):
        for value in each.parameters():
            value.grad = torch.zeros_like(value)

    def step(module):
        with region(name):
            out = module(x)
        out.backward(dy)
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(layer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(layer)
    for _ in range(2):
        step(other)
    for each in (layer, other):
        for value in each.parameters():
            value.grad.zero_()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(x.shape))
        graph.replay()
        assert_same_bits(out, step(other))
        assert_same_bits(layer.tokens_per_expert, other.tokens_per_expert)
    assert_same_bits(list(gradients(layer).values()), list(gradients(other).values()))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("kind", OPTIONS)
def test_gpu_equals_cpu(kind):
    """Both devices choose the same experts, and their results agree within rounding."""
    layer = layer_of(**OPTIONS[kind])
    other = copy.deepcopy(layer).cuda()
    x, dy = inputs()
    results = run(layer, x, dy), run(other, x.cuda(), dy.cuda())
    assert_same_bits(layer.tokens_per_expert, other.tokens_per_expert)
    for value, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu(), value, rtol=1e-4, atol=1e-4)
    for name, grad in gradients(layer).items():
        torch.testing.assert_close(
            other.get_parameter(name).grad.cpu(), grad, rtol=1e-4,
            atol=1e-4 * grad.abs().max().item(),
        )  # fmt: skip
