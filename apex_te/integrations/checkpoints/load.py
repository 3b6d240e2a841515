"""``from_fp8_checkpoint``, whose models hold the bytes of a released FP8 checkpoint.

``load_fp8_shards`` reads them where ranks have parts of the model.
"""

from __future__ import annotations

import copy
import json
import os
from typing import Any

from packaging.version import Version
from torch import nn

from ...recipe import DelayedScaling, Recipe, chosen_recipe
from ...runtime.named_arguments import check_model, named_arguments
from .. import summary
from .._fp8_weights import count_fp8_weights
from ..experts import is_experts
from ..from_torch import from_torch

_ME = "from_fp8_checkpoint"
_OLDEST = "5.23"  # transformers whose loader joins scales as it joins weights
# Arguments of from_pretrained that say where files are, which those of the configuration need, too.
_HUB = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code", "code_revision",
)  # fmt: skip
_REFUSED = {
    "quantization_config": "since the checkpoint's files have it",
    "output_loading_info": "since the result is the model alone",
    "distributed_config": "since load_fp8_shards reads a model that ranks have parts of",
    "tp_plan": "since load_fp8_shards reads a model that ranks have parts of",
}
_NOT_FP8 = "its weights are not in FP8 in the checkpoint"


def from_fp8_checkpoint(
    path_or_name: str | os.PathLike[str],
    *,
    recipe: Recipe | str | None = None,
    fuse: bool = False,
    **from_pretrained: Any,
) -> nn.Module:
    """Loads a Hugging Face checkpoint with FP8 weights, and keeps its FP8 data and scales.

    The FP8 data and scales in the files become FP8 Parameters, which GEMMs read in
    ``fp8_autocast``, also in backward, without decoding. Expert weights are stacked. ``from_torch``
    converts the layers, except those whose weights are not FP8 in the files. ``conversion_summary``
    lists the layers and how their weights are held. Weights can be trained, or frozen under LoRA.
    ``save_pretrained``, and ``export_fp8`` with ``layout="file"``, write the layout that was read;
    weights that no step changed are written bitwise unchanged. If the model is split over ranks,
    all ranks call these, and the first one writes.

    |``quant_method``|scales held as they are|recipe|
    |---|---|---|
    |``"fp8"``, ``"compressed-tensors"``, ``"modelopt"``|128x128 blocks|``BlockScaling``|
    |the same, with dynamic inputs|one for a weight|``CurrentScaling``|
    |the same, with static inputs|one for a weight|``DelayedScaling``, with the inputs' scales|
    |``"compressed-tensors"``, ``"modelopt"``, ``"fbgemm_fp8"``|by channel|``RowwiseScaling``|

    Experts in MXFP4 (gpt-oss) are held in FP8 with 128x128 blocks, which is exact if the exponents
    within a block differ by at most 14; otherwise they are treated like other scales below. Such a
    model is saved in the layout of ``"fp8"``, with experts ``[experts, out, in]``. The same holds
    for weights in MXFP8 that blocks represent exactly, which is rare unless the exponents of a
    block are equal.

    Use ``model.hf_quantizer.recipe`` in ``fp8_autocast``; it includes FBGEMM's
    ``activation_scale_ub``. Weights with other scales are refused unless ``recipe`` is given. They
    are then decoded and quantized again by it, one matrix at a time, and the model is saved in the
    layout of ``"fp8"``, or of ``"compressed-tensors"`` with ``RowwiseScaling``. The same applies to
    different scales of weights that the model joins, and to scales that are not powers of two if
    the recipe's are.

    If the sizes of experts' gate and up projections are not multiples of 128, they are padded with
    zeros, which stay zero and are not saved.

    FP8 embeddings are decoded to ``dtype``, with a warning, because a row look-up cannot read FP8;
    they are also saved so. An FP8 output head is held like any other layer.

    Tensors that the model class does not have, such as scales of KV caches or multi-token
    prediction layers, are skipped, as transformers does.

    Args:
        path_or_name: folder, or name on the Hub, of a checkpoint in safetensors.
        recipe: recipe, or its name, in which weights are held; None for the checkpoint's own.
        fuse: also join layers, as in ``from_torch``.
        from_pretrained: arguments of transformers' ``from_pretrained``, such as ``dtype``, that of
            the other weights, and ``device_map``. With ``device_map="meta"`` the model has no
            values; ``load_fp8_shards`` reads them.

    Returns:
        A model of the class named in the checkpoint, in evaluation mode.

    Raises:
        ImportError: transformers is not installed, or older than 5.23.
        TypeError: an argument has a wrong type.
        ValueError: the checkpoint has no FP8 weights, or its scales do not match them or the
            configuration.
        NotImplementedError: the format, or the scales without ``recipe``, cannot be held; the
            message names them, and for MXFP4 and MXFP8 the number of affected values.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{_ME}: transformers must be installed: pip install transformers"
        ) from error
    if Version(transformers.__version__) < Version(_OLDEST):
        raise ImportError(
            f"{_ME}: transformers must be {_OLDEST} or later, got {transformers.__version__}: "
            "pip install -U transformers"
        )
    from .quantizer import METHOD

    try:
        path_or_name = os.fsdecode(path_or_name)
    except TypeError:
        raise TypeError(
            f"{_ME}: path_or_name must be a str or pathlib.Path, got {type(path_or_name).__name__}"
        ) from None
    if not isinstance(fuse, bool):
        raise TypeError(f"{_ME}: fuse must be a bool, got {type(fuse).__name__}")
    if recipe is not None:
        recipe = chosen_recipe(_ME, "recipe", recipe)
    for name, why in _REFUSED.items():
        if name in from_pretrained:
            found = type(from_pretrained[name]).__name__
            raise ValueError(f"{_ME}: {name} must not be given, {why}, got a value of type {found}")
    hub = {key: from_pretrained[key] for key in _HUB if key in from_pretrained}
    config = from_pretrained.pop("config", None)
    if config is None:
        config = transformers.AutoConfig.from_pretrained(path_or_name, **hub)
    config = copy.deepcopy(config)
    config.quantization_config = {
        "quant_method": METHOD,
        "original": _quantization(path_or_name, config, hub),
        "recipe": recipe,
        "key_mapping": from_pretrained.get("key_mapping"),
    }
    named = (getattr(config, "architectures", None) or [""])[0]
    kind = getattr(transformers, named, transformers.AutoModelForCausalLM)
    return _converted(kind.from_pretrained(path_or_name, config=config, **from_pretrained), fuse)


@named_arguments()
def load_fp8_shards(model: nn.Module) -> None:
    """Reads this rank's shards of an FP8 checkpoint into a sharded model, in place.

    First make the model without values by ``from_fp8_checkpoint(..., device_map="meta")``, shard
    its parameters by ``fully_shard`` or, for experts, as DTensors over another mesh, and allocate
    them by ``model.to_empty(device=...)``. Each rank then reads only its rows of each tensor, with
    the scales of their blocks, and its experts, so that no rank holds a whole copy of the model.
    Tensors that are not in FP8 are read in the same way.

    Args:
        model: the sharded model, on a device; unsharded parameters are read whole.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model was not made by ``from_fp8_checkpoint`` with ``device_map="meta"``, it
            is still on the meta device, or the files lack a tensor.
        NotImplementedError: parameters are sharded otherwise than by rows, transformers builds them
            from the files' tensors otherwise than by stacking and concatenation, or parts of a
            matrix with a single scale have different scales.
    """
    check_model("load_fp8_shards", model)
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if not getattr(quantizer, "is_on_meta", False):
        raise ValueError(
            "load_fp8_shards: model must be made by from_fp8_checkpoint with device_map='meta', "
            f"got {type(model).__name__}"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                "load_fp8_shards: model must have memory; call model.to_empty(device=...), "
                f"got {name} on the meta device"
            )
    from .shards import read_shards

    read_shards(model, quantizer)


def _quantization(path: str, config: Any, hub: dict[str, Any]) -> dict[str, Any]:
    """Returns ``quantization_config``, or ModelOpt's in a file of its own."""
    found = getattr(config, "quantization_config", None)
    found = found or getattr(config.get_text_config(), "quantization_config", None)
    if found is None:
        from transformers.utils import cached_file

        name = "hf_quant_config.json"
        options = {key: value for key, value in hub.items() if key != "trust_remote_code"}
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **options)
        if file is None:
            raise ValueError(
                f"{_ME}: path_or_name must have quantization_config in config.json, or {name}, "
                f"got {path!r} without"
            )
        with open(file, encoding="utf-8") as stream:
            found = {"quant_method": "modelopt", **json.load(stream)}
    return dict(found) if isinstance(found, dict) else found.to_dict()


def _converted(model: Any, fuse: bool) -> nn.Module:
    """Converts the layers with weights in FP8, and says in the summary what holds them."""
    quantizer = model.hf_quantizer
    owners: dict[str, str] = {}
    for name, held in quantizer.held.items():
        how = f"weights in FP8, {held.stored.form.value} scales of the checkpoint"
        owners[name.rpartition(".")[0]] = how
    for name in quantizer.regrouped:
        kind = "MXFP4" if quantizer.checkpoint.method == "mxfp4" else "MXFP8"
        owners[name.rpartition(".")[0]] = f"weights in FP8, of the values that {kind} has"
    for name in quantizer.cast_again:
        again = f"weights in FP8, cast again by {type(quantizer.recipe).__name__}"
        owners[name.rpartition(".")[0]] = again

    def is_not_fp8(name: str, module: nn.Module) -> bool:
        layer = isinstance(module, nn.Linear) or is_experts(module)
        return layer and name not in owners

    from_torch(model, fuse, exclude=is_not_fp8)
    count_fp8_weights(model)
    done = vars(model)[summary.ATTRIBUTE]
    layers = [layer._replace(reason=owners.get(layer.name)) for layer in done.converted]
    layers += [
        layer._replace(reason=_NOT_FP8) if layer.reason == "excluded" else layer
        for layer in done.kept
    ]
    vars(model)[summary.ATTRIBUTE] = summary.ConversionSummary(layers)
    recipe, scales = quantizer.recipe, quantizer.input_scales
    if isinstance(recipe, DelayedScaling) and scales:
        from .static import set_input_scales

        set_input_scales(model, scales, recipe)
    return model
