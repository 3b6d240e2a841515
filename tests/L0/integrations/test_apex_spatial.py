"""apex's bottleneck blocks and halo exchangers, over two gloo ranks, against whole images."""

import os

import pytest
import torch
import torch.multiprocessing as mp
from apex_te.compatibility.apex import _apex_nccl_allocator, nccl_p2p_cuda, peer_memory_cuda
from checks import DTYPES, assert_as_good_as_torch, assert_same_bits, needs_cuda
from torch import distributed

from apex_te.integrations.apex.contrib import bottleneck, nccl_allocator, peer_memory
from apex_te.integrations.apex.contrib.bottleneck.bottleneck import FrozenBatchNorm2d
from apex_te.integrations.apex.contrib.bottleneck.halo_exchangers import HaloPadder

needs_ranks = pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    """Convolutions in fp32, where cuDNN would compute in TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


BLOCKS = {"same": (16, 8, 16), "wider": (16, 8, 32), "strided": (16, 8, 32, 2)}


def block(kind, args, **options):
    """A block whose frozen norms are not the identity."""
    torch.manual_seed(7)
    module = kind(*args, **options)
    for norm in module.modules():
        if isinstance(norm, FrozenBatchNorm2d):
            for buffer in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                buffer.copy_(torch.rand(buffer.shape) + 0.5)
    return module


def plain(x, module, stride=1):
    """The block by torch's functions, in the dtype of x; weights are [K, C, R, S]."""
    state = {k: v.to(x.dtype) for k, v in [*module.named_parameters(), *module.named_buffers()]}

    def normed(y, name):
        mean, var, weight, bias = (
            state[f"{name}.{k}"][:, None, None]
            for k in ("running_mean", "running_var", "weight", "bias")
        )
        scale = weight * var.rsqrt()  # folded, as frozen norms are
        return y * scale + (bias - mean * scale)

    conv = torch.nn.functional.conv2d
    y = torch.relu(normed(conv(x, state["conv1.weight"], stride=stride), "bn1"))
    y = torch.relu(normed(conv(y, state["conv2.weight"], padding=1), "bn2"))
    y = normed(conv(y, state["conv3.weight"]), "bn3")
    if module.downsample is not None:
        x = normed(conv(x, state["downsample.0.weight"], stride=stride), "downsample.1")
    return torch.relu(x + y)


@pytest.mark.parametrize("nhwc", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_block(device, name, dtype, nhwc):
    """Output and, in fp32, the gradients of input and weights: ReLUs of 16 bits may flip.

    PyTorch's error is that of the layout whose convolutions err more.
    """
    args, count = BLOCKS[name], None if dtype is torch.float32 else 1
    module = block(bottleneck.Bottleneck, args).to(dtype)
    x = torch.randn(2, 16, 8, 6).to(dtype)
    results = []
    rows, last = torch.contiguous_format, torch.channels_last
    for wide, where, layout in (
        (torch.float64, "cpu", rows),
        (dtype, device, rows),
        (dtype, device, last),
    ):
        leaf = x.to(where, wide, memory_format=layout).requires_grad_()
        copy = block(bottleneck.Bottleneck, args).to(dtype)
        copy = copy.to(where, wide, memory_format=layout)
        y = plain(leaf, copy, *args[3:])
        dy = torch.ones_like(y) + torch.arange(y.shape[-1], dtype=wide, device=where)
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, *copy.parameters()], dy)])
    used = block(bottleneck.Bottleneck, args, explicit_nhwc=nhwc).to(dtype).to(device)
    to = (lambda t: t.permute(0, 2, 3, 1)) if nhwc else (lambda t: t)
    back = (lambda t: t.permute(0, 3, 1, 2)) if nhwc else (lambda t: t)
    with torch.no_grad():
        for mine, given in zip(used.parameters(), module.parameters(), strict=True):
            mine.copy_(to(given))
    leaf = to(x).to(device).requires_grad_()
    y = used(leaf)
    actual = [y, *torch.autograd.grad(y, [leaf, *used.parameters()], to(dy.to(device)))]
    found = [[back(t) for t in actual], *results]
    for a, exact, *torchs in zip(*(r[:count] for r in found), strict=True):
        errors = [(t.cpu().double() - exact).abs().max() for t in torchs]
        assert_as_good_as_torch(a, exact, torchs[errors.index(max(errors))])


def run_whole(name, x):
    """Output and gradients on one rank."""
    module = block(bottleneck.SpatialBottleneck, BLOCKS[name])
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


def exchangers(rank):
    group = distributed.new_group([0, 1])
    pool = peer_memory.PeerMemoryPool(1024, 1024)
    return {
        "gather": bottleneck.HaloExchangerAllGather([0, 1], rank, group),
        "send": bottleneck.HaloExchangerSendRecv([0, 1], rank),
        "peer": bottleneck.HaloExchangerPeer([0, 1], rank, pool, False),
    }


def _worker(rank, path):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    found = {}
    torch.manual_seed(0)
    x = torch.randn(2, 16, 8, 6)
    for exchange, halos in exchangers(rank).items():
        for name, args in BLOCKS.items():
            options = {"spatial_parallel_args": (2, rank, None, halos, 1, False)}
            module = block(bottleneck.SpatialBottleneck, args, **options)
            leaf = x.chunk(2, 2)[rank].clone().requires_grad_()
            y = module(leaf)
            y.square().sum().backward()
            found[exchange, name] = [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]
        for split in (True, False):
            for nhwc in (False, True):
                y = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5) + 1000 * rank
                found[exchange, split, nhwc] = HaloPadder(halos)(y, 2, nhwc, split)
    exchanger = peer_memory.PeerHaloExchanger1d([0, 1], rank, None, 1)
    padded = torch.full((1, 2, 5, 3), 7.0 + rank)
    exchanger(padded)
    found["in place"] = padded
    handle = nccl_p2p_cuda.init_nccl_comm(nccl_p2p_cuda.get_unique_nccl_id(1), rank, 2)
    try:
        nccl_p2p_cuda.init_nccl_comm(nccl_p2p_cuda.get_unique_nccl_id(1), 5, 2)
    except ValueError as error:
        found["refused"] = str(error)
    # A ring of two: each side's message arrives at the other side.
    left, right = torch.full((3,), 10.0 * rank), torch.full((3,), 10.0 * rank + 1)
    found["ring"] = nccl_p2p_cuda.left_right_halo_exchange(handle, 1 - rank, 1 - rank, left, right)
    top, bottom = torch.ones(2), torch.ones(2)
    ends = (rank == 0, left[:2], None, None, top, rank == 1, right[:2], None, None, bottom)
    peer_memory_cuda.push_pull_halos_1d(False, False, 1, *ends, None, None, None)
    found["push pull"] = [top, bottom]
    torch.save(found, f"{path}.{rank}")
    distributed.barrier()
    os._exit(0)  # as in tests/L0/module/test_distributed.py


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two ranks found."""
    path = os.fspath(tmp_path_factory.mktemp("ranks") / "store")
    mp.spawn(_worker, (path,), nprocs=2)
    return [torch.load(f"{path}.{rank}") for rank in range(2)]


@needs_ranks
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("exchange", ["gather", "send", "peer"])
def test_split_block_equals_a_whole_one(ranks, exchange, name):
    torch.manual_seed(0)
    whole = run_whole(name, torch.randn(2, 16, 8, 6))
    a, b = (found[exchange, name] for found in ranks)
    for part, expected in enumerate(whole):
        joined = torch.cat([a[part], b[part]], 2) if part < 2 else a[part] + b[part]
        torch.testing.assert_close(joined, expected, atol=2e-5, rtol=2e-5)


@needs_ranks
@pytest.mark.parametrize("nhwc", [False, True])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("exchange", ["gather", "send", "peer"])
def test_padding(ranks, exchange, split, nhwc):
    """Halos are the neighbour's bits, and zeros at an end."""
    dim = (1 if nhwc else 2) + (0 if split else 1)
    whole = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    zeros = torch.zeros_like(whole.narrow(dim, 0, 2))
    whole = torch.cat([zeros, whole, whole + 1000, zeros], dim)
    size = (whole.shape[dim] - 4) // 2
    for rank, found in enumerate(ranks):
        assert_same_bits(found[exchange, split, nhwc], whole.narrow(dim, rank * size, size + 4))


@needs_ranks
def test_messages(ranks):
    """Who gets what from the extensions."""
    for rank, found in enumerate(ranks):
        left, right = found["ring"]
        assert left.eq(10.0 * (1 - rank) + 1).all()
        assert right.eq(10.0 * (1 - rank)).all()
        rows = [t.unique().item() for t in found["in place"].unbind(2)]
        own, other = 7.0 + rank, 8.0 - rank
        outer = (0.0, other) if rank == 0 else (other, 0.0)
        assert rows == [outer[0], own, own, own, outer[1]]
        top, bottom = found["push pull"]
        assert top.eq(0.0 if rank == 0 else 1.0).all()
        assert bottom.eq(10.0 if rank == 0 else 0.0).all()
        assert "my_rank and num_ranks must be those of" in found["refused"]


def test_one_rank_needs_no_group(device):
    """All ends are zeros; without communication a rank gets its own halos."""
    left, right = torch.randn(2, 1, 3, 4, 5, device=device)
    alone = bottleneck.HaloExchangerAllGather([0], 0, None)
    assert alone.left_rank == alone.right_rank == -1
    swapped = bottleneck.HaloExchangerNoComm([0, 1], 0).left_right_halo_exchange(left, right)
    assert_same_bits(swapped, [right, left])
    into = [torch.empty_like(left), torch.empty_like(right)]
    bottleneck.HaloExchangerNoComm([0, 1], 0).left_right_halo_exchange(left, right, *into)
    assert_same_bits(into, [right, left])
    nccl_p2p_cuda.add_delay(10)


def test_refuses():
    for option in ({"groups": 2}, {"dilation": 2}, {"norm_func": torch.nn.BatchNorm2d}):
        with pytest.raises(NotImplementedError, match=f"Bottleneck: {next(iter(option))} must be"):
            bottleneck.Bottleneck(16, 8, 16, **option)
    with pytest.raises(ValueError, match="must have a halo exchanger for 2 ranks, got None"):
        bottleneck.SpatialBottleneck(16, 8, 16, spatial_parallel_args=(2, 0, None, None, 1, False))
    with pytest.raises(ValueError, match="rank_in_group must be 0 to 1, got 2"):
        bottleneck.HaloExchangerSendRecv([0, 1], 2)
    padder = HaloPadder(bottleneck.HaloExchangerNoComm([0, 1], 0))
    with pytest.raises(ValueError, match="half_halo must be 1 to 3"):
        padder(torch.ones(1, 1, 3, 3), 4, False, True)
    with pytest.raises(RuntimeError, match="init_process_group must be called before"):
        nccl_p2p_cuda.init_nccl_comm(nccl_p2p_cuda.get_unique_nccl_id(1), 0, 1)
    with pytest.raises(ValueError, match="handle must be one that init_nccl_comm returned"):
        nccl_p2p_cuda.left_right_halo_exchange(99, -1, -1, torch.ones(1), torch.ones(1))
    ends = (torch.ones(1), None, None, torch.ones(1))
    with pytest.raises(ValueError, match="top_zero must be True on rank 0"):
        peer_memory_cuda.push_pull_halos_1d(0, 0, 1, False, *ends, True, *ends, None, None, None)
    pool = peer_memory.PeerMemoryPool(1024, 1024)
    pool.reset()
    with pytest.raises(NotImplementedError, match=r"torch.distributed._symmetric_memory.empty"):
        pool.allocate_peer_tensors([2], torch.float32, False, True)
    for name in set(peer_memory_cuda.__all__) - {"push_pull_halos_1d"}:
        function = getattr(peer_memory_cuda, name)
        with pytest.raises(NotImplementedError, match=rf"peer_memory_cuda.{name}: raw peer memory"):
            function(*[None] * function.__code__.co_argcount)


def test_nccl_allocator_says_what_it_needs(monkeypatch):
    with pytest.raises(RuntimeError, match="must have the NCCL backend for CUDA tensors"):
        _apex_nccl_allocator.get_nccl_allocator()
    with pytest.raises(RuntimeError, match="must have the NCCL backend for CUDA tensors"):
        nccl_allocator.create_nccl_mem_pool()
    with nccl_allocator.nccl_mem(None, enabled=False):
        assert torch.ones(2).sum() == 2
    with pytest.raises(ValueError, match="device must be a CUDA device, got 'cpu'"):
        nccl_allocator.nccl_mem(None, device="cpu")
    for name in ("NCCL_NVLS_ENABLE", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"):
        monkeypatch.setenv(name, "unset")
    nccl_allocator.init()
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] == "0"


@needs_cuda
def test_nccl_pool(tmp_path):
    """Tensors of the pool are NCCL's memory, and collectives take them."""
    distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        distributed.all_reduce(torch.ones(1, device="cuda"))
        backend = distributed.group.WORLD._get_backend(torch.device("cuda"))
        if not backend.supports_tensor_alloc(torch.device("cuda", torch.cuda.current_device())):
            pytest.skip("this NCCL has no allocator")
        pool = nccl_allocator.create_nccl_mem_pool()
        with nccl_allocator.nccl_mem(pool):
            x = torch.full((1024,), 2.0, device="cuda")
        distributed.all_reduce(x)
        assert x.sum().item() == 2048
        address = x.data_ptr()
        segments = [(s["address"], s["total_size"]) for s in pool.snapshot()]
        assert any(start <= address < start + size for start, size in segments)
        backend.deregister_mem_pool(pool)
        del x, pool  # NCCL's memory must be freed before the group is destroyed
    finally:
        distributed.destroy_process_group()
