"""from_torch(fuse=True): joined blocks, key maps both ways, and when it is refused."""

import copy
import warnings

import pytest
import torch
from huggingface_like import GPT2Model, Llama
from rounding import assert_within, named, rounding_bounds
from torch import nn
from torch.distributed import checkpoint as dc
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from apex_te import fp8_autocast
from apex_te.distributed.dtensor.parallel_styles import ColumnParallel, LayerParallel
from apex_te.integrations import conversion_summary, from_torch, key_map
from apex_te.integrations.fusion import (
    JoinedLinear,
    JoinedMLP,
    JoinedNorm,
    JoinedProjections,
    JointPart,
)
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear
from apex_te.recipe import DelayedScaling

TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}
BUILDS = {"llama": Llama, "llama with biases": lambda: Llama(bias=True), "gpt2": GPT2Model}
IDS = torch.arange(16).view(2, 8) % 24


def run(model, ids=IDS):
    model.zero_grad()
    out = model(ids.to(next(model.parameters()).device))
    out.square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def fused(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return from_torch(model, fuse=True)


@pytest.mark.parametrize("name", BUILDS)
def test_equal_outputs_and_gradients(name, device):
    model = BUILDS[name]().to(device)
    exact, bounds = rounding_bounds(model, IDS, run)
    assert fused(model) is model
    out, grads = run(model)
    assert_within(named((out, key_map(model).to_original(grads))), exact, bounds)


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", BUILDS)
def test_key_map_both_ways(name):
    model = BUILDS[name]()
    original = parameters(model)
    fused(model)
    joined, keys = parameters(model), key_map(model)
    assert joined.keys() != original.keys()
    forth, back = keys.to_fused(original), keys.to_original(joined)
    assert forth.keys() == joined.keys()
    assert all(torch.equal(forth[key], joined[key]) for key in joined)
    assert back.keys() == original.keys()
    assert all(torch.equal(back[key], original[key]) for key in original)
    assert all(value.is_contiguous() for value in back.values())


@pytest.mark.parametrize("name", BUILDS)
def test_state_dicts_have_the_original_keys(name):
    model = BUILDS[name]()
    original = {key: value.clone() for key, value in model.state_dict().items()}
    fused(model)
    state = model.state_dict()
    assert list(state) == list(original)
    assert all(torch.equal(state[key], original[key]) for key in original)
    with_grad = model.state_dict(keep_vars=True)
    assert all(value.requires_grad for value in with_grad.values())
    plain = BUILDS[name]()
    plain.load_state_dict(state, strict=True)
    for given in (plain.state_dict(), parameters(model)):  # the second: an earlier release's keys
        other = fused(BUILDS[name]())
        given = dict(given)
        given.setdefault("lm_head.weight", original["lm_head.weight"])
        other.load_state_dict(given, strict=True)
        assert torch.equal(other(IDS), model(IDS))
    assigned = fused(BUILDS[name]())
    assigned.load_state_dict(original, strict=True, assign=True)
    assert torch.equal(assigned(IDS), model(IDS))
    # Parts of the model too: those with blocks, and a block itself.
    for path in ("layers", "layers.1") if "llama" in name else ("h", "h.1"):
        part, other = model.get_submodule(path), BUILDS[name]().get_submodule(path)
        assert list(part.state_dict()) == list(other.state_dict())
        part.load_state_dict(other.state_dict(), strict=True)
        values = part.state_dict()
        assert all(torch.equal(values[key], value) for key, value in other.state_dict().items())


def test_key_map_shows_what_it_joins():
    keys = key_map(fused(Llama()))
    first = keys.entries[0]
    assert repr(keys).startswith(f"KeyMap({len(keys.entries)} joined: {first.parts[0][0]}")
    assert f" -> {first.key}" in repr(keys)


@pytest.mark.parametrize("name", BUILDS)
def test_entries_of_a_state_dict_share_memory_but_no_storage(name):
    """Writing to an entry changes the model; writers of safetensors see separate tensors."""
    model = fused(BUILDS[name]())
    state = model.state_dict()
    storages = [v.untyped_storage().data_ptr() for k, v in state.items() if k != "lm_head.weight"]
    assert len(set(storages)) == len(storages)
    for value in state.values():
        value.fill_(0.25)
    assert all((parameter == 0.25).all() for parameter in model.parameters())


def test_missing_unexpected_and_unfitting_entries_have_the_original_names():
    model = fused(Llama())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    new = Llama().state_dict()
    k, v = (f"layers.0.self_attn.{name}_proj.weight" for name in "kv")
    gate, up = (f"layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    partial = {key: value for key, value in new.items() if key not in (k, gate, up)}
    partial["layers.0.self_attn.q_proj.other"] = torch.ones(1)
    found = model.load_state_dict(partial, strict=False)
    assert sorted(found.missing_keys) == sorted([k, gate, up])
    assert found.unexpected_keys == ["layers.0.self_attn.q_proj.other"]
    after = model.state_dict()
    for key, value in before.items():
        assert torch.equal(after[key], value if key in (k, gate, up) else new[key])
    for state in ({}, {k: new[k]}):
        found = model.load_state_dict(state, strict=False)
        assert sorted(found.missing_keys) == sorted(new.keys() - state.keys())
    with pytest.raises(RuntimeError, match=f"size mismatch for {v}: .*1, 3.*16, 32"):
        model.load_state_dict({**new, v: torch.ones(1, 3)})
    with pytest.raises(RuntimeError, match=f"{v} must be a tensor, got int"):
        model.load_state_dict({**new, v: 3})


@pytest.mark.parametrize("name", BUILDS)
def test_original_names_lead_to_the_parameters(name):
    """Tools (torch.distributed.checkpoint) follow the keys of a state dict through the model."""
    model = fused(BUILDS[name]())
    for copied in (model, copy.deepcopy(model)):
        joined = {key for entry in key_map(model).entries for key, _ in entry.parts}
        for key, value in copied.state_dict().items():
            found = copied
            for part in key.split("."):
                found = getattr(found, part)
            if key in joined and not key.endswith("c_attn.weight"):
                assert torch.equal(found, value)


def test_distributed_checkpoint_state_dicts():
    model, other = fused(Llama()), fused(Llama())
    state = dcp.get_model_state_dict(model)
    assert list(state) == list(Llama().state_dict())
    dcp.set_model_state_dict(other, state)
    assert torch.equal(other(IDS), model(IDS))
    # Such a tool may hand over the model's own entries beside those that it read.
    third = fused(Llama())
    third.load_state_dict({**third.state_dict(), **parameters(third), **state}, strict=True)
    assert torch.equal(third(IDS), model(IDS))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sharded_state_dicts(name, tmp_path):
    """FSDP2 on one rank: sharded and whole state dicts have the original keys, both ways."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        expected = fused(BUILDS[name]())
        values, out = expected.state_dict(), expected(IDS)
        sharded = fully_sharded(fused(BUILDS[name]()))
        whole = dcp.StateDictOptions(full_state_dict=True)
        dcp.set_model_state_dict(sharded, dict(values), options=whole)
        full = dcp.get_model_state_dict(sharded, options=whole)
        assert list(full) == list(values)
        assert all(torch.equal(full[key], values[key]) for key in values)
        dc.save(dcp.get_model_state_dict(sharded), checkpoint_id=tmp_path)
        other = fully_sharded(fused(BUILDS[name]()))
        state = dcp.get_model_state_dict(other)
        assert all(isinstance(value, DTensor) for value in state.values())
        dc.load(state, checkpoint_id=tmp_path)
        dcp.set_model_state_dict(other, state)
        assert torch.equal(other(IDS), out)
    finally:
        torch.distributed.destroy_process_group()


def fully_sharded(model):
    mesh = init_device_mesh("cpu", (1,))  # the default would be a GPU where there is one
    for block in model.layers if hasattr(model, "layers") else model.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_structure():
    llama, gpt2 = fused(Llama()), fused(GPT2Model())
    layer, block = llama.layers[0], gpt2.h[0]
    assert type(layer.self_attn.qkv_proj) is JoinedLinear
    assert layer.self_attn.qkv_proj.normalization == "RMSNorm"
    assert layer.self_attn.qkv_proj.out_features == 32 + 16 + 16
    assert type(layer.mlp) is JoinedMLP
    assert (layer.mlp.activation, layer.mlp.eps) == ("swiglu", 1e-5)
    assert type(layer.self_attn.o_proj) is Linear
    assert type(block.attn.c_attn) is JoinedLinear
    assert block.attn.c_attn.weight.shape == (96, 32)
    assert type(block.mlp) is JoinedMLP
    assert isinstance(block.mlp, LayerNormMLP)
    assert (block.mlp.activation, block.mlp.eps) == ("gelu", 1e-6)
    assert isinstance(block.ln_1, JoinedNorm)
    assert isinstance(block.ln_1, nn.LayerNorm)
    assert isinstance(layer.input_layernorm, JoinedNorm)
    assert isinstance(layer.self_attn.qkv_proj, LayerNormLinear)
    assert "part 1, out_features=16" in repr(layer.self_attn.k_proj)
    assert llama.lm_head.weight is llama.embed_tokens.weight


def test_parameters_that_are_not_joined_stay_the_same_objects():
    model = Llama()
    norm, down = model.layers[0].input_layernorm.weight, model.layers[0].mlp.down_proj.weight
    fused(model)
    assert model.layers[0].self_attn.qkv_proj.layer_norm_weight is norm
    assert model.layers[0].mlp.fc2_weight is down


def test_flags_modes_and_frozen_blocks_stay():
    model = Llama()
    model.layers[0].requires_grad_(False)
    model.layers[1].eval()
    fused(model)
    assert not any(p.requires_grad for p in model.layers[0].parameters())
    assert all(p.requires_grad for p in model.layers[1].parameters())
    assert all(m.training for m in model.layers[0].modules())
    assert not any(m.training for m in model.layers[1].modules())


def test_fp8_trains_and_saves():
    model = fused(Llama())
    recipe, grads = DelayedScaling(amax_history_len=4), None
    expected, _ = run(copy.deepcopy(model))
    for _ in range(2):
        with fp8_autocast(True, recipe):
            actual, grads = run(model)
    assert (actual - expected).norm() < 0.25 * expected.norm()
    assert all(grad.ne(0).any() for grad in grads.values())
    state = model.state_dict()
    assert "layers.0.self_attn.qkv_proj.fp8_state.scale_fwd" in state
    plain = [key for key in state if ".fp8_state." not in key]
    assert plain == list(Llama().state_dict())
    other = fused(Llama())
    other.load_state_dict(state, strict=True)
    with torch.no_grad(), fp8_autocast(True, recipe):
        assert torch.equal(model(IDS), other(IDS))


def test_copies_are_independent():
    model = fused(Llama())
    expected = model(IDS)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.layers[0].self_attn.qkv_proj.weight.zero_()
    torch.testing.assert_close(copied(IDS), expected, rtol=0, atol=0)
    part = copied.layers[0].self_attn.v_proj
    assert isinstance(part, JointPart)
    assert part.joint.linear is copied.layers[0].self_attn.qkv_proj
    assert key_map(copied).entries == key_map(model).entries
    assert list(copied.state_dict()) == list(Llama().state_dict())
    zeros = model.layers[0].state_dict()["self_attn.k_proj.weight"]
    copied.load_state_dict(Llama().state_dict())
    assert not torch.equal(copied(IDS), expected)
    assert not zeros.any()  # the hooks of a copy are about the copy


def test_parts_may_be_called_in_any_order_and_alone():
    attention = fused(Llama()).layers[0].self_attn
    x, y = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    whole = attention.qkv_proj(x)
    q, k, v = whole.split([32, 16, 16], -1)
    assert torch.equal(attention.v_proj(x), v)
    assert torch.equal(attention.q_proj(x), q)
    assert torch.equal(attention.q_proj(x), q)  # a second time: made again
    assert torch.equal(attention.k_proj(x), k)
    assert torch.equal(attention.k_proj(y), attention.qkv_proj(y)[..., 32:48])


def test_checkpointed_blocks():
    model = fused(Llama())
    out, grads = run(model)
    for reentrant in (False, True):
        x = model.embed_tokens(IDS)
        model.zero_grad()
        for layer in model.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        actual = model.lm_head(model.norm(x))
        actual.square().mean().backward()
        assert torch.equal(actual, out)
        assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())


def test_dropout_of_gpt2_stays():
    model = fused(GPT2Model(dropout=0.5))
    assert model.h[0].mlp.dropout.p == 0.5
    assert not torch.equal(model(IDS), model(IDS))
    model.eval()
    assert torch.equal(model(IDS), model(IDS))
    out = GPT2Model(dropout=1.0)
    x = torch.randn(2, 3, 32)
    assert fused(out).h[0].mlp(x).eq(0).all()


def test_meta():
    with torch.device("meta"):
        model = Llama()
    fused(model)
    original = Llama()
    expected = original(IDS)
    model.to_empty(device="cpu")
    model.load_state_dict(key_map(model).to_fused(original.state_dict()), strict=True)
    torch.testing.assert_close(model(IDS), expected, **TOLERANCE)


@pytest.mark.parametrize("found", [True, False])
def test_refused_once_parameters_are_in_an_optimizer(found):
    model = Llama()
    if found:
        optimizer = torch.optim.AdamW(model.layers[1].parameters())
        with pytest.raises(
            ValueError,
            match=r"fuse must be False once .* \(AdamW holds 'layers.1.self_attn.q_proj.weight'\)",
        ):
            from_torch(model, fuse=True)
        assert type(model.layers[0].self_attn.q_proj) is nn.Linear  # nothing was changed
        from_torch(model)  # one to one is possible
        del optimizer
    else:

        class Foreign:
            param_groups = [{"params": [model.norm.weight]}]  # noqa: RUF012

        for given in (Foreign(), [Foreign()]):
            with pytest.raises(ValueError, match=r"\(Foreign holds 'norm.weight'\)"):
                from_torch(model, fuse=True, optimizer=given)


def test_other_optimizers_and_those_that_died_are_no_reason():
    model = Llama()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    dead = torch.optim.SGD(model.parameters(), lr=0.1)
    dead.itself = dead  # alive until the garbage collector runs
    del dead
    from_torch(model, fuse=True, optimizer=other)
    assert type(model.layers[0].self_attn.qkv_proj) is JoinedLinear


def _hook(model):
    model.layers[0].self_attn.k_proj.register_forward_hook(lambda *a: None)


def _freeze(model):
    model.layers[0].self_attn.k_proj.weight.requires_grad_(False)


def _tie(model):
    model.layers[0].self_attn.q_proj.weight = model.layers[1].self_attn.o_proj.weight


def _dtype(model):
    model.layers[0].self_attn.k_proj.double()


def _bias(model):
    model.layers[0].self_attn.k_proj.bias = nn.Parameter(torch.zeros(16))


def _subclass(model):
    model.layers[0].self_attn.k_proj.__class__ = type("Own", (nn.Linear,), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_hook, "self_attn.k_proj is Linear, or has hooks"),
        (_freeze, "some of its parameters are frozen"),
        (_tie, "a parameter is shared"),
        (_dtype, "its parameters have several dtypes or devices"),
        (_bias, "some of its layers have a bias"),
        (_subclass, "self_attn.k_proj is Own, or has hooks"),
    ],
)
def test_blocks_that_do_not_allow_it_are_named(change, message):
    model = Llama()
    change(model)
    with pytest.warns(UserWarning, match=rf"left as they are: layers.0 \({message}\)"):
        from_torch(model, fuse=True)
    assert not hasattr(model.layers[0].self_attn, "qkv_proj")
    assert hasattr(model.layers[1].self_attn, "qkv_proj")
    assert type(model.layers[0].self_attn.q_proj) is Linear
    assert type(model.layers[0].mlp) is JoinedMLP


class _SiLUOfHalf(nn.Module):
    def forward(self, x):
        return nn.functional.silu(x) / 2


@pytest.mark.parametrize("activation", [nn.GELU(), nn.Tanh(), _SiLUOfHalf()])
@pytest.mark.parametrize(
    ("build", "path", "first"),
    [(Llama, "layers.0.mlp.act_fn", "gate_up_proj"), (GPT2Model, "h.0.mlp.act", "c_fc")],
)
def test_activations_that_layer_norm_mlp_has_not(build, path, first, activation):
    """The norm and the first layers become one; the activation and the second layer stay."""
    model = build()
    model.set_submodule(path, activation)
    expected = copy.deepcopy(model)(IDS)
    mlp = fused(model).get_submodule(path.rpartition(".")[0])
    assert type(mlp.get_submodule(first)) is JoinedLinear
    assert model.get_submodule(path) is activation
    torch.testing.assert_close(model(IDS), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("activation", "name"), [(nn.ReLU(), "relu"), (nn.GELU(approximate="tanh"), "gelu")]
)
def test_other_activations_of_gpt2(activation, name):
    model = GPT2Model()
    for block in model.h:
        block.mlp.act = activation
    expected = copy.deepcopy(model)(IDS)
    fused(model)
    assert model.h[0].mlp.activation == name
    torch.testing.assert_close(model(IDS), expected, **TOLERANCE)


def test_llama_block_with_another_norm():
    model = Llama()
    model.layers[0].input_layernorm = nn.LayerNorm(32)
    expected = copy.deepcopy(model)(IDS)
    fused(model)
    assert model.layers[0].self_attn.qkv_proj.normalization == "LayerNorm"
    torch.testing.assert_close(model(IDS), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.LayerNorm(32, bias=False), "it lacks a weight or a bias"),
        (nn.LayerNorm(32, elementwise_affine=False), "it lacks a weight or a bias"),
        (type("Own", (nn.LayerNorm,), {})(32), "Own is not known"),
    ],
)
def test_norms_that_no_layer_can_have_stay_apart(norm, reason):
    """The projections are joined without the norm, as the summary says."""
    model = Llama()
    model.layers[0].input_layernorm = norm
    expected = copy.deepcopy(model)(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a subclass of a norm is not converted
        from_torch(model, fuse=True)
    assert type(model.layers[0].self_attn.qkv_proj) is JoinedProjections
    kept = {layer.name: layer.reason for layer in conversion_summary(model).kept}
    assert kept["layers.0"] == f"not fused: input_layernorm, as {reason}"
    torch.testing.assert_close(model(IDS), expected, **TOLERANCE)


def test_key_map_errors():
    model = Llama()
    original = dict(model.state_dict())
    assert key_map(model).to_fused(original) == original  # nothing was joined
    fused(model)
    keys = key_map(model)
    partial = {k: v for k, v in original.items() if not k.endswith("k_proj.weight")}
    with pytest.raises(
        ValueError, match=r"must have all parts of layers.0.self_attn.qkv_proj.weig"
    ):
        keys.to_fused(partial)
    assert keys.to_fused({"norm.weight": 1}) == {"norm.weight": 1}
    with pytest.raises(ValueError, match=r"qkv_proj.weight must have 64 rows, got \[3, 3\]"):
        keys.to_original({"layers.0.self_attn.qkv_proj.weight": torch.ones(3, 3)})


@pytest.mark.long
def test_compiled_equals_eager():
    torch._dynamo.reset()
    model = fused(Llama(layers=1))
    eager, recipe = copy.deepcopy(model), DelayedScaling(amax_history_len=4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        results = []
        for call, owner in ((compiled, model), (eager, eager)):
            owner.zero_grad()
            with fp8_autocast(True, recipe):
                out = call(IDS)
            out.square().mean().backward()
            results.append([out, *(p.grad for p in owner.parameters())])
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("path", ["self_attn.qkv_proj", "mlp"])
def test_sequence_parallel_styles_are_refused(path):
    """Each rank would have a part of the gradient of the norm, which is in another module."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        layer = fused(Llama()).layers[0].get_submodule(path)
        style = LayerParallel if path == "mlp" else ColumnParallel
        with pytest.raises(NotImplementedError, match=r"sequence_parallel must be False for Join"):
            parallelize_module(layer, mesh, style(sequence_parallel=True))
        parallelize_module(layer, mesh, style())
        assert isinstance(next(layer.parameters()), DTensor)
    finally:
        torch.distributed.destroy_process_group()


def test_parametrized_joined_norm():
    """A parametrization of a joined norm's weight applies in the joined layer."""
    model = fused(Llama())
    expected = model(IDS)
    norm = model.layers[0].input_layernorm
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
    assert torch.equal(model(IDS), expected)
    with torch.no_grad():
        norm.parametrizations.weight.original.zero_()
    assert not torch.equal(model(IDS), expected)
