"""torchtitan's Llama 3 debug model with FP8LinearConverter: losses, compiled code, files."""

import copy

import pytest
import titan  # noqa: F401 (before torchtitan)
import torch
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.llama3 import model_registry

from apex_te.integrations.torchtitan import FP8Linear, FP8LinearConverter
from apex_te.ops.gemm_common import fp8_gemm_count

RECIPES = ["tensorwise", "blockwise", "mxfp8"]
# A batch for each step; few of the vocabulary's ids occur, which is what there is to be learned.
IDS = torch.randint(64, (20, 2, 33), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _attention_on_a_cpu(monkeypatch):
    """Flex attention has no backward on a CPU: causal attention by PyTorch's in its place."""

    def forward(self, q, k, v, *, attention_masks=None, enable_gqa=False, **others):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)

    monkeypatch.setattr(FlexAttention, "forward", forward)


def build(*converters):
    """The debug model, made on the meta device and initialised as torchtitan's trainer does it."""
    spec = model_registry("debugmodel", converters=list(converters) or None)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(2)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def loss_of(model, ids=IDS[0]):
    positions = torch.arange(32).expand(2, -1)
    out = model(ids[:, :-1], positions=positions)
    return torch.nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())


def train(model, steps=20):
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    losses = []
    for ids in IDS[:steps]:
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_layers_that_are_converted():
    model = build(FP8LinearConverter.Config())
    names = {name for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    plain = {name for name, module in build().named_modules() if isinstance(module, Linear)}
    assert len(names) == 30
    assert plain - names == {"lm_head"}
    assert list(model.state_dict()) == list(build().state_dict())
    for (key, value), other in zip(
        model.state_dict().items(), build().state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), key
    everything = build(FP8LinearConverter.Config(filter_fqns=[]))
    assert isinstance(everything.lm_head, FP8Linear)
    few = build(FP8LinearConverter.Config(filter_fqns=["attention", "lm_head"]))
    assert not any("attention" in k for k, m in few.named_modules() if isinstance(m, FP8Linear))


@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_as_in_high_precision(recipe):
    expected = train(build())
    before = fp8_gemm_count()
    model = build(FP8LinearConverter.Config(recipe_name=recipe))
    found = train(model)
    assert fp8_gemm_count() - before == 20 * 3 * 30
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)
    assert found[-1] < found[0] - 1
    again = build(FP8LinearConverter.Config(recipe_name=recipe))
    again.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(loss_of(again), loss_of(model))


def test_blocks_compiled_and_checkpointed():
    torch._dynamo.reset()
    model = build(FP8LinearConverter.Config())
    compiled, checkpointed = copy.deepcopy(model), copy.deepcopy(model)
    for layer in compiled.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name, layer in list(checkpointed.layers.named_children()):
        checkpointed.layers.register_module(name, checkpoint_wrapper(layer))
    expected = train(model, steps=2)
    assert train(checkpointed, steps=2) == expected
    assert train(compiled, steps=2) == pytest.approx(expected, rel=1e-4)


def test_other_kinds_of_linear_layers_stay():
    converter = FP8LinearConverter.Config().build()
    config = ScaledBiasRowwiseLinear.Config(in_features=32, out_features=32, bias=True)
    assert converter.convert(config) is config
    odd = Linear.Config(in_features=32, out_features=20)
    assert converter.convert(odd) is odd
    single = converter.convert(Linear.Config(in_features=32, out_features=48, bias=True))
    layer = single.build()
    assert type(layer) is FP8Linear
    assert (layer.in_features, layer.out_features, layer.bias is None) == (32, 48, False)


def test_adapters_over_fp8():
    model = build(FP8LinearConverter.Config(), LoRAConverter.Config(rank=4, alpha=8))
    assert isinstance(model.layers["0"].feed_forward.w1, FP8Linear)
    train(model, steps=1)
    with pytest.raises(ValueError, match="must be applied before"):
        build(LoRAConverter.Config(rank=4, alpha=8), FP8LinearConverter.Config())


def test_refusals():
    with pytest.raises(ValueError, match=r"recipe_name must be one of .*, got 'delayed'"):
        FP8LinearConverter.Config(recipe_name="delayed").build()

    class Dims:
        tp = 2

    layer = FP8Linear(FP8Linear.Config(in_features=16, out_features=16))
    with pytest.raises(NotImplementedError, match=r"tensor_parallel_degree must be 1, .* got 2"):
        layer.parallelize(Dims())
