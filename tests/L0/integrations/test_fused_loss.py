"""fuse_loss: loss and gradients of transformers' models without their logits."""

import copy
import math
import operator
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from families import FAMILIES, IDS, VOCABULARY, build
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import apex_te
from apex_te.integrations import autocast_forward, from_torch, fuse_loss
from apex_te.integrations.lazy_logits import LazyLogits
from apex_te.recipe import CurrentScaling

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

CAUSAL = sorted(
    name for name, (_, kind, _) in FAMILIES.items() if "CausalLM" in kind or "LMHead" in kind
)
CAPPED = {"gemma2"}  # whose logits go through a soft cap before the loss
LABELS = IDS.clone()
LABELS[0, :5] = -100
CLOSE = {"rtol": 2e-5, "atol": 1e-6}  # another order of sums


def step(model, **given):
    """Loss and gradients of a step."""
    given = {"input_ids": IDS, "labels": LABELS, **given}
    out = model.train()(**{key: _moved(value, model) for key, value in given.items()})
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out, {"loss": out.loss.detach(), **grads}


def _moved(value, model):
    return value.to(model.device) if isinstance(value, torch.Tensor) else value


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], **{**CLOSE, **tolerance}, msg=name)


class Largest(TorchDispatchMode):
    """Notes the most rows of results whose last dimension is the vocabulary."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.dim() and one.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, one.numel() // VOCABULARY)
        return result


@pytest.mark.parametrize("name", CAUSAL)
def test_families_have_the_loss_and_gradients_of_before(name, device):
    plain = build(name).to(device)
    fused = copy.deepcopy(plain)
    fuse_loss(fused, chunk_rows=8)
    out, expected = step(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if name not in CAPPED else "ignore")
        lazy, found = step(fused)
    tolerance = {} if device == "cpu" else {"rtol": 1e-3, "atol": 1e-5}
    assert_same(found, expected, **tolerance)
    assert isinstance(lazy.logits, LazyLogits) == (name not in CAPPED)
    torch.testing.assert_close(torch.as_tensor(lazy.logits + 0), out.logits)
    with torch.no_grad():
        assert torch.equal(fused.eval()(IDS.to(device)).logits, plain.eval()(IDS.to(device)).logits)


def test_no_logits_are_in_memory():
    model, ids = build("llama"), IDS.repeat(4, 1)
    with Largest() as plain:
        step(model, input_ids=ids, labels=ids)
    fuse_loss(model, chunk_rows=8)
    with Largest() as fused:
        step(model, input_ids=ids, labels=ids)
    assert plain.rows == ids.numel()
    assert fused.rows == model.config.hidden_size < ids.numel()  # the head's weight, transposed


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "given",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"shift_labels": IDS.roll(3, 1)},
        {"ignore_index": 5},
        {"attention_mask": (torch.arange(12) < 9).repeat(2, 1)},
        {"labels": torch.full_like(IDS, -100), "num_items_in_batch": 3},
        {"labels": torch.full_like(IDS, -100), "num_items_in_batch": torch.tensor(0)},
        {"labels": torch.full_like(IDS, -100)},
    ],
    ids=lambda given: "-".join(given),
)
def test_arguments_of_the_loss(name, given):
    model = build(name)
    given = {"labels": IDS, **given} if "ignore_index" in given else given
    _, expected = step(model, **given)
    fuse_loss(model, chunk_rows=8)
    out, found = step(model, **given)
    assert isinstance(out.logits, LazyLogits)
    assert all(grad.isfinite().all() for key, grad in found.items() if key != "loss")
    assert_same(found, expected, equal_nan=True)


def test_logits_are_computed_when_used():
    model = build("llama")
    expected = model.train()(IDS, labels=LABELS).logits
    fuse_loss(model)
    out = model(IDS, labels=LABELS)
    lazy = out.logits
    assert lazy.is_unused
    assert (lazy.shape, lazy.dtype, lazy.device) == (expected.shape, torch.float32, IDS.device)
    assert lazy.is_unused
    assert repr(lazy) == "LazyLogits([2, 12, 40], torch.float32, cpu, not computed)"
    with torch.no_grad():
        assert torch.equal(lazy[..., :-1, :], expected[..., :-1, :])
    assert not lazy.is_unused
    torch.softmax(lazy, -1).square().sum().backward()  # the graph is there, too
    found = model.lm_head.weight.grad.clone()
    model.zero_grad()
    torch.softmax(expected, -1).square().sum().backward()
    assert torch.equal(found, model.lm_head.weight.grad)
    model.zero_grad()
    assert torch.equal(torch.cat([lazy, lazy]), torch.cat([expected, expected]))
    assert torch.equal(2 * lazy, 2 * expected)
    assert lazy.argmax(-1).equal(expected.argmax(-1))
    assert torch.equal(pickle.loads(pickle.dumps(lazy.detach())), expected)
    out = model(IDS, labels=LABELS)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    with pytest.raises(RuntimeError, match="must be used before the head's weight changes"):
        out.logits.sum()


def fused(name):
    """A model in training with its loss fused."""
    model = build(name).train()
    fuse_loss(model)
    return model


def lazy_and_plain():
    """Logits of a fused model and of a plain one."""
    models = fused("llama"), build("llama").train()
    return tuple(one(IDS, labels=LABELS).logits for one in models)


@pytest.mark.parametrize("used", [torch.no_grad, torch.inference_mode])
def test_logits_have_the_graph_of_their_forward_wherever_they_are_used(used):
    lazy, plain = lazy_and_plain()
    with used():
        assert torch.equal(lazy.argmax(-1), plain.argmax(-1))
        assert lazy.requires_grad
    with torch.no_grad():
        for one in (lazy, plain):
            one[..., :9] = -5.0  # stays, in a tensor that still has a graph
    assert torch.equal(lazy.detach(), plain.detach())
    lazy.sum().backward()
    with used():
        lazy, plain = lazy_and_plain()
    assert not lazy.requires_grad
    assert (lazy.numpy() == plain.numpy()).all()


@pytest.mark.parametrize(
    "write",
    [
        lambda x: operator.imul(x, 2),
        lambda x: operator.ipow(x, 2),
        lambda x: x.detach_() is None or x,
        lambda x: setattr(x, "data", torch.ones(2, 12, 40)) or x,
    ],
)
def test_writes_to_the_logits_go_to_their_tensor(write):
    lazy, plain = lazy_and_plain()
    others = lazy, plain
    assert write(lazy) is lazy
    write(plain)
    assert torch.equal(others[0].detach(), others[1].detach())
    assert lazy.requires_grad == plain.requires_grad
    assert isinstance(np.float32(2) * lazy.detach(), torch.Tensor)
    assert isinstance(np.float32(2) * lazy, torch.Tensor)


def test_logits_in_fp32_are_not_computed_either():
    lazy, plain = (
        one.bfloat16()(IDS, labels=LABELS).logits for one in (fused("llama"), build("llama"))
    )
    wide = lazy.float()
    assert (lazy.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert lazy.is_unused
    assert wide.is_unused
    assert wide.float() is wide
    lazy.mul_(2)  # another tensor
    assert torch.equal(wide.detach(), plain.float().detach())
    assert torch.equal(lazy.float().detach(), 2 * plain.float().detach())


@pytest.mark.parametrize("source", ["input", "weight", "bias", "fused optimizer", "dtype"])
def test_logits_whose_sources_have_changed_are_refused(source):
    model = build("llama").train()
    model.lm_head = torch.nn.Linear(32, VOCABULARY)
    fuse_loss(model)
    out = model(IDS, labels=LABELS, output_hidden_states=True)
    with torch.no_grad():
        if source == "input":
            out.hidden_states[-1].mul_(2)
        elif source == "fused optimizer":  # whose kernels leave versions as they are
            out.loss.backward()
            torch.optim.AdamW(model.parameters(), fused=True).step()
        elif source == "dtype":
            model.bfloat16()
        else:
            getattr(model.lm_head, source).add_(1)
    name = source if source in ("input", "bias") else "weight"
    with pytest.raises(RuntimeError, match=f"must be used before the head's {name} changes"):
        out.logits.sum()


def test_functional_calls_have_logits_of_their_weights():
    model, plain = fused("llama"), build("llama").train()
    halved = {key: value.detach() / 2 for key, value in model.named_parameters()}
    lazy, expected = (
        torch.func.functional_call(one, halved, (IDS,), {"labels": LABELS})
        for one in (model, plain)
    )
    torch.testing.assert_close(lazy.loss, expected.loss, **CLOSE)
    assert torch.equal(lazy.logits.compute(), expected.logits)


def test_labels_may_be_positional():
    model = fused("llama")
    assert isinstance(model(IDS, None, None, None, None, LABELS).logits, LazyLogits)
    assert isinstance(model(IDS, None, None, None, None, None).logits, torch.Tensor)


def test_forwards_of_two_threads_at_a_time():
    """The second begins while the first runs, and ends last."""
    model = fused("llama")
    with torch.no_grad():
        expected = build("llama").train()(IDS, labels=LABELS).loss
    both, ended, found = threading.Barrier(2), threading.Event(), []
    inner = type(model.model).forward

    def forward(*args, **kwargs):
        if threading.current_thread() is first:
            second.start()
        both.wait(10)
        if threading.current_thread() is second:
            ended.wait(10)
        return inner(model.model, *args, **kwargs)

    def run():
        found.append(model(IDS, labels=LABELS))
        ended.set()

    first, second = (threading.Thread(target=run) for _ in range(2))
    model.model.forward = forward
    first.start()
    first.join()
    second.join()
    del model.model.forward
    for out in found:
        torch.testing.assert_close(out.loss, expected, **CLOSE)
        assert isinstance(out.logits, LazyLogits)
    assert len(found) == 2
    assert "forward" not in vars(model.lm_head)
    assert model.loss_function.__name__ == "ForCausalLMLoss"
    assert isinstance(model.eval()(IDS).logits, torch.Tensor)


def test_float64_runs_as_before():
    model = build("llama", torch.float64)
    _, expected = step(model)
    fuse_loss(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found = step(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_change_of_the_logits_is_in_the_loss():
    class Changed(type(build("llama"))):
        def get_output_embeddings(self):
            return self.lm_head

        def forward(self, input_ids, labels=None):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            logits[..., :9] = -5.0
            loss = self.loss_function(logits, labels, VOCABULARY)
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    model = Changed(build("llama").config)
    _, expected = step(model)
    fuse_loss(model)
    with pytest.warns(UserWarning, match="Changed uses logits before its loss"):
        _, found = step(model)
    assert_same(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        step(model)


@pytest.mark.parametrize("first", ["region", "loss"])
def test_in_fp8_regions(first):
    model, plain = (from_torch(build("llama")) for _ in range(2))
    recipe = CurrentScaling()
    autocast_forward(plain, recipe)
    made = []
    for which in ("region", "loss") if first == "region" else ("loss", "region"):
        made.append(autocast_forward(model, recipe) if which == "region" else fuse_loss(model))
    _, expected = step(plain)
    out, found = step(model)
    assert isinstance(out.logits, LazyLogits)
    assert_same(found, expected)
    for handle in made:
        handle.remove()
    for handle in made:
        handle.remove()
    assert "forward" not in vars(model)


def test_a_head_in_fp8_stays_one():
    model, plain = (from_torch(build("llama"), include="*") for _ in range(2))
    for one in (model, plain):
        autocast_forward(one, CurrentScaling())
    fuse_loss(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (out, found), (_, expected) = step(model), step(plain)
    assert isinstance(out.logits, torch.Tensor)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_head_multiplies_in_fp8_if_asked_to():
    model = build("llama")
    _, expected = step(model)
    fuse_loss(model, fp8_recipe="tensorwise")
    _, found = step(model)
    assert not torch.equal(found["lm_head.weight"], expected["lm_head.weight"])
    assert_same(found, expected, rtol=0.1, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    model = build("llama")
    fused = copy.deepcopy(model)
    fuse_loss(fused)
    with torch.autocast("cpu", dtype=dtype):
        out, lazy = (one.train()(IDS, labels=LABELS) for one in (model, fused))
    torch.testing.assert_close(lazy.loss, out.loss, rtol=1e-2, atol=0)
    assert lazy.logits.dtype is dtype
    assert torch.equal(lazy.logits.compute(), out.logits)


def test_copies_and_pickles_have_it_and_their_own_weights():
    model = build("llama")
    fuse_loss(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.lm_head.weight.zero_()
        out, found = step(other)
        assert isinstance(out.logits, LazyLogits)
        assert found["loss"].item() == pytest.approx(math.log(VOCABULARY))
        assert step(model)[1]["loss"] != found["loss"]


def test_a_recomputed_model_and_two_losses():
    model = build("llama")
    _, expected = step(model)
    fuse_loss(model, chunk_rows=8)
    loss = checkpoint(lambda: model(IDS, labels=LABELS).loss, use_reentrant=False)
    loss.backward()
    (2 * model(IDS, labels=LABELS).loss).backward()
    assert_same({"g": model.lm_head.weight.grad}, {"g": 3 * expected["lm_head.weight"]})


def test_heads_with_more_than_a_product_are_called():
    peft = pytest.importorskip("peft")
    model = build("llama")
    seen = []
    fuse_loss(model)
    handle = model.lm_head.register_forward_hook(lambda *args: seen.append(args[2]))
    out, hooked = step(model)
    assert isinstance(out.logits, torch.Tensor)
    assert seen[0] is out.logits
    handle.remove()
    assert_same(step(model)[1], hooked)
    with pytest.raises(ValueError, match="must have no fused loss yet"):
        fuse_loss(model)
    plain = build("llama")
    models = []
    for one in (model, plain):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        models.append(peft.get_peft_model(one, config))
    (out, found), (_, expected) = map(step, models)
    assert isinstance(out.logits, torch.Tensor)
    assert_same(found, expected)


def test_adapters_over_a_frozen_head():
    peft = pytest.importorskip("peft")
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(build("llama"), config)
        if fused:
            fuse_loss(model)
        out, found = step(model)
        assert isinstance(out.logits, LazyLogits) == fused
        results.append(found)
    assert_same(*results[::-1])
    assert not any("lm_head" in name for name in results[0])


def test_weights_held_in_fp8_and_tied():
    for name in ("llama", "qwen2"):
        with apex_te.fp8_model_init(recipe=CurrentScaling()):
            model = from_torch(build(name), include="*")
        _, expected = step(model)
        fuse_loss(model)
        _, found = step(model)
        assert_same(found, expected)


@pytest.mark.long
def test_compiled_models_run_as_before():
    model = build("llama").train()
    expected = model(IDS, labels=LABELS)
    fuse_loss(model)
    compiled = torch.compile(model, backend="aot_eager")
    out = compiled(IDS, labels=LABELS)
    assert isinstance(out.logits, torch.Tensor)
    torch.testing.assert_close(out.loss, expected.loss)
    assert isinstance(model(IDS, labels=LABELS).logits, LazyLogits)


def test_trainer_learns_alike(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from test_trainer import losses, trainer

    plain = losses(trainer(tmp_path, [], save_strategy="no"))
    model = build("llama").train()
    fuse_loss(model)
    one = trainer(tmp_path, [], model=model, save_strategy="no")
    assert losses(one) == pytest.approx(plain, rel=1e-4)
    handle = one.model.forward
    found = one.evaluate()["eval_loss"]
    handle.remove()
    assert one.evaluate()["eval_loss"] == found


def test_trainer_in_bf16_computes_no_logits(tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from test_trainer import losses, trainer

    def refuse(self):
        raise AssertionError("logits are computed")

    monkeypatch.setattr(LazyLogits, "compute", refuse)
    assert len(losses(trainer(tmp_path, [], model=fused("llama"), bf16=True, save_strategy="no")))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda: (torch.nn.Linear(2, 2), {}), ValueError, "causal language model .*, got Linear"),
        (lambda: (3, {}), TypeError, "model must be a torch.nn.Module, got int"),
        (lambda: (build("bert"), {}), ValueError, "must have the loss ForCausalLMLoss, got Bert"),
        (lambda: (build("llama"), {"fp8_recipe": "delayed"}), ValueError, "recipe without state"),
        (lambda: (build("llama"), {"chunk_rows": 0}), ValueError, "positive integer, got 0"),
    ],
)
def test_models_that_do_not_fit(change, error, message):
    model, options = change()
    with pytest.raises(error, match=message):
        fuse_loss(model, **options)


ENCODER_DECODERS = {
    "t5": ("T5ForConditionalGeneration", FAMILIES["t5"][2]),
    "bart": ("BartForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "dropout": 0.0, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 0}),
    "whisper": ("WhisperForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "dropout": 0.0, "num_mel_bins": 8, "max_source_positions": 16,
        "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
        "decoder_start_token_id": 0, "suppress_tokens": [], "begin_suppress_tokens": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_models_that_compute_their_own_loss_are_named(name):
    """A model whose forward does not call ``loss_function`` trains as before, with one warning."""
    kind = getattr(transformers, ENCODER_DECODERS[name][0])
    torch.manual_seed(0)
    plain = kind(kind.config_class(**ENCODER_DECODERS[name][1]))
    model = copy.deepcopy(plain)
    fuse_loss(model)
    first = {"input_features": torch.randn(2, 8, 32)} if name == "whisper" else {"input_ids": IDS}
    expected = plain.train()(**first, labels=LABELS).loss
    with pytest.warns(UserWarning, match=f"{kind.__name__} computes its loss in its forward"):
        found = model.train()(**first, labels=LABELS).loss
    assert torch.equal(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**first, labels=LABELS)


def test_accelerates_functions_take_computed_logits():
    """Functions that ask for a tensor take ``logits.compute()`` while training."""
    operations = pytest.importorskip("accelerate.utils", reason="accelerate is not installed")
    model = build("llama").train()
    fuse_loss(model)
    out = model(input_ids=IDS, labels=LABELS)
    assert isinstance(out.logits, LazyLogits)
    padded = operations.pad_across_processes({"logits": out.logits.compute()}, dim=1)
    assert padded["logits"].shape == out.logits.shape
