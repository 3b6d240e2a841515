"""Mistakes in calls of the functions that convert, save and export models, and their errors."""

import sys
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn

from apex_te import advise
from apex_te.integrations import (
    autocast_forward,
    conversion_summary,
    export_fp8,
    from_torch,
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


class Mistake(NamedTuple):
    """A wrong call, the type of its error, and words that the error has besides the function."""

    call: object
    error: type
    words: tuple


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
    "advise": lambda model: advise(model, torch.ones(4, 32)),
    "from_torch": from_torch,
    "conversion_summary": conversion_summary,
    "key_map": key_map,
    "fuse_loss": fuse_loss,
    "fuse_lora": fuse_lora,
    "autocast_forward": autocast_forward,
    "save_fp8_state": lambda model: save_fp8_state(model, "file"),
    "load_fp8_state": lambda model: load_fp8_state(model, "file"),
    "load_te_extra_state": lambda model: load_te_extra_state(model, {}),
    "reorder_fused_state": lambda model: reorder_fused_state({}, sgd(), model),
    "reorder_grouped_linear_state": lambda model: reorder_grouped_linear_state({}, sgd(), model),
}
MISTAKES = {
    "from_torch: misspelt exclude": Mistake(
        lambda: from_torch(plain(), exclud="0"), TypeError, ("'exclud'", "did you mean 'exclude'?")
    ),
    "from_torch: argument of another library": Mistake(
        lambda: from_torch(plain(), module_filter_fn=print),
        TypeError,
        ("'module_filter_fn'", "the arguments are", "exclude"),
    ),
    "from_torch: fuse by name of a family": Mistake(
        lambda: from_torch(plain(), fuse="llama"), TypeError, ("fuse must be a bool", "str")
    ),
    "from_torch: options by position": Mistake(
        lambda: from_torch(plain(), False, "0"), TypeError, ("by position", "by name")
    ),
    "from_torch: no model": Mistake(lambda: from_torch(), TypeError, ("model must be given",)),
    "from_torch: name that no layer has": Mistake(
        lambda: from_torch(plain(), exclude="lm_head"), ValueError, ("exclude", "'lm_head'")
    ),
    "from_torch: misspelt name of a layer": Mistake(
        lambda: from_torch(nn.ModuleDict({"projection": nn.Linear(32, 32)}), exclude="projectoin"),
        ValueError,
        ("exclude", "'projectoin'", "did you mean 'projection'?"),
    ),
    "from_torch: number as filter": Mistake(
        lambda: from_torch(plain(), include=3), TypeError, ("include", "int")
    ),
    "from_torch: negative blocks": Mistake(
        lambda: from_torch(plain(), keep_first_blocks=-1), ValueError, ("keep_first_blocks", "-1")
    ),
    "from_torch: min_size as text": Mistake(
        lambda: from_torch(plain(), min_size="64"), TypeError, ("min_size", "int", "str")
    ),
    "from_torch: optimizer's state": Mistake(
        lambda: from_torch(plain(), True, optimizer=sgd().state_dict()),
        TypeError,
        ("optimizer", "dict"),
    ),
    "conversion_summary: misspelt argument": Mistake(
        lambda: conversion_summary(modle=plain()), TypeError, ("did you mean 'model'?",)
    ),
    "advise: misspelt repeats": Mistake(
        lambda: advise(plain(), torch.ones(4, 32), repeat=2),
        TypeError,
        ("'repeat'", "did you mean 'repeats'?"),
    ),
    "advise: misspelt bound": Mistake(
        lambda: advise(plain(), torch.ones(4, 32), min_grad_snr=15.0),
        TypeError,
        ("did you mean 'min_grad_sqnr'?",),
    ),
    "advise: argument of from_torch": Mistake(
        lambda: advise(plain(), torch.ones(4, 32), exclude="0"),
        TypeError,
        ("'exclude'", "the arguments are model, sample"),
    ),
    "advise: no sample": Mistake(
        lambda: advise(plain()), TypeError, ("sample must be given", "got nothing")
    ),
    "advise: nothing": Mistake(
        lambda: advise(), TypeError, ("model and sample must be given", "got nothing")
    ),
    "advise: repeats by position": Mistake(
        lambda: advise(plain(), torch.ones(4, 32), None, 3), TypeError, ("by position", "by name")
    ),
    "advise: sample as array": Mistake(
        lambda: advise(plain(), torch.ones(4, 32).numpy()), TypeError, ("sample", "got ndarray")
    ),
    "advise: repeats as text": Mistake(
        lambda: advise(plain(), torch.ones(4, 32), repeats="3"),
        TypeError,
        ("repeats must be an int", "got str"),
    ),
    "advise: misspelt recipe": Mistake(
        lambda: advise(plain(), torch.ones(4, 32), "delayd"),
        ValueError,
        ("recipe", "'delayd'", "did you mean 'delayed'?"),
    ),
    "advise: bound of None": Mistake(
        lambda: advise(plain(), torch.ones(4, 32), min_sqnr=None),
        TypeError,
        ("min_sqnr must be a number", "got NoneType"),
    ),
    "advise: bound that is not a number": Mistake(
        lambda: advise(plain(), torch.ones(4, 32), min_sqnr=float("nan")),
        ValueError,
        ("min_sqnr", "got nan"),
    ),
    "FP8Callback: options of a conversion without one": Mistake(
        lambda: callback(convert=False, fuse=True), ValueError, ("convert", "fuse")
    ),
    "autocast_forward: misspelt recipe": Mistake(
        lambda: autocast_forward(plain(), "delayd"), ValueError, ("recipe", "'delayd'")
    ),
    "autocast_forward: arguments exchanged": Mistake(
        lambda: autocast_forward(DelayedScaling(), plain()), TypeError, ("model", "DelayedScaling")
    ),
    "autocast_forward: misspelt during_eval": Mistake(
        lambda: autocast_forward(plain(), during_evaluation=True),
        TypeError,
        ("did you mean 'during_eval'?",),
    ),
    "autocast_forward: during_eval as text": Mistake(
        lambda: autocast_forward(plain(), during_eval="no"), TypeError, ("during_eval", "bool")
    ),
    "fuse_loss: model without a loss": Mistake(
        lambda: fuse_loss(plain()), ValueError, ("causal language model", "Sequential")
    ),
    "fuse_loss: misspelt recipe": Mistake(
        lambda: fuse_loss(plain(), fp8_recpie="delayed"),
        TypeError,
        ("did you mean 'fp8_recipe'?",),
    ),
    "fuse_lora: model without adapters": Mistake(
        lambda: fuse_lora(from_torch(plain())), ValueError, ("LoRA layers", "none")
    ),
    "export_fp8: no model of Hugging Face": Mistake(
        lambda: export_fp8(from_torch(plain()), "folder"), TypeError, ("model", "Sequential")
    ),
    "export_fp8: misspelt weights": Mistake(
        lambda: export_fp8(plain(), "folder", weigths="block"),
        TypeError,
        ("did you mean 'weights'?",),
    ),
    "export_fp8: no folder": Mistake(
        lambda: export_fp8(plain()), TypeError, ("folder must be given",)
    ),
    "save_fp8_state: no path": Mistake(
        lambda: save_fp8_state(from_torch(plain()), None), TypeError, ("path", "NoneType")
    ),
    "load_fp8_state: no path": Mistake(
        lambda: load_fp8_state(from_torch(plain()), None), TypeError, ("path", "NoneType")
    ),
    "load_fp8_state: file that is not there": Mistake(
        lambda: load_fp8_state(from_torch(plain()), "/no/such/file"),
        FileNotFoundError,
        ("path", "'/no/such/file'", "not there"),
    ),
    "load_te_extra_state: file in place of a state dict": Mistake(
        lambda: load_te_extra_state(plain(), "model.pt"), TypeError, ("state_dict", "str")
    ),
    "reorder_fused_state: no optimizer": Mistake(
        lambda: reorder_fused_state({}, None, plain()), TypeError, ("optimizer", "NoneType")
    ),
    "reorder_fused_state: model's state dict": Mistake(
        lambda: reorder_fused_state(plain().state_dict(), sgd(), plain()),
        TypeError,
        ("state_dict", "optimizer's state_dict()"),
    ),
    "FP8Callback: misspelt exclude": Mistake(
        lambda: callback(exclud="0"), TypeError, ("'exclud'", "did you mean 'exclude'?")
    ),
    "FP8Callback: misspelt recipe": Mistake(
        lambda: callback(recpe="delayed"), TypeError, ("did you mean 'recipe'?",)
    ),
    "FP8Callback: steps in place of a recipe": Mistake(
        lambda: callback(100), TypeError, ("recipe", "int")
    ),
    "FP8Callback: model in place of a recipe": Mistake(
        lambda: callback(plain()), TypeError, ("recipe", "Sequential")
    ),
    "FP8Callback: model in place of its function": Mistake(
        lambda: callback().converted(None), TypeError, ("model_init", "NoneType")
    ),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("owner", OF_A_MODEL)
def test_error_says_that_the_argument_is_no_model(owner, kind):
    make, words = MODELS[kind]
    with pytest.raises(TypeError) as caught:
        OF_A_MODEL[owner](make())
    text = str(caught.value)
    assert text.startswith(f"{owner}: model must be a torch.nn.Module, got "), text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_has_an_error_with_the_users_names(name):
    mistake = MISTAKES[name]
    with pytest.raises(mistake.error) as caught:
        mistake.call()
    text = str(caught.value)
    assert text.startswith(name.partition(":")[0]), text
    assert all(word in text for word in mistake.words), text


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
