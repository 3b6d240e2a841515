"""from_torch on every architecture of transformers that a small configuration builds.

``python tests/L1/frameworks/test_all_architectures.py [part of a class name ...]`` lists the
classes and what fails; as tests, each class is one.
"""

import copy
import inspect
import re
import signal
import sys
import tempfile
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from apex_te import fp8_autocast  # noqa: E402
from apex_te.integrations import conversion_summary, from_torch, key_map  # noqa: E402
from apex_te.module._core.fp8_module import FP8Module  # noqa: E402
from apex_te.recipe import CurrentScaling  # noqa: E402

SECONDS = 240  # for one class
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "dim": 32,
    "hidden_dim": 32, "embedding_size": 32, "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48,
    "n_inner": 48, "ffn_hidden_size": 48, "mlp_dim": 48, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "dense_ffn_hidden_size": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2,
    "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2,
    "num_encoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "d_kv": 8, "max_position_embeddings": 64, "n_positions": 64,
    "max_source_positions": 64, "max_target_positions": 64, "num_experts": 6,
    "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "rotary_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    "decoder_start_token_id": 0, "image_size": 32, "patch_size": 8, "num_mel_bins": 16,
    "emb_dim": 32, "entity_vocab_size": 64, "entity_emb_size": 32, "mamba_n_heads": 8,
    "mamba_d_head": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "num_dense_layers": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2,
}  # fmt: skip
# Changes that make configurations valid in which the sizes above are not; tried in turn.
VARIANTS = (
    {},
    {"num_key_value_heads": 4},
    {"num_experts_per_tok": 1},
    {"num_hidden_layers": 4},
    {"layer_types": None},
    {"num_heads": 8},
    {"per_layer_config": None},
    {"is_decoder": True},
    {"per_layer_config": None, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    {"num_hidden_layers": 6, "num_kv_shared_layers": 0},
    {"head_dim": 16},
    {"head_dim": 64},
    {"num_hidden_layers": None},
)
TASKS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "AUDIO_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT",
)  # fmt: skip
LIMIT = 30_000_000  # parameters
# Names of dropouts and of noise, which would make two runs differ.
RANDOM = re.compile("drop|pdrop|jitter|noise|layerdrop")


def classes():
    """Names of the classes of the tasks, one for each configuration and task."""
    from transformers.models.auto import modeling_auto

    found = {}
    for task in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
        for name in names.values():
            found.update(dict.fromkeys([name] if isinstance(name, str) else name))
    return list(found)


class Unsuited(Exception):
    """No small model of the class can be built or run by what this file knows."""


def shrunk(values, variant):
    """The changes that make a configuration with ``values`` small."""
    changes = {key: SIZES[key] for key in values if key in SIZES}
    changes.update((key, 0.0) for key, value in values.items()
                   if RANDOM.search(key) and isinstance(value, float))  # fmt: skip
    if values.get("kv_lora_rank") or values.get("num_key_value_heads") == values.get(
        "num_attention_heads"
    ):
        changes["num_key_value_heads"] = 4
    changes = {key: value for key, value in changes.items() if key in values}
    layers = {values[key] for key in values if "layers" in key and isinstance(values[key], int)}
    for key, value in values.items():  # a kind or an option of each layer
        if isinstance(value, list) and len(value) in layers and len(value) > 2:
            changes[key] = [value[0], value[-1]]
    changes.update((key, value) for key, value in variant.items() if key in values)
    if "num_hidden_layers" in variant:  # with lists as long as they were, or made anew
        for key in [key for key in changes if isinstance(values[key], list)]:
            del changes[key]
        if variant["num_hidden_layers"] is None:
            changes.pop("num_hidden_layers", None)
    if changes.get("n_embd") and "n_inner" in changes and values["n_inner"] is None:
        del changes["n_inner"]
    return changes


def configuration(kind, variant):
    """A small configuration of a class, with small parts."""
    default = kind()
    values = default.to_dict()
    changes = shrunk(values, variant)
    for name, part in values.items():
        if name.endswith("_config") and isinstance(part, dict):
            own = getattr(default, name)
            part = {**part, **shrunk(part, variant)}
            changes[name] = type(own)(**part).to_dict() if hasattr(own, "to_dict") else part
    return kind(**changes)


def runnable(name):
    """A small model, arguments of its forward, with which it also trains, and its outputs.

    Raises:
        Unsuited: no small model can be built or run.
    """
    kind, reason = getattr(transformers, name, None), None
    for variant in VARIANTS if kind is not None else ():
        try:
            model = built(kind, variant)
            given = arguments(model)
            expected, again = run(model, given), run(model, given)
            copy.deepcopy(model).train()(**given, return_dict=True)
        except TimeoutError:
            raise
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {error}"
            continue
        if expected and all(map(torch.equal, expected, again)):
            return model, given, expected
        reason = reason or "two forwards differ"
    raise Unsuited(reason or "no such class")


def built(kind, variant):
    """A small model in evaluation, whose vectors have values that tell them apart."""
    config = configuration(kind.config_class, variant)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
    if size > LIMIT:
        raise Unsuited(f"{size} parameters")
    torch.manual_seed(len(kind.__name__))
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def arguments(model):
    """Arguments with which a model runs forward."""
    config = model.config
    names = inspect.signature(type(model).forward).parameters
    text = config.get_text_config()
    vocabulary = min(getattr(text, "vocab_size", 40) or 40, 40)
    ids = torch.arange(2 * 12).view(2, 12) % (vocabulary - 3) + 2
    given = {}
    if "input_ids" in names:
        given["input_ids"] = ids
    if "attention_mask" in names and "input_ids" in names:
        given["attention_mask"] = torch.ones_like(ids)
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = ids.flip(1)
    if "use_cache" in names:
        given["use_cache"] = False
    torch.manual_seed(0)
    if "pixel_values" in names and "input_ids" not in names:
        size = getattr(config, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        given["pixel_values"] = torch.randn(2, getattr(config, "num_channels", 3), height, width)
    if "input_features" in names and "input_ids" not in names:
        bins = getattr(config, "num_mel_bins", 16)
        frames = 2 * getattr(config, "max_source_positions", 32)
        given["input_features"] = torch.randn(2, bins, frames)
    if "input_values" in names and "input_ids" not in names:
        given["input_values"] = torch.randn(2, 4000)
    return given


def tensors(value):
    """All floating-point tensors in a model's output."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [one for part in value.values() for one in tensors(part)]
    if isinstance(value, (tuple, list)):
        return [one for part in value for one in tensors(part)]
    return []


def run(model, given):
    """The model's outputs; random numbers are the same in each call."""
    torch.manual_seed(3)
    with torch.no_grad():
        return tensors(model(**given, return_dict=True))


def decayed(model):
    """Original names of the parameters that Trainer decays."""
    chosen = set(transformers.Trainer.get_decay_parameter_names(None, model))
    own = {key: p for key, p in model.named_parameters() if key in chosen}
    return set(key_map(model).to_original(own))


def in_routers(model, plain):
    """Names of FP8 layers in routers, or with as many outputs as there are experts."""
    text = plain.config.get_text_config()
    counts = {getattr(text, key, None) for key in ("num_experts", "num_local_experts",
              "n_routed_experts", "moe_num_experts", "moe_num_primary_experts")}  # fmt: skip
    counts = {count for count in counts if isinstance(count, int) and count > 1}
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, FP8Module) or "experts." in f"{name}.".replace("shared_", ""):
            continue
        owners = [plain.get_submodule(name[:at]) for at in range(len(name)) if name[at] == "."]
        routed = any("Router" in type(owner).__name__ for owner in owners)
        if routed or getattr(module, "out_features", None) in counts:
            found.append(name)
    return found


def check(name, folder):
    """Runs all checks for a class.

    Raises:
        Unsuited: no small model can be built or run.
    """
    plain, given, expected = runnable(name)
    plain.save_pretrained(folder)
    saved = type(plain).from_pretrained(folder).state_dict()
    keys, decays = list(plain.state_dict()), decayed(plain)
    head = plain.get_output_embeddings()
    heads = [key for key, module in plain.named_modules() if module is head]
    # A model that is near a step, such as a choice of experts, follows rounding.
    spread = 1e-4 * max(1.0, *(float(one.abs().max()) for one in expected if one.numel()))
    for fuse in (False, True):
        torch.manual_seed(3)
        what = "fused" if fuse else "converted"
        model = from_torch(copy.deepcopy(plain), fuse=fuse)
        assert list(model.state_dict()) == keys, f"{what}: keys"
        for a, b in zip(run(model, given), expected, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what}: shape or dtype"
            error = (a - b).abs().nan_to_num().max() if a.numel() else 0.0
            assert error <= spread, f"{what}: outputs differ by {error}"
        assert decayed(model) == decays, f"{what}: decay"
        assert not any(isinstance(model.get_submodule(key), FP8Module) for key in heads), "head"
        assert not in_routers(model, plain), f"{what}: routers {in_routers(model, plain)}"
        assert repr(conversion_summary(model))
        with fp8_autocast(True, CurrentScaling()):
            values = run(model, given)
        for a, b in zip(values, expected, strict=True):
            assert a.shape == b.shape, f"{what}: shape in FP8"
            assert torch.equal(a.isfinite(), b.isfinite()), f"{what}: FP8 is not finite"
        model.save_pretrained(folder)
        loaded = type(plain).from_pretrained(folder).state_dict()
        for key, value in saved.items():
            assert torch.equal(loaded[key].to(value.dtype), value), f"{what}: saved {key}"
        model.load_state_dict(plain.state_dict())
        model.train()
        with fp8_autocast(True, CurrentScaling()):
            torch.manual_seed(3)
            found = [one for one in tensors(model(**given, return_dict=True)) if one.requires_grad]
        sum(one.nan_to_num(neginf=0, posinf=0).square().mean() for one in found).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()), what


def _late(*_):
    raise TimeoutError(f"more than {SECONDS} seconds")


def checked(name):
    """Runs ``check`` with a limit of time and without the warnings that other tests are about."""
    transformers.logging.set_verbosity_error()
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(name, folder)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", classes())
def test_architecture(name):
    """Outputs, keys, files and decay are the plain model's; outputs in FP8 are finite."""
    try:
        checked(name)
    except Unsuited as reason:
        pytest.skip(str(reason)[:200])


def main(wanted):
    """Prints what fails of the classes whose name has one of the given parts; all without any."""
    counts = dict.fromkeys(("right", "unsuited", "wrong"), 0)
    for name in classes():
        if wanted and not any(part in name for part in wanted):
            continue
        try:
            checked(name)
            result, reason = "right", ""
        except Unsuited as error:
            result, reason = "unsuited", str(error)
        except Exception as error:
            result, reason = "wrong", f"{type(error).__name__}: {error}"
        counts[result] += 1
        print(f"{result:9} {name} {' '.join(reason.split())[:300]}", flush=True)
    print(counts)
    return counts["wrong"]


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
