"""fp8_gemm against the float64 product of the decoded operands."""

import pytest
import torch
import torch.nn.functional as F
from checks import in_pairs, sqnr
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from apex_te.ops import fp8_gemm as op
from apex_te.ops import gemm_tuning
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.fp8_gemm import fp8_gemm
from apex_te.ops.gemm_common import fp8_gemm_count

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(16, 16, 16), (1, 16, 32), (48, 80, 128), (7, 5, 3), (33, 100, 57), (128, 250, 257)]


def operand(rows, cols, dtype, device):
    out = cast_transpose(torch.randn(rows, cols), torch.tensor([50.0]), dtype, columnwise=False)
    return out.rowwise.to(device), out.scale_inv.to(device)


@in_pairs(
    out_dtype=[torch.float32, torch.bfloat16, torch.float16],
    types=[(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)],
    shape=SHAPES,
    split=[False, True],
)
def test_fwd(device, poison, shape, types, out_dtype, split):
    m, n, k = shape
    (a, sa), (b, sb) = operand(m, k, types[0], device), operand(n, k, types[1], device)
    bias = torch.randn(n, device=device).to(torch.bfloat16).to(out_dtype)
    out = fp8_gemm(a, b, sa, sb, out_dtype=out_dtype, bias=bias, use_split_accumulator=split)
    assert out.dtype is out_dtype
    expected = op.reference(a.cpu(), b.cpu(), sa.cpu(), sb.cpu(), bias=bias.cpu())
    # Fast accumulation on Hopper keeps about 14 bits; the rest is the output's own rounding.
    floor = {torch.float32: 60, torch.bfloat16: 48, torch.float16: 60}[out_dtype]
    assert sqnr(expected, out) >= floor


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_accumulate(device, shape, out_dtype):
    m, n, k = shape
    (a, sa), (b, sb) = operand(m, k, E5M2, device), operand(n, k, E4M3, device)
    start = torch.randn(m, n, device=device).to(out_dtype)
    out = start.clone()
    result = fp8_gemm(a, b, sa, sb, out=out, accumulate=True, use_split_accumulator=True)
    assert result is out
    expected = op.reference(a.cpu(), b.cpu(), sa.cpu(), sb.cpu()) + start.double().cpu()
    # Tensor cores add up to 128 products at about 14 bits, also under a split accumulator.
    exact = 80 if device.type == "cpu" else 60
    assert sqnr(expected, out) >= (exact if out_dtype is torch.float32 else 48)


@in_pairs(
    out_dtype=[torch.float32, torch.bfloat16, torch.float16],
    shape=[*SHAPES, (2, 32, 0), (256, 512, 512)],
    with_bias=[False, True],
    split=[False, True],
)
def test_a_tensor_is_added_before_the_one_rounding(
    device, poison, shape, out_dtype, with_bias, split
):
    m, n, k = shape
    (a, sa), (b, sb) = operand(m, k, E4M3, device), operand(n, k, E5M2, device)
    c = (torch.randn(m, n, device=device) * max(k, 1) ** 0.5).to(out_dtype)
    kept, bias = c.clone(), None
    if with_bias:
        bias = torch.randn(n, device=device).to(torch.bfloat16).to(out_dtype)
    out = fp8_gemm(a, b, sa, sb, out_dtype=out_dtype, bias=bias, c=c, use_split_accumulator=split)
    assert out.dtype is out_dtype
    assert torch.equal(c, kept)
    cpu = None if bias is None else bias.cpu()
    expected = op.reference(a.cpu(), b.cpu(), sa.cpu(), sb.cpu(), bias=cpu, c=c.cpu())
    floor = {torch.float32: 60, torch.bfloat16: 48, torch.float16: 60}[out_dtype]
    assert sqnr(expected, out) >= floor
    apart = fp8_gemm(a, b, sa, sb, out_dtype=out_dtype, bias=bias, use_split_accumulator=split)
    if m * n > 256 and out_dtype is not torch.float32:  # one rounding instead of two
        assert sqnr(expected, out) > sqnr(expected, apart + c)


def test_a_tensor_to_add_may_be_misaligned(device):
    (a, sa), (b, sb) = operand(33, 64, E4M3, device), operand(48, 64, E4M3, device)
    c = torch.randn(33 * 48 + 1, device=device).bfloat16()[1:].view(33, 48)
    expected = op.reference(a.cpu(), b.cpu(), sa.cpu(), sb.cpu(), c=c.cpu())
    assert sqnr(expected, fp8_gemm(a, b, sa, sb, c=c)) >= 48


def test_a_tensor_to_add_must_fit():
    (a, sa), (b, sb) = operand(16, 32, E4M3, "cpu"), operand(8, 32, E4M3, "cpu")
    c = torch.zeros(16, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"fp8_gemm: c must have shape \[16, 8\], got \[8, 16\]"):
        fp8_gemm(a, b, sa, sb, c=c.t().contiguous())
    with pytest.raises(TypeError, match="c must have the dtype of the output"):
        fp8_gemm(a, b, sa, sb, c=c.float())
    with pytest.raises(ValueError, match="c must be None with gelu=True"):
        fp8_gemm(a, b, sa, sb, c=c, gelu=True)
    with pytest.raises(ValueError, match="c must be None with accumulate=True"):
        fp8_gemm(a, b, sa, sb, c=c, out=c.clone(), accumulate=True)
    with pytest.raises(ValueError, match="c must be contiguous"):
        fp8_gemm(a, b, sa, sb, c=torch.zeros(8, 16, dtype=torch.bfloat16).t())


@pytest.mark.cuda
@pytest.mark.parametrize("split", [False, True])
def test_equals_scaled_mm(split):
    """Accumulation adds one float32 rounding to torch's result, as both call cuBLASLt."""
    (a, sa), (b, sb) = operand(256, 512, E5M2, "cuda"), operand(128, 512, E4M3, "cuda")
    peer = torch._scaled_mm(a, b.t(), sa, sb, out_dtype=torch.float32, use_fast_accum=not split)
    out = fp8_gemm(a, b, sa, sb, out_dtype=torch.float32, use_split_accumulator=split)
    assert sqnr(peer, out) >= 100
    start = torch.randn(256, 128, device="cuda")
    out = start.clone()
    fp8_gemm(a, b, sa, sb, out=out, accumulate=True, use_split_accumulator=split)
    assert sqnr(start + peer, out) >= 100


@pytest.mark.cuda
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bound_product_has_the_bits_of_fp8_gemm(poison, with_bias, out_dtype):
    (a, sa), (b, sb) = operand(96, 128, E5M2, "cuda"), operand(64, 128, E4M3, "cuda")
    bias = torch.randn(64, device="cuda") if with_bias else None
    for split in (False, True):
        expected = fp8_gemm(
            a, b, sa, sb, out_dtype=out_dtype, bias=bias, use_split_accumulator=split
        )
        product = op.bound_product(b, sb, out_dtype, bias, split)
        out, count = torch.full_like(expected, torch.nan), fp8_gemm_count()
        for rows in (slice(0, 32), slice(32, 33), slice(33, 33), slice(33, 96)):
            part, version = out[rows], out._version
            assert product(a[rows], sa, part) is part
            assert out._version > version
        assert fp8_gemm_count() == count + 4
        for rows in (slice(0, 32), slice(32, 33), slice(33, 96)):
            alone = fp8_gemm(
                a[rows], b, sa, sb, out_dtype=out_dtype, bias=bias, use_split_accumulator=split
            )
            assert torch.equal(out[rows], alone)
        shifted = torch.full((32 * 64 + 1,), torch.nan, device="cuda", dtype=out_dtype)[1:]
        assert torch.equal(product(a[:32], sa, shifted.view(32, 64)), out[:32])
        with pytest.raises(ValueError, match="out"):
            product(a[:32], sa, out[:16])


@pytest.mark.filterwarnings("error")  # as torch warns of reading the address of a fake tensor
def test_bound_product_of_a_traced_operand():
    with FakeTensorMode():
        b = torch.empty(32, 32, dtype=E4M3, device="cuda")
        scale = torch.ones(1, device="cuda")
        assert op.bound_product(b, scale, torch.bfloat16, None, True) is None


def test_bound_product_needs_one_launch(device):
    (b, sb), (odd, _) = operand(64, 128, E4M3, device), operand(64, 120, E4M3, device)
    found = op.bound_product(b, sb, torch.bfloat16, None, True)
    assert (found is None) == (b.device.type == "cpu")
    assert op.bound_product(odd, sb, torch.bfloat16, None, True) is None
    with FlopCounterMode(display=False):  # which is to see the products
        assert op.bound_product(b, sb, torch.bfloat16, None, True) is None


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(48, 80, 128), (33, 100, 57)], ids=str)
def test_gelu_with_aux(device, poison, shape, with_bias):
    m, n, k = shape
    (a, sa), (b, sb) = operand(m, k, E4M3, device), operand(n, k, E4M3, device)
    bias = torch.randn(n, device=device).bfloat16() if with_bias else None
    out, aux = fp8_gemm(a, b, sa, sb, bias=bias, gelu=True)
    expected = op.reference(
        a.cpu(), b.cpu(), sa.cpu(), sb.cpu(), bias=None if bias is None else bias.cpu()
    )
    assert sqnr(expected, aux) >= 48
    assert sqnr(F.gelu(expected, approximate="tanh"), out) >= 42


@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 0, 16), (16, 32, 0)], ids=str)
def test_fwd_empty(device, poison, shape):
    m, n, k = shape
    (a, sa), (b, sb) = operand(m, k, E4M3, device), operand(n, k, E4M3, device)
    bias = torch.randn(n, device=device).bfloat16()
    out = fp8_gemm(a, b, sa, sb, bias=bias)
    assert torch.equal(out.cpu(), bias.cpu().expand(m, n))


def test_three_products_of_a_linear_layer(device):
    x, w, dy = torch.randn(48, 64), torch.randn(32, 64), torch.randn(48, 32)
    one = torch.ones(1, device=device)
    qx = cast_transpose(x.to(device), one * 64, E4M3)
    qw = cast_transpose(w.to(device), one * 64, E4M3)
    qd = cast_transpose(dy.to(device), one * 1024, E5M2)
    y = fp8_gemm(qx.rowwise, qw.rowwise, qx.scale_inv, qw.scale_inv)
    dx = fp8_gemm(qd.rowwise, qw.columnwise, qd.scale_inv, qw.scale_inv)
    dw = fp8_gemm(qd.columnwise, qx.columnwise, qd.scale_inv, qx.scale_inv)
    assert sqnr(x @ w.t(), y) >= 25
    assert sqnr(dy @ w, dx) >= 20
    assert sqnr(dy.t() @ x, dw) >= 20


def test_count_counts_products(device):
    (a, sa), (b, sb) = operand(16, 16, E4M3, device), operand(16, 16, E4M3, device)
    before = fp8_gemm_count()
    fp8_gemm(a, b, sa, sb)
    assert fp8_gemm_count() == before + 1


def test_rejects():
    (a, sa), (b, sb) = operand(16, 32, E4M3, "cpu"), operand(8, 32, E4M3, "cpu")
    with pytest.raises(ValueError, match=r"a and b must be \[M, K\] and \[N, K\]"):
        fp8_gemm(a, b[:, :16], sa, sb)
    with pytest.raises(ValueError, match="out must have shape"):
        fp8_gemm(a, b, sa, sb, out=torch.empty(16, 9))
    with pytest.raises(ValueError, match="out must be given with accumulate"):
        fp8_gemm(a, b, sa, sb, accumulate=True)
    with pytest.raises(ValueError, match=r"fp8_gemm: b must be contiguous, got strides \[1, 8\]"):
        fp8_gemm(a, b.t().contiguous().t(), sa, sb)


@pytest.mark.cuda
def test_e5m2_by_e5m2_is_refused():
    (a, sa), (b, sb) = operand(16, 32, E5M2, "cuda"), operand(16, 32, E5M2, "cuda")
    with pytest.raises(NotImplementedError, match="one of a and b must have dtype float8_e4m3fn"):
        fp8_gemm(a, b, sa, sb)


@pytest.mark.cuda
def test_more_shapes_than_plans_are_kept():
    """Each has its result, the first ones again after their plans were dropped."""
    (a, sa), (b, sb) = operand(6000, 32, E4M3, "cuda"), operand(16, 32, E4M3, "cuda")
    whole = fp8_gemm(a, b, sa, sb, out_dtype=torch.float32)
    for rows in (*range(1, 4500), *range(1, 100)):
        part = fp8_gemm(a[:rows], b, sa, sb, out_dtype=torch.float32)
        if rows % 97 == 1:
            torch.testing.assert_close(part, whole[:rows])


def test_tuning_table_survives_and_ignores_nonsense(tmp_path):
    path = tmp_path / "gemm" / "table.json"
    gemm_tuning._store(path, "a", 3)
    gemm_tuning._store(path, "b", 0)
    assert gemm_tuning._load(path) == {"a": 3, "b": 0}
    path.write_text('{"a": 99, "b": "x", "c": 1}')
    assert gemm_tuning._load(path) == {"c": 1}
    path.write_text("not json")
    assert gemm_tuning._load(path) == {}


class WarmingGpu:
    """A clock that launches advance: by ``cool`` ms at first, by ``hot`` ms once it is loaded."""

    def __init__(self, monkeypatch, cool, hot):
        self.cool, self.hot = cool, hot
        self.now, self.launched = 0.0, []  # seconds; (algorithm, is hot)
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.time = gpu.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return (end.time - self.time) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(gemm_tuning.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(gemm_tuning, "_loaded_at", float("-inf"))

    def launch(self, index):
        if index >= len(self.cool):
            raise NotImplementedError
        is_hot = self.now > 0.5
        self.launched.append((index, is_hot))
        self.now += (self.hot if is_hot else self.cool)[index] / 1e3


def test_algorithms_are_chosen_under_load(monkeypatch):
    gpu = WarmingGpu(monkeypatch, cool=[1.1, 1.0, 1.05, 2.0], hot=[1.35, 1.3, 1.2, 2.5])
    assert gemm_tuning._fastest(gpu.launch) == 2
    assert (3, True) not in gpu.launched  # too slow from the start
    assert gpu.now < 2.0
    first = gpu.now
    assert gemm_tuning._fastest(gpu.launch) == 2  # the GPU is warm: it need not be loaded first
    assert gpu.now - first < 1.2


def test_an_algorithm_that_gains_nothing_under_load_is_not_chosen(monkeypatch):
    gpu = WarmingGpu(monkeypatch, cool=[1.1, 1.0], hot=[1.3, 1.295])
    assert gemm_tuning._fastest(gpu.launch) == 0


def test_short_products_are_chosen_on_a_cool_gpu(monkeypatch):
    gpu = WarmingGpu(monkeypatch, cool=[0.04, 0.03], hot=[0.03, 0.04])
    assert gemm_tuning._fastest(gpu.launch) == 1
    assert len(gpu.launched) < 20


def test_no_algorithm_is_the_first(monkeypatch):
    assert gemm_tuning._fastest(WarmingGpu(monkeypatch, [], []).launch) == 0


def test_tune_refuses_blocks_of_no_length():
    with pytest.raises(ValueError, match="tune: block_seconds must be above 0, got 0"):
        op.tune([], block_seconds=0)


@pytest.mark.cuda
def test_tuned_product_is_right_and_remembered(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    # The dispatcher and the op are loaded already; only the table goes to the named cache.
    (a, sa), (b, sb) = operand(512, 256, E4M3, "cuda"), operand(384, 256, E4M3, "cuda")
    plain = fp8_gemm(a, b, sa, sb, out_dtype=torch.float32, use_split_accumulator=True)
    monkeypatch.setenv("APEX_TE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gemm_tuning, "_tables", {})
    monkeypatch.setattr(gemm_tuning, "is_active", False)
    op.tune([(512, 256, 384)])
    stored = next((tmp_path / "gemm").glob("*.json"))
    assert len(gemm_tuning._load(stored)) == 4
    tuned = fp8_gemm(a, b, sa, sb, out_dtype=torch.float32, use_split_accumulator=True)
    assert sqnr(plain, tuned) >= 60
    assert len(gemm_tuning._load(stored)) == 5
