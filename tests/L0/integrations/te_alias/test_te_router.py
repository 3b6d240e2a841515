"""Router functions of Transformer Engine's names against loops over tokens, and their gradients."""

import math

import pytest
import torch

from apex_te.integrations.transformer_engine.pytorch import router
from apex_te.integrations.transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

TOKENS, EXPERTS = 33, 24


def score(row, name):
    """Score of each expert, in Python floats, by itself."""
    if name == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in row]
    return [math.sqrt(math.log1p(math.exp(v))) for v in row]


def softmax(values):
    exps = [math.exp(v - max(values)) for v in values]
    return [e / sum(exps) for e in exps]


def best(values, count):
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def expected_row(row, topk, pre, groups, group_topk, factor, name, bias):
    """Probabilities of one token, by a loop; the chosen experts are those that are not None."""
    scores = (softmax(row) if pre else row) if name == "softmax" else score(row, name)
    ranked = [s + (0 if bias is None else bias[i]) for i, s in enumerate(scores)]
    if group_topk:
        size = len(row) // groups
        sums = []
        for group in range(groups):
            own = sorted(ranked[group * size : (group + 1) * size], reverse=True)
            sums.append(sum(own[: topk // group_topk]))
        allowed = best(sums, group_topk)
        ranked = [r if i // size in allowed else -math.inf for i, r in enumerate(ranked)]
    chosen = best(ranked, topk)
    probs = [scores[i] for i in chosen]
    if name == "softmax":
        probs = probs if pre else softmax(probs)
    elif topk > 1:
        probs = [p / (sum(probs) + 1e-20) for p in probs]
    out = [None] * len(row)
    for i, p in zip(chosen, probs, strict=True):
        out[i] = p * (factor or 1.0)
    return out


@pytest.mark.cover(2)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [(None, None), (4, 2), (8, 4), (1, 1)])
@pytest.mark.parametrize("factor", [None, 2.5])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize(
    ("name", "pre"),
    [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)],
)
def test_topk_against_a_loop(device, name, pre, topk, factor, groups, bias):
    if bias and name == "softmax":
        with pytest.raises(ValueError, match="expert_bias"):
            fused_topk_with_score_function(
                torch.zeros(2, 4), 1, pre, None, None, None, name, torch.zeros(4)
            )
        return
    if groups[1] and topk < groups[1]:
        pytest.skip("fewer experts than groups to choose them from")
    logits = torch.randn(TOKENS, EXPERTS) * 2
    added = torch.randn(EXPERTS) if bias else None
    probs, routing_map = fused_topk_with_score_function(
        logits=logits.to(device),
        topk=topk,
        use_pre_softmax=pre,
        num_groups=groups[0],
        group_topk=groups[1],
        scaling_factor=factor,
        score_function=name,
        expert_bias=None if added is None else added.to(device),
    )
    given = None if added is None else added.tolist()
    rows = [expected_row(row, topk, pre, *groups, factor, name, given) for row in logits.tolist()]
    chosen = torch.tensor([[p is not None for p in row] for row in rows])
    wanted = torch.tensor([[p or 0.0 for p in row] for row in rows])
    assert torch.equal(routing_map.cpu(), chosen)
    torch.testing.assert_close(probs.cpu(), wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_16_bit_logits_are_computed_in_float32(device, dtype, name):
    logits = torch.randn(TOKENS, EXPERTS).to(dtype).to(device)
    options = (3, False, None, None, None, name, None)
    probs, routing_map = fused_topk_with_score_function(logits, *options)
    wide, wide_map = fused_topk_with_score_function(logits.float(), *options)
    assert probs.dtype is dtype
    assert torch.equal(routing_map, wide_map)
    assert torch.equal(probs, wide.to(dtype))


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_gradients_against_differences(name, pre):
    logits = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(4, 8)
    options = (3, pre, None, None, 1.5, name, None)

    def total(values):
        return (fused_topk_with_score_function(values, *options)[0] * weight).sum()

    total(logits).backward()
    step = 2e-3
    for i in range(4):
        for j in range(8):
            moved = torch.zeros(4, 8)
            moved[i, j] = step
            with torch.no_grad():
                slope = (total(logits + moved) - total(logits - moved)) / (2 * step)
            assert float(logits.grad[i, j]) == pytest.approx(float(slope), abs=2e-3)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_of_all_experts(device, name, topk):
    logits = torch.randn(TOKENS, EXPERTS)
    given = logits.to(device).requires_grad_()
    routing_map, scores = fused_compute_score_for_moe_aux_loss(given, topk, name)
    rows = []
    for row in logits.tolist():
        values = softmax(row) if name == "softmax" else score(row, name)
        total = 0.0 if name == "softmax" else sum(values) + 1e-20
        rows.append([v / total if total else v for v in values])
    wanted = torch.tensor(rows)
    torch.testing.assert_close(scores.detach().cpu(), wanted, rtol=2e-6, atol=1e-8)
    assert scores.dtype is torch.float32
    assert torch.equal(routing_map.sum(-1).cpu(), torch.full((TOKENS,), topk))
    # The chosen scores are the largest.
    low = wanted.masked_fill(~routing_map.cpu(), 2.0).amin(-1)
    high = wanted.masked_fill(routing_map.cpu(), -1.0).amax(-1)
    assert (low >= high - 1e-6).all()
    (scores**2).sum().backward()
    assert given.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_aux_loss_and_gradient(device, dtype, as_tensor):
    probs = torch.rand(TOKENS, EXPERTS).to(dtype).to(device).requires_grad_()
    tokens = torch.randint(0, 40, (EXPERTS,)).to(device)
    total = torch.tensor(70, device=device) if as_tensor else 70
    loss = fused_moe_aux_loss(probs, tokens, total, EXPERTS, 2, 1e-2)
    loss.backward()
    factor = EXPERTS * 1e-2 / (2 * 70 * 70)
    exact = (probs.detach().double().sum(0) * tokens.double()).sum() * factor
    slope = (tokens.double() * factor).expand(TOKENS, EXPERTS)
    rtol = 1e-6 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(loss.double(), exact, rtol=rtol, atol=0)
    torch.testing.assert_close(probs.grad.double(), slope, rtol=rtol, atol=0)
    assert loss.dtype is dtype
    assert loss.shape == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"topk": 0}, "topk must be from 1 to the 8 experts, got 0"),
        ({"topk": 9}, "topk must be from 1 to the 8 experts, got 9"),
        ({"score_function": "tanh"}, "score_function must be 'softmax', 'sigmoid'"),
        ({"logits": torch.zeros(8)}, "logits must be"),
        ({"num_groups": 3, "group_topk": 1}, "num_groups must divide 8 experts"),
        ({"num_groups": 2, "group_topk": 4}, "num_groups must divide 8 experts"),
        ({"num_groups": 8, "group_topk": 1}, "topk must be from group_topk"),
    ],
)
def test_wrong_arguments(changed, message):
    options = {
        "logits": torch.zeros(4, 8), "topk": 2, "use_pre_softmax": False, "num_groups": None,
        "group_topk": None, "scaling_factor": None, "score_function": "sigmoid",
        "expert_bias": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        fused_topk_with_score_function(**{**options, **changed})
    with pytest.raises(ValueError, match="tokens_per_expert must have the shape"):
        fused_moe_aux_loss(torch.zeros(4, 8), torch.zeros(7), 4, 8, 2, 1.0)


@pytest.mark.parametrize("experts", [8, 11])
@pytest.mark.parametrize("lead", [(6,), (2, 3)])
@pytest.mark.parametrize("form", ["bitmap_u8", router.RoutingMapFormat.BITMAP_U8, 1])
def test_routing_maps_in_bits(experts, lead, form):
    """Bit ``e % 8`` of byte ``e // 8`` stands for expert e, for logits of any shape."""
    logits = torch.randn(*lead, experts)
    rest = (3, True, None, None, None, "softmax", None)
    probs, routes = router.fused_topk_with_score_function(logits, *rest, "bytemap")
    same, bits = router.fused_topk_with_score_function(logits, *rest, form)
    assert torch.equal(probs, same)
    assert (routes.shape, routes.dtype) == ((*lead, experts), torch.bool)
    assert (bits.shape, bits.dtype) == ((*lead, -(-experts // 8)), torch.uint8)
    for expert in range(experts):
        assert torch.equal((bits[..., expert // 8] >> (expert % 8)) & 1, routes[..., expert].byte())
    aux, scores = router.fused_compute_score_for_moe_aux_loss(logits, 3, "sigmoid", form)
    assert (aux.shape, scores.shape) == (bits.shape, logits.shape)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_topk_indices_replace_the_map(dtype):
    """The buffer gets the experts, in its dtype, and gradients flow as with the map."""
    logits = torch.randn(5, 8, requires_grad=True)
    rest = (2, False, None, None, 2.0, "sigmoid", torch.randn(8))
    out = torch.full((5, 2), -1, dtype=dtype)
    probs, indices = router.fused_topk_with_score_function(logits, *rest, topk_indices=out)
    expected, routes = router.fused_topk_with_score_function(logits, *rest)
    assert indices is out
    assert torch.equal(torch.zeros(5, 8).scatter(1, out.long(), 1.0).bool(), routes)
    grads = [torch.autograd.grad(p.square().sum(), logits)[0] for p in (probs, expected)]
    assert torch.equal(probs, expected)
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"routing_map_format": "bits"}, ValueError, "must be 'bytemap' or 'bitmap_u8', got 'b"),
        ({"routing_map_format": 2}, ValueError, "must be 'bytemap' or 'bitmap_u8', got 2"),
        ({"routing_map_format": None}, TypeError, "must be a string or a RoutingMapFormat, got "),
        ({"topk_indices": torch.ones(5, 2)}, TypeError, "must be int16, int32 or int64, got"),
        ({"topk_indices": torch.ones(5, 3).int()}, ValueError, r"must have shape \[5, 2\]"),
        ({"qb_histogram": torch.ones(1)}, NotImplementedError, "qb_histogram must be None"),
    ],
)  # fmt: skip
def test_wrong_outputs(more, error, message):
    with pytest.raises(error, match=message):
        router.fused_topk_with_score_function(
            torch.randn(5, 8), 2, False, None, None, None, "softmax", None, **more
        )
