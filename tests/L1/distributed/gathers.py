"""Models under FSDP2, whose gathers carry FP8 data or not, and what their collectives carry."""

from contextlib import contextmanager
from itertools import pairwise

import torch
from schemes import FIRST_STEP, chosen
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import apex_te
from apex_te import fp8_autocast, recipe
from apex_te.distributed.fsdp.fp8_all_gather import enable_fp8_all_gather

HIDDEN, FFN, HEADS, TOKENS, BATCH = 64, 96, 4, 8, 2


DELAYED = recipe.DelayedScaling(amax_history_len=4)


RECIPES = {"first": FIRST_STEP, **chosen("delayed", "tensorwise", "hif8", "blockwise", "rowwise")}


class Layers(torch.nn.Module):
    """Decoder layers with an output layer of a torch kind."""

    def __init__(self, dtype, device, count=2, **options):
        super().__init__()
        torch.manual_seed(5)
        kwargs = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype}
        kwargs |= {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
        kwargs |= {"device": device, "fuse_qkv_params": True, **options}
        self.layers = torch.nn.ModuleList(
            apex_te.TransformerLayer(HIDDEN, FFN, HEADS, **kwargs) for _ in range(count)
        )
        self.again = False
        self.checkpointed = False

    def forward(self, x):
        for layer in (*self.layers, *([self.layers[0]] if self.again else [])):
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


class Counts:
    """Bytes of each all-gather, and numbers reduced by MAX."""

    def __init__(self):
        self.gathered, self.reduced = [], []


@contextmanager
def counted():
    """Counts what FSDP2 gathers and what is MAX-reduced, at the collective."""
    counts, kept = Counts(), {}

    def gather(name):
        original = kept[name] = getattr(distributed, name)

        def call(output, inp, *args, **kwargs):
            counts.gathered.append(output.numel() * output.element_size())
            return original(output, inp, *args, **kwargs)

        def by_name(*args, **kwargs):
            args = (kwargs.pop("output_tensor", None), kwargs.pop("input_tensor", None), *args)
            return call(*[a for a in args if a is not None], **kwargs)

        setattr(distributed, name, by_name)

    # What FSDP2 calls has another name in torch 2.13.
    for name in ("all_gather_into_tensor", "all_gather_single"):
        if hasattr(distributed, name):
            gather(name)
    kept["all_reduce"] = distributed.all_reduce

    def reduce(tensor, *args, **kwargs):
        if kwargs.get("op") == distributed.ReduceOp.MAX:
            counts.reduced.append(tensor.numel())
        return kept["all_reduce"](tensor, *args, **kwargs)

    distributed.all_reduce = reduce
    try:
        yield counts
    finally:
        for name, original in kept.items():
            setattr(distributed, name, original)


def sharded(
    fp8, scaling, dtype, device, *, reshard=None, policy=None, offload=None, mesh=None, build=None,
    **options,
):  # fmt: skip
    model = Layers(dtype, device, **options) if build is None else build(dtype, device)
    if fp8:
        enable_fp8_all_gather(model, scaling)
    more = {} if policy is None else {"mp_policy": policy}
    if offload is not None:
        more["offload_policy"] = offload
    if mesh is not None:
        names = ("replicate", "shard")
        more["mesh"] = init_device_mesh(torch.device(device).type, mesh, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard, **more)
    return fully_shard(model, reshard_after_forward=reshard, **more)


def data(rank, step, device, dtype, micro=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x = torch.randn(TOKENS, BATCH, HIDDEN, generator=generator)
    return x.to(device, dtype)


def train(rank, model, scaling, steps, device, dtype, micro=1, lr=0.005, kind=torch.optim.AdamW):
    """Losses of each step, collectives of each step."""
    optimizer = kind(model.parameters(), lr=lr)
    losses, counts = [], []
    for step in range(steps):
        with counted() as count:
            for m in range(micro):
                model.set_requires_gradient_sync(m == micro - 1)
                x = data(rank, step, device, dtype, m)
                with fp8_autocast(True, scaling):
                    loss = (model(x).float() - 0.5 * x.float()).square().mean()
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        counts.append(count)
    return torch.stack(losses).cpu(), counts


def weights_of(model):
    return {k: v.full_tensor().cpu() for k, v in model.state_dict().items() if type(v) is DTensor}


def assert_alike(ours, theirs):
    """Compares losses and weights of a run with those of another, bit by bit."""
    (losses, weights), (others, expected) = ours, theirs
    assert torch.equal(losses, others), (losses, others)
    assert weights
    assert weights.keys() == expected.keys()
    for key, value in weights.items():
        assert torch.equal(value, expected[key]), key


class Small(torch.nn.Module):
    """Modules of the given kinds one after the other, as ``layers``."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, **more):
        for layer in self.layers:
            x = layer(x, **more)
        return x


def linears(*sizes, **options):
    def build(dtype, device):
        torch.manual_seed(2)
        kwargs = {"params_dtype": dtype, "device": device, **options}
        return Small(*[apex_te.Linear(a, b, **kwargs) for a, b in pairwise(sizes)])

    return build


def train_rows(rank, model, scaling, steps=4, features=16, **more):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, counts = [], []
    for step in range(steps):
        generator = torch.Generator().manual_seed(5 * step + rank)
        x = torch.randn(16, features, generator=generator)
        with counted() as count, fp8_autocast(True, scaling):
            loss = model(x, **more).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        counts.append(len(count.reduced))
    apex_te.flush_fp8_state()
    return torch.stack(losses), counts
