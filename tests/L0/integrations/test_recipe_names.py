"""A recipe may be given by its name wherever a public function takes one, and a format too."""

import functools
import importlib
import inspect
import tempfile
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import apex_te
from apex_te import recipe
from apex_te.graphs.microbatches import graph_microbatches
from apex_te.parameter import FP8Parameter

PACKAGES = (
    "apex_te", "apex_te.amp", "apex_te.distributed", "apex_te.graphs.microbatches",
    "apex_te.integrations", "apex_te.integrations.huggingface", "apex_te.integrations.megatron",
    "apex_te.module", "apex_te.ops", "apex_te.optimizers", "apex_te.parameter",
    "apex_te.permutation", "apex_te.recipe", "apex_te.state", "apex_te.statistics",
)  # fmt: skip
# What takes recipes that were made already: apex_te itself calls these.
HANDLES = {"AutocastForward(recipe)"}  # results of functions, listed once they were imported
INTERNAL = {"FP8Parameter(recipe)", "FP8State.fit(recipe)", "pack_recipe(recipe)"}


def fp8_parameter(chosen):
    return FP8Parameter.empty((128, 128), chosen, torch.float32)._recipe


def codes(chosen):
    data = torch.zeros(128, 128).to(torch.float8_e4m3fn)
    scale_inv = torch.ones((1, 1) if "lock" in str(chosen) else (1,))
    return FP8Parameter.from_codes(data, scale_inv, chosen, torch.float32)._recipe


@functools.cache
def released():
    from families import build

    folder = tempfile.TemporaryDirectory()
    model = apex_te.from_torch(build("llama"))
    apex_te.export_fp8(model, folder.name, quant_method="fp8", weights="block")
    return folder


def from_fp8_checkpoint(chosen):
    pytest.importorskip("transformers", "5.23")
    return apex_te.from_fp8_checkpoint(released().name, recipe=chosen).hf_quantizer.recipe


def autocast_forward(chosen):
    return apex_te.autocast_forward(apex_te.Linear(16, 16), chosen).recipe


def advise(chosen):
    return apex_te.advise(torch.nn.Linear(16, 16), torch.randn(16, 16), chosen, repeats=1).recipe


def enable_fp8_all_gather(chosen):
    model = apex_te.Linear(128, 128)
    apex_te.distributed.enable_fp8_all_gather(model, chosen)
    return model._modes.gathered["weight"].unit.gather_set.name


def fp8_callback(chosen):
    pytest.importorskip("transformers")
    return apex_te.FP8Callback(chosen).recipe


def fuse_loss(chosen):
    pytest.importorskip("transformers")
    from families import build

    return apex_te.fuse_loss(build("llama"), fp8_recipe=chosen).options


def init_fp8_state(chosen):
    model = apex_te.Linear(16, 16)
    apex_te.init_fp8_state(model, chosen)
    return model.fp8_state.allocated


def linear_cross_entropy(chosen):
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(16, 128), torch.randn(128, 128), torch.arange(16)
    return apex_te.linear_cross_entropy(hidden, weight, target, fp8_recipe=chosen).item()


def linear_log_probs(chosen):
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(16, 128), torch.randn(128, 128), torch.arange(16)
    return apex_te.linear_log_probs(hidden, weight, target, fp8_recipe=chosen).tolist()


def refused_on_a_cpu(function, *args, **kwargs):
    """Calls a function that checks its recipe, and then finds its module on the CPU."""
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        if "CUDA" not in str(error):
            raise
    else:
        pytest.fail("the module is on the CPU")


def make_graphed_callables(chosen):
    sample = (torch.randn(16, 16),)
    module = apex_te.Linear(16, 16, device="cpu")
    refused_on_a_cpu(apex_te.make_graphed_callables, module, sample, fp8_recipe=chosen)


def microbatches(chosen):
    modules, sample = [apex_te.Linear(16, 16, device="cpu")], [(torch.randn(16, 16),)]
    refused_on_a_cpu(graph_microbatches, modules, sample, [1, -1], fp8_recipe=chosen)


def init(kind):
    return lambda chosen: kind(recipe=chosen)._settings.recipe


# By function and parameter: a call with a recipe, which returns what shows the recipe's choice.
TAKERS: dict[str, Callable[[Any], Any]] = {
    "FP8Callback(recipe)": fp8_callback,
    "FP8Parameter.empty(recipe)": fp8_parameter,
    "FP8Parameter.from_codes(recipe)": codes,
    "advise(recipe)": advise,
    "autocast(fp8_recipe)": lambda r: apex_te.autocast(fp8_recipe=r).recipe,
    "autocast(recipe)": lambda r: apex_te.autocast(recipe=r).recipe,
    "autocast(recipe_or_enabled)": lambda r: apex_te.autocast(r).recipe,
    "autocast_forward(recipe)": autocast_forward,
    "enable_fp8_all_gather(recipe)": enable_fp8_all_gather,
    "fp8_autocast(fp8_recipe)": lambda r: apex_te.fp8_autocast(fp8_recipe=r).recipe,
    "fp8_autocast(recipe)": lambda r: apex_te.fp8_autocast(recipe=r).recipe,
    "fp8_autocast(recipe_or_enabled)": lambda r: apex_te.fp8_autocast(r).recipe,
    "fp8_model_init(recipe)": init(apex_te.fp8_model_init),
    "from_fp8_checkpoint(recipe)": from_fp8_checkpoint,
    "fuse_loss(fp8_recipe)": fuse_loss,
    "graph_microbatches(fp8_recipe)": microbatches,
    "init_fp8_state(recipe)": init_fp8_state,
    "linear_cross_entropy(fp8_recipe)": linear_cross_entropy,
    "linear_log_probs(fp8_recipe)": linear_log_probs,
    "make_graphed_callables(fp8_recipe)": make_graphed_callables,
    "quantized_model_init(recipe)": init(apex_te.quantized_model_init),
}  # fmt: skip
KEEPS_STATE = "init_fp8_state(recipe)"  # allocates nothing for other recipes
ON_A_GPU_ONLY = {"graph_microbatches(fp8_recipe)", "make_graphed_callables(fp8_recipe)"}
FORMATS = {
    "BlockScaling", "CurrentScaling", "DelayedScaling", "MXFP8Scaling", "RowwiseScaling",
    "make_recipe",
}  # fmt: skip


def public_parameters(wanted):
    """Returns ``function(parameter)`` of each public callable with such a parameter."""
    found = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        listed = {*getattr(module, "__all__", ()), *dir(module)}
        owners = [
            getattr(module, name)
            for name in listed
            if not name.startswith("_") and (name, package) != ("FP8Callback", "apex_te")
        ]
        methods = [
            getattr(owner, name)
            for owner in owners
            if inspect.isclass(owner) and owner.__module__.startswith("apex_te")
            for name in vars(owner)
            if not name.startswith("_")
        ]
        for one in [*owners, *methods]:
            module_name = str(getattr(one, "__module__", ""))
            if isinstance(one, types.ModuleType) or not module_name.startswith("apex_te"):
                continue
            try:
                parameters = inspect.signature(one).parameters
            except (TypeError, ValueError):
                continue
            found |= {f"{one.__qualname__}({name})" for name in parameters if wanted(name)}
    return found


def test_every_public_callable_that_takes_a_recipe_or_a_format_is_in_the_tables():
    found = public_parameters(lambda name: "recipe" in name)
    wanted = set(TAKERS) | INTERNAL
    try:
        import transformers  # noqa: F401
    except ImportError:
        wanted -= {"FP8Callback(recipe)"}
    assert found - HANDLES == wanted
    formats = public_parameters(lambda name: name == "fp8_format")
    assert formats == {f"{name}(fp8_format)" for name in FORMATS}


@pytest.mark.parametrize("name", TAKERS)
def test_a_recipe_may_be_given_by_its_name(name):
    first, other = ("delayed", "mxfp8") if name == KEEPS_STATE else ("tensorwise", "blockwise")
    by_name = TAKERS[name](first)
    assert by_name == TAKERS[name](apex_te.make_recipe(first))
    if name not in ON_A_GPU_ONLY:
        assert by_name != TAKERS[name](other)


@pytest.mark.parametrize("name", TAKERS)
def test_what_is_no_recipe_is_refused_by_the_names_that_the_user_wrote(name):
    function, _, argument = name.removesuffix(")").partition("(")
    # The name by which users reach it, that of Transformer Engine's function.
    owner = function.partition(".")[0].replace("graph_microbatches", "make_graphed_callables")
    argument = argument.replace("recipe_or_enabled", "the first argument")
    names = "delayed, tensorwise, blockwise, mxfp8, rowwise"
    wrong = f"^{owner}: {argument} must be a recipe or one of {names}"
    with pytest.raises(ValueError, match=f"{wrong}, got 'tensorwize'"):
        TAKERS[name]("tensorwize")
    wrong = f"^{owner}: {argument} must be a recipe from apex_te.recipe or its name, got"
    with pytest.raises(TypeError, match=rf"{wrong} the class MXFP8Scaling; call it: MXFP8Scal"):
        TAKERS[name](recipe.MXFP8Scaling)
    if argument != "the first argument":
        with pytest.raises(TypeError, match=f"{wrong} int"):
            TAKERS[name](7)
