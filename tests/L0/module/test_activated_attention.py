"""Flash kernels that a user has activated through torch's registry, of which a stub stands here."""

from types import SimpleNamespace

import pytest
import torch

from apex_te.module.attention import backends, candidates, choice
from apex_te.module.attention.candidates import CANDIDATES, Options
from apex_te.module.attention.choice import choose
from apex_te.module.attention.dot_product import DotProductAttention
from apex_te.module.attention.masks import Visibility

attention = pytest.importorskip("torch.nn.attention")
pytestmark = pytest.mark.skipif(
    not hasattr(attention, "activate_flash_attention_impl"),
    reason="this torch has no registry of flash kernels",
)


@pytest.fixture
def activated():
    """Activates a stub, which replaces no kernel, for the duration of a test."""
    handle = SimpleNamespace(remove=lambda: None)
    attention.register_flash_attention_impl("stub", register_fn=lambda: handle)
    attention.activate_flash_attention_impl("stub")
    yield
    attention.restore_flash_attention_impl()
    attention._registry._FLASH_ATTENTION_IMPLS.pop("stub")


@pytest.fixture
def on_hopper(monkeypatch):
    for module in (candidates, choice):
        monkeypatch.setattr(module, "nvidia_capability", lambda device: (9, 0))
    monkeypatch.setattr(candidates, "cudnn_is_right", lambda *heads: True)


def heads(queries=1024, size=128, dtype=torch.bfloat16, groups=2):
    """Shapes of q, k and v that say they are on a GPU."""
    shapes = ((2, 4, queries, size), (2, groups, queries, size), (2, groups, queries, size))
    return [
        SimpleNamespace(shape=shape, dtype=dtype, is_cuda=True, device=torch.device("cuda"))
        for shape in shapes
    ]


def visible(causal="upper_left", hidden=None):
    return Visibility(causal, hidden)


def chosen(dropout=0.0, seen=None, **options):
    return choose(*heads(**options), seen or visible(), None, Options(0.1, dropout))


def test_an_activated_kernel_is_taken(on_hopper, activated):
    assert chosen().name == "sdpa_flash"
    assert "activate_flash_attention_impl" in chosen().reason
    assert chosen(queries=16).name == "sdpa_flash"


def test_cudnn_stays_without_one(on_hopper):
    assert chosen().name == "sdpa_cudnn"
    assert chosen(queries=16).name == "sdpa"


@pytest.mark.parametrize(
    "options",
    [{"dropout": 0.1}, {"dtype": torch.float32, "groups": 4}, {"seen": "masked"}],
    ids=str,
)
def test_what_an_activated_kernel_cannot_do_is_left_alone(on_hopper, activated, options):
    if options.get("seen"):
        options = {"seen": visible(None, torch.ones(1, dtype=torch.bool)), "groups": 4}
    assert chosen(**options).name != "sdpa_flash"


def test_it_is_asked_for_at_each_call(on_hopper, activated):
    attention.restore_flash_attention_impl()
    assert chosen().name == "sdpa_cudnn"
    attention.activate_flash_attention_impl("stub")
    assert chosen().name == "sdpa_flash"


def test_the_path_attends(activated):
    """The kernels of the path, with the CPU's flash kernel first, give the usual result."""
    q = torch.randn(2, 4, 16, 32)
    seen, options = visible(), Options(32**-0.5)
    out = backends.attend(q, q, q, None, CANDIDATES["activated"].path, seen, options)
    torch.testing.assert_close(
        out, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    )


def test_cpus_are_not_concerned(activated):
    module = DotProductAttention(2, 32)
    x = torch.randn(8, 2, 2, 32)
    assert module.explain(x, x, x).startswith("sdpa: PyTorch's fused kernel for CPUs")


def test_former_torches_have_none(on_hopper, monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "current_flash_attention_impl")
    assert chosen().name == "sdpa_cudnn"
