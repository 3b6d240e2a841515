"""Mistakes in calls of the functions that convert, save and export models, and their errors."""

import sys
import warnings

import pytest
import torch
from torch import nn

from apex_te import advise
from apex_te.integrations import (
    autocast_forward,
    conversion_summary,
    export_fp8,
    fp8_tensors,
    from_torch,
    fuse_latent_attention,
    fuse_lora,
    fuse_loss,
    key_map,
    load_fp8_state,
    load_te_extra_state,
    reorder_fused_state,
    reorder_grouped_linear_state,
    save_fp8_state,
)
from apex_te.recipe import DelayedScaling

X = torch.ones(4, 32)


def plain():
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def callback(*args, **options):
    pytest.importorskip("transformers")
    from apex_te.integrations.huggingface import FP8Callback

    return FP8Callback(*args, **options)


def sgd():
    return torch.optim.SGD(plain().parameters(), 0.1)


MODELS = {
    "None": (lambda: None, ("NoneType",)),
    "class": (lambda: nn.Linear, ("the class Linear", "pass an instance")),
    "state dict": (lambda: plain().state_dict(), ("OrderedDict", "not its state dict")),
    "tensor": (lambda: torch.ones(2), ("Tensor",)),
}
OF_A_MODEL = {
    "advise": lambda model: advise(model, X),
    "from_torch": from_torch,
    "conversion_summary": conversion_summary,
    "key_map": key_map,
    "fuse_latent_attention": fuse_latent_attention,
    "fuse_loss": fuse_loss,
    "fuse_lora": fuse_lora,
    "autocast_forward": autocast_forward,
    "save_fp8_state": lambda model: save_fp8_state(model, "file"),
    "load_fp8_state": lambda model: load_fp8_state(model, "file"),
    "load_te_extra_state": lambda model: load_te_extra_state(model, {}),
    "reorder_fused_state": lambda model: reorder_fused_state({}, sgd(), model),
    "reorder_grouped_linear_state": lambda model: reorder_grouped_linear_state({}, sgd(), model),
}
# By the function that is named: a wrong call, its error, and words that the error has.
MISTAKES = {
    "from_torch": [
        (lambda: from_torch(plain(), exclud="0"), TypeError, "'exclud'", "did you mean 'exclude'?"),
        (lambda: from_torch(plain(), module_filter_fn=print), TypeError,
         "'module_filter_fn'", "the arguments are", "exclude"),
        (lambda: from_torch(plain(), fuse="llama"), TypeError, "fuse must be a bool", "str"),
        (lambda: from_torch(plain(), False, "0"), TypeError, "by position", "by name"),
        (lambda: from_torch(), TypeError, "model must be given"),
        (lambda: from_torch(plain(), exclude="lm_head"), ValueError, "exclude", "'lm_head'"),
        (lambda: from_torch(nn.ModuleDict({"projection": nn.Linear(32, 32)}), exclude="projectoin"),
         ValueError, "exclude", "'projectoin'", "did you mean 'projection'?"),
        (lambda: from_torch(plain(), include=3), TypeError, "include", "int"),
        (lambda: from_torch(plain(), keep_first_blocks=-1), ValueError, "keep_first_blocks", "-1"),
        (lambda: from_torch(plain(), min_size="64"), TypeError, "min_size", "int", "str"),
        (lambda: from_torch(plain(), True, optimizer=sgd().state_dict()), TypeError,
         "optimizer", "dict"),
    ],
    "conversion_summary": [
        (lambda: conversion_summary(modle=plain()), TypeError, "did you mean 'model'?"),
    ],
    "advise": [
        (lambda: advise(plain(), X, repeat=2), TypeError, "'repeat'", "did you mean 'repeats'?"),
        (lambda: advise(plain(), X, min_grad_snr=15.0), TypeError, "did you mean 'min_grad_sqnr'?"),
        (lambda: advise(plain(), X, exclude="0"), TypeError,
         "'exclude'", "the arguments are model, sample"),
        (lambda: advise(plain()), TypeError, "sample must be given", "got nothing"),
        (lambda: advise(), TypeError, "model and sample must be given", "got nothing"),
        (lambda: advise(plain(), X, None, 3), TypeError, "by position", "by name"),
        (lambda: advise(plain(), X.numpy()), TypeError, "sample", "got ndarray"),
        (lambda: advise(plain(), X, repeats="3"), TypeError, "repeats must be an int", "got str"),
        (lambda: advise(plain(), X, "delayd"), ValueError,
         "recipe", "'delayd'", "did you mean 'delayed'?"),
        (lambda: advise(plain(), X, min_sqnr=None), TypeError,
         "min_sqnr must be a number", "got NoneType"),
        (lambda: advise(plain(), X, min_sqnr=float("nan")), ValueError, "min_sqnr", "got nan"),
    ],
    "FP8Callback": [
        (lambda: callback(convert=False, fuse=True), ValueError, "convert", "fuse"),
        (lambda: callback(exclud="0"), TypeError, "'exclud'", "did you mean 'exclude'?"),
        (lambda: callback(recpe="delayed"), TypeError, "did you mean 'recipe'?"),
        (lambda: callback(100), TypeError, "recipe", "int"),
        (lambda: callback(plain()), TypeError, "recipe", "Sequential"),
        (lambda: callback().converted(None), TypeError, "model_init", "NoneType"),
    ],
    "autocast_forward": [
        (lambda: autocast_forward(plain(), "delayd"), ValueError, "recipe", "'delayd'"),
        (lambda: autocast_forward(DelayedScaling(), plain()), TypeError, "model", "DelayedScaling"),
        (lambda: autocast_forward(plain(), during_evaluation=True), TypeError,
         "did you mean 'during_eval'?"),
        (lambda: autocast_forward(plain(), during_eval="no"), TypeError, "during_eval", "bool"),
    ],
    "fuse_loss": [
        (lambda: fuse_loss(plain()), ValueError, "causal language model", "Sequential"),
        (lambda: fuse_loss(plain(), fp8_recpie="delayed"), TypeError, "did you mean 'fp8_recipe'?"),
    ],
    "fuse_latent_attention": [
        (lambda: fuse_latent_attention(plain()), ValueError, "formula of DeepSeek-V3's", "none"),
        (lambda: fuse_latent_attention(plain(), "yes"), TypeError, "recompute_up_proj", "str"),
        (lambda: fuse_latent_attention(plain(), recompute=True), TypeError,
         "did you mean 'recompute_up_proj'?"),
    ],
    "fuse_lora": [
        (lambda: fuse_lora(from_torch(plain())), ValueError, "LoRA layers", "none"),
    ],
    "export_fp8": [
        (lambda: export_fp8(from_torch(plain()), "folder"), TypeError, "model", "Sequential"),
        (lambda: export_fp8(plain(), "folder", weigths="block"), TypeError,
         "did you mean 'weights'?"),
        (lambda: export_fp8(plain()), TypeError, "folder must be given"),
    ],
    "fp8_tensors": [
        (lambda: fp8_tensors(from_torch(plain())), TypeError, "model", "Sequential"),
        (lambda: fp8_tensors(plain(), weigths="block"), TypeError, "did you mean 'weights'?"),
        (lambda: fp8_tensors(), TypeError, "model must be given"),
    ],
    "save_fp8_state": [
        (lambda: save_fp8_state(from_torch(plain()), None), TypeError, "path", "NoneType"),
    ],
    "load_fp8_state": [
        (lambda: load_fp8_state(from_torch(plain()), None), TypeError, "path", "NoneType"),
        (lambda: load_fp8_state(from_torch(plain()), "/no/such/file"), FileNotFoundError,
         "path", "'/no/such/file'", "not there"),
    ],
    "load_te_extra_state": [
        (lambda: load_te_extra_state(plain(), "model.pt"), TypeError, "state_dict", "str"),
    ],
    "reorder_fused_state": [
        (lambda: reorder_fused_state({}, None, plain()), TypeError, "optimizer", "NoneType"),
        (lambda: reorder_fused_state(plain().state_dict(), sgd(), plain()), TypeError,
         "state_dict", "optimizer's state_dict()"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("owner", OF_A_MODEL)
def test_error_says_that_the_argument_is_no_model(owner, kind):
    make, words = MODELS[kind]
    with pytest.raises(TypeError) as caught:
        OF_A_MODEL[owner](make())
    text = str(caught.value)
    assert text.startswith(f"{owner}: model must be a torch.nn.Module, got "), text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("owner", "call", "error", "words"),
    [(owner, *row[:2], row[2:]) for owner, rows in MISTAKES.items() for row in rows],
)
def test_mistake_has_an_error_with_the_users_names(owner, call, error, words):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(owner), text
    assert all(word in text for word in words), text


def test_warning_of_layers_left_is_about_the_line_of_the_call():
    class Mine(nn.Linear):
        pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_torch(nn.Sequential(Mine(32, 32)))
    assert [warning.filename for warning in caught] == [__file__]


def test_model_without_any_layer_is_answered_once_and_an_excluded_one_not():
    with pytest.warns(
        UserWarning, match="^from_torch: nothing was converted: the model does not contain"
    ):
        from_torch(nn.Sequential(nn.ReLU(), nn.Embedding(4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_torch(nn.Sequential(nn.Linear(32, 32)), exclude="0")
        from_torch(from_torch(nn.Sequential(nn.Linear(32, 32))))


def test_safetensors_that_is_missing_is_named_with_the_line_for_pip(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"^export_fp8: .*pip install"):
        export_fp8(plain(), tmp_path)


def test_library_that_is_not_installed_is_named_with_the_line_for_pip(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "apex_te.integrations.torchtitan", raising=False)
    with pytest.raises(ImportError, match="torchtitan must be installed: pip install torchtitan"):
        import apex_te.integrations.torchtitan  # noqa: F401
