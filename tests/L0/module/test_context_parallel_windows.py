"""Windows of split sequences by the flash kernel, which a CPU's stands in for."""

import contextlib

import pytest
import torch
from checks import each_of
from emulated_ranks import emulate
from flash_stand_in import as_on_a_gpu
from test_context_parallel_padding import joined, own, results

import apex_te

HEADS, SIZE = 4, 8


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch, device):
    with as_on_a_gpu(monkeypatch) if device.type == "cpu" else contextlib.nullcontext():
        yield


@each_of(
    size=[2, 3, 4],
    window=[(3, 0), (9, 0), (40, 0), (2, 3), (0, 0)],
    batch=[1, 2],
    groups=[1, 2, HEADS],
    layout=["sbhd", "bshd"],
    sink=["vanilla", "learnable"],
)
def test_results_are_those_of_one_rank(size, window, batch, groups, layout, sink, device):
    """One packed call of both chunks if these see as many keys on each side and batch is 1."""
    tokens, dim = 16 * size, layout.index("s")
    kind = "no_mask" if window[1] else "causal"
    module = apex_te.DotProductAttention(
        HEADS, SIZE, groups, qkv_format=layout, softmax_type=sink, attn_mask_type=kind,
        window_size=window, device=device,
    )  # fmt: skip
    torch.manual_seed(0)
    shape = (tokens, batch) if dim == 0 else (batch, tokens)
    drawn = [
        torch.randn(*shape, n, SIZE, device=device).bfloat16() for n in (HEADS, groups, groups)
    ]
    grad = torch.randn(*shape, HEADS * SIZE, device=device).bfloat16()
    exact = results(module, [x.double() for x in drawn], grad.double(), None)
    one = results(module, drawn, grad, None)

    def run(ranks):
        module._context = ranks
        parts = [own(x, size, ranks.rank, dim) for x in (*drawn, grad)]
        name, _, reason = module.explain(*parts[:3]).partition(": ")
        assert name == "all_gather flash"
        if batch > 1:
            assert "in 2 pieces" in reason
        elif not window[1]:
            assert "in one packed call" in reason
        return results(module, parts[:-1], parts[-1], None)

    *found, _ = zip(*emulate(size, "all_gather", run), strict=True)
    for parts, x, y in zip(found, one, exact[:4], strict=False):
        z = joined(parts, dim).double()
        # Twice one rank's rounding: gradients of keys are sums over ranks.
        error = (x.double() - y).abs().max() + 2**-8 * y.abs().max()
        assert (z - y).abs().max() <= 2 * error
