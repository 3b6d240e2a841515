"""Routers against their formula in float64: choices, values, gradients, counts, and edge cases."""

import pytest
import torch
from checks import (
    DTYPES,
    assert_as_good_as_torch,
    assert_same_bits,
    in_pairs,
    needs_cuda,
)

from apex_te import router
from apex_te.ops import moe_router as op

EXPERTS = [1, 2, 31, 33, 128, 255, 256, 1023, 1024]
SCORES = {
    "softmax": ("softmax", False),
    "pre-softmax": ("softmax", True),
    "sigmoid": ("sigmoid", False),
    "sqrtsoftplus": ("sqrtsoftplus", False),
}
FLOAT_OUTPUTS = ("probs", "scores", "lse")
OUTPUTS = (*FLOAT_OUTPUTS, "dense_probs", "routing_map", "counts")


def apart(tokens, experts):
    """Logits whose order rounding does not change: a shuffled ladder of each token's own step."""
    ladder = torch.linspace(-4, 4, experts)
    rows = torch.stack([ladder[torch.randperm(experts)] for _ in range(tokens)])
    return rows * (0.5 + torch.rand(tokens, 1))


def values_and_gradient(call, logits, grads):
    """The float results of `call`, and the gradient of their sum with weights `grads`."""
    logits = logits.detach().requires_grad_()
    made = call(logits)
    values = [getattr(made, name) for name in FLOAT_OUTPUTS]
    weights = [g.to(v.dtype) for g, v in zip(grads, values, strict=True)]
    (grad,) = torch.autograd.grad(values, logits, weights)
    return [v.detach() for v in values], grad


def assert_like_reference(logits, top_k, score, device="cpu", **options):
    """Compares index, values and gradient with those of the reference in float64."""
    function, pre = SCORES[score]
    options["use_pre_softmax"] = pre
    given = logits.to(device)
    bias = options.pop("expert_bias", None)
    made = op.moe_router_fwd(
        given, top_k, function, outputs=OUTPUTS, **options,
        expert_bias=None if bias is None else bias.to(device),
    )  # fmt: skip
    exact = logits.double()
    wanted = op.reference(
        exact, top_k, function, **options, expert_bias=None if bias is None else bias.double()
    )
    assert torch.equal(made.index.cpu(), wanted.index)
    index = made.index.long()
    routes = torch.zeros_like(logits, dtype=torch.bool).scatter(1, index.cpu(), True)
    assert torch.equal(made.routing_map.cpu(), routes)
    assert torch.equal(made.counts.cpu()[0], routes.sum(0).int())
    dense = torch.zeros_like(given).scatter(1, index, made.probs.to(given.dtype))
    assert_same_bits(made.dense_probs, dense)

    def ours(x):
        return _run(x, top_k, function, OUTPUTS, expert_bias=bias, **options)

    def reference(x):
        return op.reference(x, top_k, function, **options, index=wanted.index)

    grads = [torch.randn(getattr(wanted, name).shape) for name in FLOAT_OUTPUTS]
    values, grad = values_and_gradient(ours, given, [g.to(device) for g in grads])
    exact_values, exact_grad = values_and_gradient(reference, exact, grads)
    plain_values, plain_grad = values_and_gradient(reference, logits.float(), grads)
    for value, wanted_value, plain in zip(values, exact_values, plain_values, strict=True):
        assert_as_good_as_torch(value, wanted_value, plain)
    assert_as_good_as_torch(grad, exact_grad, plain_grad.to(logits.dtype))


def _run(x, top_k, function, outputs, expert_bias=None, **options):
    from apex_te.ops._router_function import run

    bias = None if expert_bias is None else expert_bias.to(x.device)
    return run(x, top_k, function, outputs, expert_bias=bias, **options)


@in_pairs(
    experts=EXPERTS, choice=["1", "8", "all"], score=list(SCORES), factor=[None, 2.5], dtype=DTYPES
)
def test_every_size(device, poison, experts, choice, score, factor, dtype):
    top_k = experts if choice == "all" else min(int(choice), experts)
    logits = apart(19, experts)
    if dtype is not torch.float32:  # of fewer bits: consecutive values of the dtype below 4
        values = max(experts, 64)  # of two alone PyTorch's error is that of two roundings
        first = torch.full((1,), 4.0, dtype=dtype).view(torch.int16) - values
        steps = torch.stack([torch.randperm(values)[:experts] for _ in range(19)]).short()
        logits = (first + steps).view(dtype)
    assert_like_reference(logits, top_k, score, device, scaling_factor=factor)


@in_pairs(
    experts=[24, 160, 256, 1024], groups=["1 of 1", "2 of 4", "4 of 8", "3 of 8"], top_k=[4, 8],
    score=list(SCORES), with_bias=[False, True],
)  # fmt: skip
def test_groups(device, poison, experts, groups, top_k, score, with_bias):
    best, count = (int(each) for each in groups.split(" of "))
    bias = torch.randn(experts) if with_bias and not score.endswith("softmax") else None
    assert_like_reference(
        torch.randn(23, experts), min(top_k, best * experts // count), score, device,
        num_groups=count, group_topk=best, expert_bias=bias,
    )  # fmt: skip


@pytest.mark.parametrize(("groups", "best"), [(12, 12), (128, 3), (3, 2)])
def test_groups_of_any_size(device, groups, best):
    logits = apart(9, 384)
    top_k = best * 3 if groups != 128 else 7
    assert_like_reference(logits, top_k, "sigmoid", device, num_groups=groups, group_topk=best)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("experts", [5, 64, 1000])
def test_equal_scores_take_the_smaller_expert(device, score, experts):
    function, pre = SCORES[score]
    logits = torch.randint(0, 3, (40, experts)).float()
    logits[0], logits[1] = 0.0, torch.where(torch.arange(experts) % 2 == 0, 0.0, -0.0)
    made = op.moe_router_fwd(logits.to(device), min(7, experts), function, use_pre_softmax=pre)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :7]
    assert torch.equal(made.index.cpu().long(), order)


def test_equal_groups_take_the_smaller_group(device):
    logits = torch.zeros(3, 64)
    made = op.moe_router_fwd(logits.to(device), 6, "sigmoid", num_groups=8, group_topk=3)
    assert made.index.tolist() == [[0, 1, 2, 3, 4, 5]] * 3


@in_pairs(score=list(SCORES), dtype=DTYPES, grouped=[False, True], value=["nan", "inf", "-inf"])
def test_nan_and_infinities(device, score, dtype, grouped, value):
    """A NaN makes a row's probs NaN; whatever the logits, experts are distinct and in range."""
    function, pre = SCORES[score]
    logits = torch.randn(32, 48).to(dtype).to(device)
    logits[3, 17] = logits[7, [0, 40]] = logits[9] = float(value)
    options = {"num_groups": 4, "group_topk": 2} if grouped else {}
    made = op.moe_router_fwd(
        logits, 6, function, use_pre_softmax=pre, outputs=OUTPUTS, **options
    )  # fmt: skip
    index = made.index.sort(-1).values
    assert (index[:, 1:] > index[:, :-1]).all()
    assert ((index >= 0) & (index < 48)).all()
    assert int(made.counts.sum()) == 32 * 6
    hit = torch.zeros(32, dtype=torch.bool, device=device)
    hit[[3, 7, 9]] = True
    assert not made.probs[~hit].isnan().any()
    if value == "nan":
        assert made.probs[hit].isnan().all()
        assert made.lse[hit].isnan().all()
        if pre:  # all scores are NaN
            assert made.index[3].tolist() == [0, 1, 2, 3, 4, 5]
        else:
            assert made.index[3, 0] == 17
            assert made.index[7, :2].tolist() == [0, 40]
    if value == "-inf" and not grouped:
        # An expert whose logit is -Inf is not chosen and gets no gradient.
        assert not (made.index[[3, 7]][..., None] == torch.tensor([17, 40], device=device)).any()
        given = logits[[3, 7]].requires_grad_()
        probs = _run(given, 6, function, ("probs",), use_pre_softmax=pre).probs
        (grad,) = torch.autograd.grad(probs.square().sum(), given)
        assert grad.isfinite().all()
        assert grad[0, 17] == 0
        assert grad[0].abs().sum() > 0


@pytest.mark.parametrize("score", SCORES)
def test_far_logits_have_finite_gradients(device, score):
    function, pre = SCORES[score]
    logits = (200 * torch.randn(50, 16, device=device)).requires_grad_()
    made = _run(logits, 4, function, FLOAT_OUTPUTS, use_pre_softmax=pre)
    assert all(getattr(made, name).isfinite().all() for name in FLOAT_OUTPUTS)
    total = made.probs.square().sum() + made.scores.square().sum() + made.lse.sum()
    (grad,) = torch.autograd.grad(total, logits)
    assert grad.isfinite().all()


@pytest.mark.parametrize("leading", [(), (0,), (3, 4), (2, 0, 5)])
def test_leading_dimensions_and_no_tokens(device, leading):
    x = torch.randn(*leading, 6, 8, device=device).requires_grad_()
    made, flat = router.topk_router(x, 2), router.topk_router(x.flatten(0, -2), 2)
    dense = router.topk_router_dense(x, 2)
    assert made.probs.shape == made.index.shape == (*leading, 6, 2)
    assert dense.probs.shape == dense.routing_map.shape == x.shape
    assert_same_bits([made.probs.flatten(0, -2), made.index.flatten(0, -2), made.counts], flat)
    assert torch.equal(dense.probs.gather(-1, made.index.long()), made.probs)
    assert torch.equal(dense.counts, made.counts)
    made.probs.sum().backward()
    assert x.grad.shape == x.shape


def test_dense_gradients_are_those_of_the_chosen(device):
    x = torch.randn(33, 40, device=device).requires_grad_()
    for function in ("softmax", "sigmoid", "sqrtsoftplus"):
        made = router.topk_router(x, 5, score_function=function, scaling_factor=1.5)
        dense = router.topk_router_dense(x, 5, score_function=function, scaling_factor=1.5)
        weight = torch.randn_like(x)
        chosen = weight.gather(1, made.index.long())
        grads = [
            torch.autograd.grad((probs * w).sum(), x)[0]
            for probs, w in ((made.probs, chosen), (dense.probs, weight))
        ]
        assert_same_bits(*grads)


@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_losses_of_sequences(device, function, sequence_first):
    """The loss of sequences is the mean of each one's own."""
    sequences, length, experts, top_k = 3, 11, 16, 4
    batch = apart(sequences * length, experts).view(sequences, length, experts).to(device)
    order = batch.transpose(0, 1) if sequence_first else batch
    given = order.reshape(-1, experts).clone().requires_grad_()
    made = router.aux_scores(
        given, top_k, function, sequences=sequences, sequence_first=sequence_first
    )
    loss = router.load_balance_loss(*made, length, top_k, 0.5, sequence_first=sequence_first)
    (grad,) = torch.autograd.grad(loss, given)
    each, grads = [], []
    for i, logits in enumerate(batch):
        one = logits.clone().requires_grad_()
        scores = router.aux_scores(one, top_k, function)
        assert torch.equal(made.counts[i], scores.counts)
        each.append(router.load_balance_loss(*scores, length, top_k, 0.5))
        grads.append(torch.autograd.grad(each[-1], one)[0] / sequences)
    expected = torch.stack(grads, 1 if sequence_first else 0).reshape(-1, experts)
    torch.testing.assert_close(loss, torch.stack(each).mean(), rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_load_balance_loss(device, function, dtype, as_tensor):
    experts, top_k, coeff = 32, 4, 0.01
    logits = (apart(65, experts) * 4).to(dtype).to(device).requires_grad_()
    made = router.aux_scores(logits, top_k, function)
    total = torch.tensor(65, device=device) if as_tensor else 65
    loss = router.load_balance_loss(*made, total, top_k, coeff)
    (grad,) = torch.autograd.grad(loss, logits)
    exact = logits.detach().double().cpu().requires_grad_()
    scores = op.reference(exact, top_k, function).scores
    factor = experts * coeff / (top_k * 65**2)
    wanted = (scores.sum(0) * made.counts.cpu()).sum() * factor
    (wanted_grad,) = torch.autograd.grad(wanted, exact)
    torch.testing.assert_close(loss.double().cpu(), wanted, rtol=1e-6, atol=0)
    eps = torch.finfo(dtype).eps
    atol = max(2**-24, max(eps, 1e-6) * float(wanted_grad.abs().max()))  # fp16 underflows
    torch.testing.assert_close(grad.double().cpu(), wanted_grad, rtol=eps, atol=atol)


def test_the_loss_makes_no_matrix_of_gradients(monkeypatch):
    """The gradient of the scores is that of a sum over tokens: one row."""
    shapes, backward = [], op._bwd

    def spy(*args):
        shapes.append(args[4].shape)
        backward(*args)

    monkeypatch.setattr(op, "_bwd", spy)
    logits = torch.randn(20, 8, requires_grad=True)
    router.load_balance_loss(*router.aux_scores(logits, 2), 20, 2, 0.1).backward()
    assert shapes == [(1, 8)]


def test_balanced_experts_have_a_loss_of_coeff(device):
    logits = 30 * torch.eye(8, device=device).repeat(4, 1)
    made = router.aux_scores(logits, 1)
    assert made.counts.tolist() == [4] * 8
    assert float(router.load_balance_loss(*made, 32, 1, 0.25)) == pytest.approx(0.25)


@pytest.mark.parametrize("dtype", DTYPES)
def test_z_loss(device, dtype):
    logits = (3 * torch.randn(5, 7, 40)).to(dtype).to(device).requires_grad_()
    loss = router.router_z_loss(logits, 1e-2)
    (grad,) = torch.autograd.grad(loss, logits)
    exact = logits.detach().double().requires_grad_()
    wanted = exact.logsumexp(-1).square().mean() * 1e-2
    (wanted_grad,) = torch.autograd.grad(wanted, exact)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=2 * max(eps, 1e-6), atol=2**-24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_bias_moves_to_balance(device, dtype):
    bias = torch.zeros(2, 4, dtype=dtype, device=device)
    counts = torch.tensor([[1, 2, 3, 2], [9, 0, 0, 0]], dtype=torch.int32, device=device)
    assert router.update_expert_bias(bias, counts, 0.5) is bias
    assert bias.tolist() == [[0.5, 0, -0.5, 0], [-0.5, 0.5, 0.5, 0.5]]
    assert counts.tolist() == [[1, 2, 3, 2], [9, 0, 0, 0]]
    # A mean in float32 would be one of these counts.
    large = torch.tensor([2**30 + 1, 2**30], dtype=torch.int32, device=device)
    pair = torch.zeros(2, device=device)
    assert router.update_expert_bias(pair, large, 1.0).tolist() == [-1.0, 1.0]


def test_expert_bias_of_a_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        counts = torch.tensor([5, 1])
        bias = router.update_expert_bias(
            torch.zeros(2), counts, 0.1, group=torch.distributed.group.WORLD
        )
        assert_same_bits(bias, torch.tensor([-0.1, 0.1]))
        assert counts.tolist() == [5, 1]
    finally:
        torch.distributed.destroy_process_group()


def test_balancing_by_bias_spreads_tokens():
    """Updates of the bias alone even out a skewed router, without changing the probs' formula."""
    logits = torch.randn(512, 8) + torch.linspace(0, 2, 8)
    bias = torch.zeros(8)

    def route():
        return router.topk_router(logits, 2, score_function="sigmoid", expert_bias=bias)

    before = route().counts
    for _ in range(400):
        router.update_expert_bias(bias, route().counts, 2e-3)
    after = route()
    assert before.max() > 2 * before.min()
    assert after.counts.max() < 1.2 * after.counts.min()
    chosen = logits.sigmoid().gather(1, after.index.long())
    torch.testing.assert_close(after.probs, chosen / chosen.sum(-1, keepdim=True))


def test_feeds_permutation_and_grouped_linear():
    import apex_te

    tokens = torch.randn(24, 16, requires_grad=True)
    made = router.topk_router(tokens[:, :4], 2)
    rows, row_id_map = apex_te.permutation.moe_permute(
        tokens, made.index, map_type="index", num_experts=4
    )
    experts = apex_te.GroupedLinear(4, 16, 8)
    out = apex_te.permutation.moe_unpermute(
        experts(rows, made.counts), row_id_map, made.probs, map_type="index"
    )
    out.sum().backward()
    assert out.shape == (24, 8)
    assert tokens.grad.isfinite().all()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"logits": torch.zeros(8)}, ValueError, r"logits must be \[..., experts\], got \[8\]"),
        ({"logits": torch.zeros(2, 8).double()}, TypeError, "logits must have dtype float32, "),
        ({"logits": torch.zeros(2, 1025)}, NotImplementedError, "at most 1024 experts, got 1025"),
        ({"top_k": 0}, ValueError, "top_k must be from 1 to the 8 experts, got 0"),
        ({"top_k": 9}, ValueError, "top_k must be from 1 to the 8 experts, got 9"),
        ({"score_function": "tanh"}, ValueError, "score_function must be 'softmax', 'sigmoid' or"),
        ({"score_function": "softmax", "expert_bias": torch.zeros(8)}, ValueError, "expert_bias"),
        ({"expert_bias": torch.zeros(7)}, ValueError, r"expert_bias must have shape \[8\], got"),
        ({"expert_bias": torch.zeros(8).half()}, TypeError, "expert_bias must have dtype float32"),
        ({"num_groups": 3, "group_topk": 1}, ValueError, "num_groups must divide 8 experts"),
        ({"num_groups": None, "group_topk": 1}, ValueError, "num_groups must divide 8 experts"),
        ({"num_groups": -2, "group_topk": 1}, ValueError, "num_groups must divide 8 experts"),
        ({"num_groups": 2, "group_topk": 3}, ValueError, "be at least group_topk, 3, got 2"),
        ({"num_groups": 8, "group_topk": 1}, ValueError, "top_k must be from group_topk, 1, to"),
        ({"num_groups": 4, "group_topk": 3}, ValueError, "top_k must be from group_topk, 3, to"),
        ({"logits": None}, TypeError, "logits must be a"),
    ],
)
def test_wrong_arguments(changed, error, message):
    options = {"logits": torch.zeros(4, 8), "top_k": 2, "score_function": "sigmoid", **changed}
    for function in (router.topk_router, router.topk_router_dense):
        with pytest.raises(error, match=message):
            function(**options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: router.aux_scores(torch.zeros(6, 4), 2, sequences=4), ValueError,
         "sequences must divide the 6 tokens, got 4"),
        (lambda: router.aux_scores(torch.zeros(6, 4), 5), ValueError, "from 1 to the 4 experts"),
        (lambda: router.load_balance_loss(torch.zeros(6, 4), torch.ones(3), 6, 2, 1.0), ValueError,
         r"counts must have shape \[4\] or \[sequences, 4\], got \[3\]"),
        (lambda: router.load_balance_loss(torch.zeros(6, 4), torch.ones(4, 4), 6, 2, 1.0),
         ValueError, "counts must have rows that divide the 6 tokens, got 4"),
        (lambda: router.load_balance_loss(torch.zeros(6, 4), torch.ones(4), 6, 5, 1.0), ValueError,
         "top_k must be from 1 to the 4 experts, got 5"),
        (lambda: router.router_z_loss(torch.zeros(6), 1.0), ValueError, "logits must be"),
        (lambda: router.router_z_loss(torch.zeros(6, 0), 1.0), ValueError, "0 experts"),
        (lambda: router.update_expert_bias(torch.zeros(4), torch.ones(4), 1.0), TypeError,
         "counts must have dtype int32 or int64, got torch.float32"),
        (lambda: router.update_expert_bias(torch.zeros(4), torch.ones(3).int(), 1.0), ValueError,
         r"counts must have the shape of expert_bias, \[4\], got \[3\]"),
        (lambda: router.update_expert_bias(torch.zeros(4).int(), torch.ones(4).int(), 1.0),
         TypeError, "expert_bias must have a floating dtype, got torch.int32"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_losses(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_foreign_index_is_refused():
    x, index = torch.zeros(3, 8), torch.tensor([[0], [8], [1]], dtype=torch.int32)
    with pytest.raises(ValueError, match="index must hold experts from 0 to 7, got 8"):
        op.moe_router_bwd(x, index, grad_probs=torch.ones(3, 1))


def test_one_gradient_of_all_tokens_is_that_of_each(device):
    x, row = torch.randn(20, 12, device=device), torch.randn(1, 12, device=device)
    for function in ("softmax", "sigmoid"):
        index = op.moe_router_fwd(x, 2, function, outputs=()).index
        grads = [
            op.moe_router_bwd(x, index, function, grad_scores=each)
            for each in (row, row.expand(20, 12), row.repeat(20, 1))
        ]
        assert_same_bits(grads[0], grads[2])
        assert_same_bits(grads[1], grads[2])


def test_compiled(device):
    x = torch.randn(17, 12, device=device)

    def total(x):
        made = router.topk_router(x, 3, score_function="sigmoid", num_groups=4, group_topk=2)
        aux = router.aux_scores(x, 3)
        loss = router.load_balance_loss(*aux, 17, 3, 0.1) + router.router_z_loss(x, 0.1)
        return made.probs.square().sum() + loss, made.index, made.counts

    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    results = []
    for call in (total, compiled):
        given = x.clone().requires_grad_()
        out = call(given)
        results.append([*out, torch.autograd.grad(out[0], given)[0]])
    torch.testing.assert_close(results[0], results[1])


def test_transforms(device):
    x = torch.randn(9, 12, device=device)

    def loss(x):
        return router.topk_router(x, 3).probs.square().sum() + router.router_z_loss(x, 0.1)

    given = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(given), given)
    assert_same_bits(torch.func.grad(loss)(x), expected)
    each = torch.func.vmap(torch.func.grad(loss))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(each[0], expected)


def test_second_derivatives_are_refused():
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(
        router.topk_router(x, 2).probs.square().sum(), x, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="moe_router: a second derivative"):
        grad.sum().backward()


@pytest.mark.cuda
@needs_cuda
@in_pairs(
    experts=EXPERTS, choice=["1", "8", "all"], score=list(SCORES), dtype=DTYPES,
    grouped=[False, True],
)  # fmt: skip
def test_same_bits_on_both_devices(experts, choice, score, dtype, grouped):
    """All but lse: in the same order and by the same functions."""
    function, pre = SCORES[score]
    top_k = experts if choice == "all" else min(int(choice), experts)
    groups = 8 if grouped and experts % 8 == 0 else 1
    options = {
        "use_pre_softmax": pre, "scaling_factor": 2.5, "num_groups": groups,
        "group_topk": min(top_k, groups), "sequences": 3,
    }  # fmt: skip
    logits = (2 * torch.randn(300, experts)).to(dtype)
    logits[5, :] = 1.0
    logits[6, 0] = float("nan")
    bias = None if function == "softmax" else torch.randn(experts)
    made = op.moe_router_fwd(
        logits, top_k, function, outputs=OUTPUTS, expert_bias=bias, **options
    )  # fmt: skip
    again = op.moe_router_fwd(
        logits.cuda(), top_k, function, outputs=OUTPUTS, **options,
        expert_bias=None if bias is None else bias.cuda(),
    )  # fmt: skip
    assert_same_bits([again.index, again.routing_map, again.counts],
                     [made.index, made.routing_map, made.counts])  # fmt: skip
    for name in ("probs", "dense_probs", "scores"):
        assert_same_numbers(getattr(again, name), getattr(made, name))
    torch.testing.assert_close(again.lse.cpu(), made.lse, rtol=1e-6, atol=1e-6, equal_nan=True)
    grads = {
        "grad_probs": torch.randn(300, top_k), "grad_scores": torch.randn(300, experts),
        "grad_dense_probs": torch.randn(300, experts).to(dtype), "grad_lse": torch.randn(300),
    }  # fmt: skip
    more = {"use_pre_softmax": pre, "scaling_factor": 2.5}
    expected = op.moe_router_bwd(logits, made.index, function, **grads, **more)
    actual = op.moe_router_bwd(
        logits.cuda(), again.index, function, **{k: v.cuda() for k, v in grads.items()}, **more
    )
    assert_same_numbers(actual, expected)


def assert_same_numbers(actual, expected):
    """Results are bitwise equal, except for the payload of NaNs."""
    actual, expected = actual.cpu(), expected.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bits(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.cuda
@needs_cuda
def test_many_tokens_are_counted():
    x = torch.randn(100_000, 64, device="cuda").bfloat16()
    made = router.topk_router(x, 4)
    assert torch.equal(made.counts.long(), made.index.flatten().long().bincount(minlength=64))
    aux = router.aux_scores(x, 4, sequences=10, sequence_first=True)
    own = router.aux_scores(x[3::10].contiguous(), 4)
    assert torch.equal(aux.counts[3], own.counts)


@pytest.mark.cuda
@needs_cuda
def test_an_index_out_of_range_is_passed_over_on_a_gpu():
    x = torch.randn(3, 8, device="cuda")
    index = torch.tensor([[0, 1], [8, -1], [1, 2]], dtype=torch.int32, device="cuda")
    grad = op.moe_router_bwd(x, index, "sigmoid", grad_probs=torch.ones(3, 2, device="cuda"))
    assert grad[[0, 2]].isfinite().all()
    torch.cuda.synchronize()
