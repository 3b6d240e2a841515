"""apex's ASP: masks that keep 2 of 4 weights through training, checkpoints and restoring."""

import itertools
import logging
import logging.handlers

import pytest
import torch
from torch.nn.functional import pad

import apex_te
from apex_te.integrations.apex.contrib.sparsity import ASP, asp, create_mask
from apex_te.integrations.apex.contrib.sparsity.permutation_lib import Permutation
from apex_te.integrations.apex.contrib.sparsity.sparse_masklib import fill

SILENT = {"allow_permutation": False, "verbosity": 0}


@pytest.fixture(autouse=True)
def _fresh():
    """ASP without a model, as apex's own tests make it."""
    yield
    ASP._ASP__model = ASP._ASP__optimizer = ASP._ASP__calculate_mask = None
    ASP._ASP__sparse_parameters = []


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 7),
    )  # fmt: skip


def groups_of_4(t):
    """[..., 4] of neighbouring input channels."""
    return t.movedim(1, -1).unflatten(-1, (-1, 4))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 16, 4, 4, generator=generator)
    return x, torch.randint(7, (16,), generator=generator)


def train(net, optimizer, steps, after=lambda: None):
    losses = []
    for step in steps:
        x, y = batch(step)
        loss = torch.nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_twenty_steps_as_plain_torch():
    """An unmodified program: the losses' bits of a loop that masks by hand."""
    net, plain = model(), model()
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (net, plain)]
    for m, optimizer in zip((net, plain), optimizers, strict=True):
        train(m, optimizer, range(5))
    with pytest.warns(UserWarning, match="channels are not permuted"):
        ASP.prune_trained_model(net, optimizers[0])
    weights = [plain[0].weight, plain[3].weight]
    masks = []
    for weight in weights:
        rank = groups_of_4(weight.detach().abs()).argsort(-1, descending=True).argsort(-1)
        masks.append((rank < 2).flatten(-2).movedim(-1, 1))
        weight.data.mul_(masks[-1])

    def check():
        for t in (net[0].weight, net[3].weight):
            assert (groups_of_4(t).count_nonzero(-1) <= 2).all()

    found = train(net, optimizers[0], range(5, 25), check)
    losses = []
    for step in range(5, 25):
        x, y = batch(step)
        loss = torch.nn.functional.cross_entropy(plain(x), y)
        optimizers[1].zero_grad()
        loss.backward()
        for weight, mask in zip(weights, masks, strict=True):
            weight.grad.mul_(mask)
        optimizers[1].step()
        for weight, mask in zip(weights, masks, strict=True):
            weight.data.mul_(mask)
        losses.append(loss.detach())
    assert torch.equal(found, torch.stack(losses))
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert ASP.is_sparsity_enabled()
    assert not (net[5].weight == 0).any()  # 7 rows: left dense


def test_fused_optimizer_and_device(device):
    """Masks follow the model to another device, and apex_te's optimizers call the hooks."""
    net = model()
    ASP.init_model_for_pruning(net, **SILENT)
    net = net.to(device)
    optimizer = apex_te.optimizers.FusedAdam(net.parameters(), lr=1e-2)
    ASP.init_optimizer_for_pruning(optimizer)
    assert not ASP.is_sparsity_enabled()
    ASP.compute_sparse_masks()
    for step in range(3):
        x, y = batch(step)
        torch.nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
        optimizer.step()
    assert ASP.is_sparsity_enabled()
    assert (groups_of_4(net[3].weight).count_nonzero(-1) <= 2).all()
    assert fill(net[3].weight) == 0.5


def test_checkpoint_resumes():
    """Masks are in the state dict; training goes on with the same bits in a fresh ASP."""
    runs = []
    for resumed in (False, True):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        ASP.init_model_for_pruning(net, **SILENT)
        ASP.init_optimizer_for_pruning(optimizer)
        ASP.compute_sparse_masks()
        losses = [train(net, optimizer, range(3))]
        if resumed:
            state, kept = net.state_dict(), optimizer.state_dict()
            assert state["3.__weight_mma_mask"].dtype is torch.bool
            ASP._ASP__model = ASP._ASP__optimizer = None
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            ASP.init_model_for_pruning(net, **SILENT)
            net.load_state_dict(state)
            ASP.init_optimizer_for_pruning(optimizer)
            optimizer.load_state_dict(kept)
            assert ASP.is_sparsity_enabled()
        losses.append(train(net, optimizer, range(3, 6)))
        runs.append([*losses, *net.parameters()])
        ASP._ASP__model = ASP._ASP__optimizer = None
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_restored_weights_and_new_masks():
    net = model()
    dense = net[3].weight.detach().clone()
    ASP.init_model_for_pruning(net, allow_recompute_mask=True, **SILENT)
    ASP.compute_sparse_masks()
    first = net[3].weight.detach().clone()
    assert torch.equal(first, dense * create_mask(dense))
    ASP.compute_sparse_masks()
    assert torch.equal(net[3].weight, first)
    ASP.restore_pruned_weights()
    assert torch.equal(net[3].weight, dense)
    assert not ASP.is_sparsity_enabled()
    assert not net[3].get_buffer("__weight_mma_pruned_p").any()


def test_which_weights():
    """Lists of types and names, other layers, frozen parameters, sizes that do not fit."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = torch.nn.Parameter(torch.randn(8, 16))

    class SubLinear(torch.nn.Linear):
        pass

    net = torch.nn.ModuleDict(
        {
            "a": torch.nn.Linear(16, 8), "b": SubLinear(16, 8), "own": Own(),
            "odd": torch.nn.Linear(20, 8), "frozen": torch.nn.Linear(16, 8),
            "attention": torch.nn.MultiheadAttention(16, 2), "c": torch.nn.Linear(16, 8),
        }
    )  # fmt: skip
    net["frozen"].requires_grad_(False)
    records, logger = logging.handlers.BufferingHandler(100), logging.getLogger(asp.__name__)
    logger.setLevel(logging.INFO)
    logger.addHandler(records)
    try:
        ASP.init_model_for_pruning(
            net, disallowed_layer_names=["c"], custom_layer_dict={Own: ["kernel"]},
            allow_permutation=False,
        )  # fmt: skip
    finally:
        logger.removeHandler(records)
        logger.setLevel(logging.NOTSET)
    found = {name for name in net.state_dict() if "mma_mask" in name}
    assert found == {
        "a.__weight_mma_mask", "b.__weight_mma_mask", "own.__kernel_mma_mask",
        "attention.__in_proj_weight_mma_mask", "attention.out_proj.__weight_mma_mask",
    }  # fmt: skip
    said = [record.getMessage() for record in records.buffer]
    assert "ASP: odd.weight [8, 20]: left dense" in said
    assert ASP.already_init_asp_model()


def test_own_mask():
    net = torch.nn.Linear(16, 8)
    ASP.init_model_for_pruning(net, lambda p: p > 0, **SILENT)
    ASP.compute_sparse_masks()
    assert (net.weight >= 0).all()
    with pytest.raises(RuntimeError, match="all masks must keep half of the weights, or all"):
        ASP.is_sparsity_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16,), (8, 16), (5, 16), (3, 18), (8, 16, 3), (8, 16, 3, 2)])
def test_rows(device, shape, dtype):
    """2 of each 4 input channels, the largest; left over columns are a group of their own."""
    weight = torch.randn(shape).to(dtype).to(device)
    mask = create_mask(weight)
    assert mask.dtype is dtype
    assert mask.shape == weight.shape
    last = (t[None] if t.dim() == 1 else t.movedim(1, -1) for t in (weight, mask))
    groups, kept = (pad(t, (0, -t.shape[-1] % 4)).unflatten(-1, (-1, 4)) for t in last)
    groups = groups.abs()
    best = groups.sort(dim=-1, descending=True).values[..., :2]
    assert torch.equal((groups * kept).sort(dim=-1, descending=True).values[..., :2], best)
    assert (kept.sum(-1) == 2).all()


def test_ties_keep_the_first():
    assert create_mask(torch.ones(8)).tolist() == [1, 1, 0, 0] * 2


@pytest.mark.parametrize("pattern", ["m4n2_2d_best", "m4n2_2d_greedy"])
@pytest.mark.parametrize("shape", [(8, 12), (8, 12, 3), (8, 12, 2, 3)])
def test_blocks(device, shape, pattern):
    """2 in rows and columns of 4x4; the best one is what a search of all patterns finds."""
    weight = torch.randn(shape, device=device)
    mask = create_mask(weight, pattern)
    flat = weight.reshape(8, 12, -1).movedim(2, 0).cpu()
    chosen = mask.reshape(8, 12, -1).movedim(2, 0).cpu()
    rows = [p for p in itertools.product((0.0, 1.0), repeat=4) if sum(p) == 2]
    for w, m in zip(flat, chosen, strict=True):
        for i, j in itertools.product(range(0, 8, 4), range(0, 12, 4)):
            block, kept = w[i : i + 4, j : j + 4].abs(), m[i : i + 4, j : j + 4]
            assert (kept.sum(0) <= 2).all()
            assert (kept.sum(1) <= 2).all()
            total = (block * kept).sum().item()
            if "greedy" in pattern:
                taken = torch.zeros(4, 4)
                for at in block.flatten().argsort(descending=True).tolist():
                    row, col = divmod(at, 4)
                    if taken[row].sum() < 2 and taken[:, col].sum() < 2:
                        taken[row, col] = 1
                assert torch.equal(kept, taken)
            else:
                found = torch.tensor(list(itertools.product(rows, repeat=4)))
                found = found[(found.sum(1) == 2).all(-1)]
                assert total == pytest.approx((block * found).sum((1, 2)).max().item())


def test_refuses():
    with pytest.raises(ValueError, match="pattern must be one of m4n2_1d, m4n2_2d_best"):
        create_mask(torch.ones(4, 4), "m8n4")
    with pytest.raises(ValueError, match=r"density must be 0.5, got 0.3"):
        create_mask(torch.ones(4, 4), density=0.3)
    with pytest.raises(ValueError, match="rows and columns in multiples of 4"):
        create_mask(torch.ones(4, 6), "m4n2_2d_best")
    with pytest.raises(ValueError, match="tensor must have 1 to 4 dimensions"):
        create_mask(torch.ones(1, 1, 1, 1, 4))
    with pytest.raises(RuntimeError, match="init_model_for_pruning must be called first"):
        ASP.init_optimizer_for_pruning(torch.optim.SGD([torch.ones(1)], 1.0))
    with pytest.raises(RuntimeError, match="init_model_for_pruning must be called first"):
        ASP.compute_sparse_masks()
    net = model()
    with pytest.raises(ValueError, match="whitelist must have types of"):
        ASP.init_model_for_pruning(net, whitelist=[torch.nn.LSTM])
    ASP.init_model_for_pruning(net, **SILENT)
    with pytest.raises(RuntimeError, match="ASP is already initialized"):
        ASP.init_model_for_pruning(net)
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer"):
        ASP.init_optimizer_for_pruning(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ASP.init_optimizer_for_pruning(optimizer)
    with pytest.raises(RuntimeError, match="ASP already has an optimizer"):
        ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    for method in (ASP.compute_sparse_masks, ASP.restore_pruned_weights):
        with pytest.raises(RuntimeError, match="must have had allow_recompute_mask=True"):
            method()
    with pytest.raises(NotImplementedError, match="save_permutation_graph must be False"):
        ASP.set_permutation_saving_params(save_permutation_graph=True)
    with pytest.raises(NotImplementedError, match="pass allow_permutation=False"):
        Permutation.build_offline_permutation_graph(net)
