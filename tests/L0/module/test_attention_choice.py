"""The table that chooses attention's kernel, and each kernel on a GPU against float64."""

import pytest
import torch
from attention_cases import B, G, H, build, check
from checks import each_of, in_pairs, needs_cuda
from flash_stand_in import as_on_a_gpu

from apex_te.module.attention import candidates, choice, cudnn, plan
from apex_te.module.attention.candidates import CANDIDATES, Problem
from apex_te.module.attention.choice import TABLE, first_that_fits

HOPPER, AMPERE = (9, 0), (8, 0)
SIZES = [(128, 128), (256, 256), (192, 128), (64, 64)]


def problem(form="causal", sizes=(128, 128), *, queries=4096, groups=8, **more):
    given = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "batch": 2, "heads": 32}
    given |= {"groups": groups, "queries": queries, "keys": queries, "form": form, **more}
    return Problem(**given, size=sizes[0], value_size=sizes[1])


@pytest.fixture
def gpu(monkeypatch):
    """Says which GPU there is, with a cuDNN that takes what it takes on Hopper."""

    def be(capability):
        for module in (candidates, choice):
            monkeypatch.setattr(module, "nvidia_capability", lambda device: capability)
        monkeypatch.setattr(cudnn, "_asks_cudnn", lambda *heads: True)
        monkeypatch.setattr(cudnn, "_TRUSTED", range(100000))
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)

    return be


@pytest.mark.parametrize(
    ("given", "on_hopper", "before"),
    [
        ({}, "sdpa_cudnn", "sdpa"),
        ({"form": "full"}, "sdpa_cudnn", "sdpa"),
        ({"form": "full", "keys": 1000}, "sdpa_cudnn", "sdpa"),
        ({"form": "full", "keys": 300}, "sdpa", "sdpa"),
        ({"queries": 511}, "sdpa", "sdpa"),
        ({"sizes": (256, 256)}, "sdpa_cudnn", "sdpa"),
        ({"sizes": (192, 128)}, "sdpa_cudnn", "widened"),
        ({"dropout": 0.125}, "sdpa_cudnn", "sdpa"),
        ({"dropout": 0.1}, "sdpa", "sdpa"),
        ({"has_sink": True}, "sdpa_cudnn", "sdpa"),
        ({"form": "window"}, "flash", "flash"),
        ({"form": "window", "dropout": 0.1, "has_sink": True}, "flash", "flash"),
        ({"form": "window", "sizes": (192, 128)}, "widened", "widened"),
        ({"form": "packed"}, "varlen", "varlen"),
        ({"form": "packed", "sizes": (192, 128)}, "widened", "widened"),
        ({"form": "packed", "dtype": torch.float32}, "padded", "padded"),
        ({"form": "mask", "groups": 32}, "sdpa", "sdpa"),
        ({"form": "mask"}, "softmax", "softmax"),
        ({"form": "mask", "queries": 8192}, "expanded", "expanded"),
        ({"bias": "gradient", "groups": 32}, "sdpa", "sdpa"),
        ({"bias": "gradient", "groups": 32, "has_sink": True}, "softmax", "softmax"),
        ({"bias": "alone", "groups": 32}, "softmax", "softmax"),
        ({"dtype": torch.float32, "groups": 32}, "sdpa", "sdpa"),
        ({"dtype": torch.float32}, "expanded", "expanded"),
        ({"dtype": torch.float32, "bias": "gradient"}, "expanded", "expanded"),
        ({"dtype": torch.float32, "bias": "alone"}, "softmax", "softmax"),
        ({"dtype": torch.float64}, "sdpa", "sdpa"),
        ({"dtype": torch.float64, "has_sink": True}, "softmax", "softmax"),
        ({"sizes": (36, 20), "queries": 64}, "widened", "widened"),
        ({"sizes": (36, 20), "dtype": torch.float32}, "softmax", "softmax"),
    ],
    ids=str,
)
def test_choices(given, on_hopper, before, gpu):
    for capability, name in ((HOPPER, on_hopper), (AMPERE, before)):
        gpu(capability)
        assert first_that_fits(problem(**given)).name == name


@in_pairs(
    form=["full", "causal", "window", "packed"],
    sizes=SIZES,
    sink=[False, True],
    dropout=[0.0, 0.1],
    queries=[1, 4096],
    capability=[HOPPER, AMPERE],
)
def test_deterministic_mode_keeps_the_flash_kernel(
    form, sizes, sink, dropout, queries, capability, gpu
):
    gpu(capability)
    given = {"has_sink": sink, "dropout": dropout, "deterministic": True, "queries": queries}
    path = first_that_fits(problem(form, sizes, **given))
    assert (path.rest or path).kernel == "flash"
    assert "use_deterministic" not in path.reason or capability == HOPPER


def test_reasons(gpu):
    gpu(HOPPER)
    path = first_that_fits(problem(deterministic=True, has_sink=True))
    assert path.reason == (
        "PyTorch's flash kernel (torch.use_deterministic_algorithms is on, for which PyTorch "
        "refuses cuDNN's kernel); the softmax sink rescales its output"
    )
    path = first_that_fits(problem("mask", groups=32, deterministic=True))
    assert path.reason.startswith("torch.use_deterministic_algorithms is on, and only the flash")


def test_each_kernel_is_in_a_row_and_each_problem_too(gpu):
    """The last kernel of a row takes everything, so that there always is one."""
    assert {name for row in TABLE for name in row.kernels} == set(CANDIDATES)
    for row in TABLE:
        for form in row.forms:
            anything = problem(form, (7, 3), bias="gradient", dtype=torch.float64)
            assert CANDIDATES[row.kernels[-1]].obstacle(anything) is None
    for capability in (HOPPER, AMPERE):
        gpu(capability)
        for form in ("full", "causal", "window", "mask", "packed"):
            for bias in ("none", "constant", "gradient", "alone"):
                for device in ("cuda", "cpu", "meta"):
                    each = problem(form, bias=bias)._replace(device=torch.device(device))
                    assert any(row.has(each) for row in TABLE)
                    if form != "packed":
                        each = each._replace(independent_rows=True)
                        names = ("sdpa_efficient", "blocks")
                        assert first_that_fits(each).name in names


class TestSelfCheck:
    HEADS = (64, 32, torch.bfloat16, torch.device("cpu"))

    @pytest.fixture(autouse=True)
    def _anew(self, monkeypatch):
        monkeypatch.setattr(cudnn, "_checked", {})

    def version(self, monkeypatch, number):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)

    @pytest.mark.parametrize("causal", [False, True])
    def test_compares_with_plain_maths(self, causal, monkeypatch):
        """The CPU's kernel stands for cuDNN's: right, or with another output, gradient or NaN."""
        heads = (64, 64, *self.HEADS[2:], causal, torch.nn.attention.SDPBackend.FLASH_ATTENTION)
        before = torch.get_rng_state()
        with torch.inference_mode():
            assert cudnn._agrees(*heads)
        assert torch.equal(torch.get_rng_state(), before)
        right = torch.nn.functional.scaled_dot_product_attention
        at = torch.tensor([519])
        for fault in (
            lambda q, k, v, **more: right(q, k, v, **more) * 1.1,
            lambda q, k, v, **more: right(q, k * 1.2 - k.detach() * 0.2, v, **more),
            lambda q, k, v, **more: right(q, k, v, **more).index_fill(2, at, torch.nan),
        ):

            def attend(q, k, v, *, fault=fault, **more):
                return (right if q.dtype is torch.float32 else fault)(q, k, v, **more)

            monkeypatch.setattr(cudnn.functional, "scaled_dot_product_attention", attend)
            assert not cudnn._agrees(*heads)

    def test_versions(self, monkeypatch):
        """Those without known faults are not asked; others once for each kind of heads."""
        asked = []
        monkeypatch.setattr(cudnn, "_agrees", lambda *heads: asked.append(heads) or False)
        for number, trusted in ((91001, False), (91500, False), (91900, True), (92000, True),
                                (92100, False), (92600, False)):  # fmt: skip
            self.version(monkeypatch, number)
            cudnn._checked.clear()
            asked.clear()
            found = [cudnn.cudnn_is_right(*self.HEADS, "causal") for _ in range(2)]
            assert found == [trusted] * 2
            assert len(asked) == (not trusted)

    def test_a_wrong_one_is_not_taken(self, gpu, monkeypatch):
        gpu(HOPPER)
        monkeypatch.setattr(candidates, "cudnn_is_right", lambda *heads: False)
        path = first_that_fits(problem())
        assert path.name == "sdpa"
        assert path.reason.endswith("(this cuDNN's results differ from those of plain maths)")

    def test_an_old_one_does_not_drop(self, gpu, monkeypatch):
        """Which the comparison, without dropout, cannot tell."""
        gpu(HOPPER)
        for number, name in ((91300, "sdpa"), (91900, "sdpa_cudnn")):
            self.version(monkeypatch, number)
            monkeypatch.setattr(cudnn, "_TRUSTED", range(91501, 92100))
            monkeypatch.setattr(candidates, "cudnn_is_right", lambda *heads: True)
            assert first_that_fits(problem()).name == "sdpa_cudnn"
            assert first_that_fits(problem(dropout=0.125)).name == name


# Longer ones on a GPU, where cuDNN is not taken for few.
LENGTHS = {
    "cpu": [(40, 40), (7, 40), (20, 9), (24, 33)],
    "cuda": [(520, 520), (65, 520), (130, 65), (531, 1033)],
}


@each_of(
    form=["full", "causal", "bottom_right", "window", "both sides", "mask", "padding"],
    sizes=[*SIZES, (24, 16)],
    groups=[1, G, H],
    lengths=range(4),
    bias=[False, True],
)
def test_each_kernel_that_fits(form, sizes, groups, lengths, bias, device, monkeypatch):
    """All that the table may name for a problem, output and gradients; queries without keys too.

    On a CPU with a flash kernel that stands in for the GPU's, and the CPU's for others.
    """
    if device.type == "cuda":
        _check_each_kernel(form, sizes, groups, lengths, bias, device, monkeypatch)
        return
    with as_on_a_gpu(monkeypatch):
        _check_each_kernel(form, sizes, groups, lengths, bias, device, monkeypatch)


def _check_each_kernel(form, sizes, groups, lengths, bias, device, monkeypatch):
    queries, keys = LENGTHS[device.type][lengths]
    window = {"window": (keys // 5, 0), "both sides": (3, keys // 8)}.get(form)
    kind = {
        "causal": "causal", "bottom_right": "causal_bottom_right", "mask": "arbitrary",
        "padding": "padding_causal_bottom_right",
    }.get(form, "no_mask")  # fmt: skip
    shapes = ((H, queries, sizes[0]), (groups, keys, sizes[0]), (groups, keys, sizes[1]))
    inputs = [torch.randn(B, *shape).bfloat16() for shape in shapes]
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    apart = torch.arange(keys) - torch.arange(queries)[:, None]
    offset = 0 if kind == "causal" else keys - queries
    if "causal" in kind:
        hidden |= apart > offset
    if window:
        hidden |= (apart < offset - window[0]) | (apart > offset + window[1])
    hidden, mask = hidden.expand(B, 1, -1, -1), None
    if form == "mask":
        mask = torch.rand(B, 1, queries, keys) < 0.4
        mask[0, :, 1] = True
        hidden = hidden | mask
    elif form == "padding":
        lengths = [(queries, keys - 9), (queries - 7, 3)]
        mask = tuple(
            torch.arange(n) >= torch.tensor([each[i] for each in lengths])[:, None, None, None]
            for i, n in enumerate((queries, keys))
        )
        ends = torch.tensor(lengths)
        later = apart > (ends[:, 1] - ends[:, 0])[:, None, None, None]
        hidden = later | mask[0].mT | mask[1]
    added = torch.randn(1, H, queries, keys) if bias else None
    module = build(device, H, sizes, groups, attn_mask_type=kind, window_size=window)
    taken, chosen = [], plan.choose

    def forced(q, k, v, seen, bias, options):
        first = chosen(q, k, v, seen, bias, options)
        found = Problem.of(q, k, v, seen, bias, options)
        if not taken:
            row = next(row for row in TABLE if row.has(found))
            taken.extend(
                n for n in row.kernels if CANDIDATES[n].obstacle(found) is None and n != "padded"
            )
        path = CANDIDATES[taken[0]].path
        return first._replace(rest=path) if seen.packed is not None else path

    monkeypatch.setattr(plan, "choose", forced)
    monkeypatch.setattr(candidates, "MANY_SCORES", 0)
    check(module, inputs, hidden, "bshd", mask=mask, bias=added)
    while len(taken) > 1:
        taken.pop(0)
        check(module, inputs, hidden, "bshd", mask=mask, bias=added)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", ["causal", "window", "padding_causal", "padding", "thd"])
def test_deterministic_mode_repeats_bits(sizes, form):
    fmt = "thd" if form == "thd" else "bshd"
    kind = form if "padding" in form else "causal"
    module = build(torch.device("cuda"), H, sizes, G, attn_mask_type=kind, qkv_format=fmt,
                   window_size=(300, 0) if form == "window" else None)  # fmt: skip
    shape = (2048,) if fmt == "thd" else (2, 1024)
    inputs = [
        torch.randn(*shape, n, size, device="cuda").bfloat16().requires_grad_()
        for n, size in ((H, sizes[0]), (G, sizes[0]), (G, sizes[1]))
    ]
    given = {}
    if fmt == "thd":
        cu = torch.tensor([0, 700, 2000], dtype=torch.int32, device="cuda")
        given = {"cu_seqlens_q": cu, "max_seqlen_q": 1300}
    elif "padding" in kind:
        given = {"attention_mask": torch.rand(2, 1, 1, 1024, device="cuda") < 0.2}
    torch.use_deterministic_algorithms(True)
    try:
        assert not module.explain(*inputs, **given).startswith("softmax")
        runs = []
        for _ in range(20):
            out = module(*inputs, **given)
            runs.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", ["cudnn", "flash", "windowed", "efficient"])
def test_kernels_drop_in_backward_what_they_dropped(name, monkeypatch):
    """Values of a unit matrix show the weights, and so what was dropped."""
    size = 128
    window = (127, 0) if name == "windowed" else None
    module = build(torch.device("cuda"), 1, size, qkv_format="bshd", window_size=window)
    module.attention_dropout = 0.125
    q, k = (torch.randn(4, 512, 1, size, device="cuda").bfloat16() for _ in range(2))
    v = torch.eye(size).repeat(4, 1)[:, None].cuda().bfloat16().expand(4, -1, -1, -1).contiguous()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    monkeypatch.setattr(plan, "choose", lambda *args: CANDIDATES[name].path)
    torch.manual_seed(1)
    out = module(q, k, v)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    first = out.detach()[:, :size].float()  # which see each value once
    visible = torch.ones(size, size, dtype=torch.bool, device="cuda").tril()
    dropped = (first == 0) & visible
    assert abs(dropped.sum() / (4 * visible.sum()) - 0.125) < 0.02
    leaves = [x.detach()[:, :size].double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bqk", leaves[0], leaves[1]) * size**-0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1) * ~dropped / 0.875
    exact = weights @ leaves[2][:, :, 0]
    error = (first.double() - exact).norm() / exact.norm()
    assert error < 1e-2
    (dq,) = torch.autograd.grad(exact, leaves[0], grad[:, :size].double())
    assert (found[0][:, :size].double() - dq).norm() / dq.norm() < 2e-2
