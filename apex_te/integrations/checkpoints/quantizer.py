"""Quantizer ``"apex_te"`` in transformers' registry: it loads FP8 weights without decoding them."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers import (
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from .._export_config import Export, quantization_config
from .._fp8_entries import is_spread
from ..experts import hold_upright
from .description import (
    BLOCKS,
    CHANNEL,
    MXFP4,
    MXFP8,
    PACKED,
    TENSOR,
    Checkpoint,
    Expected,
    Form,
)
from .headers import read_headers
from .holding import (
    are_powers_of_two,
    decoded,
    form_of,
    keeps_bytes,
    matrix_of,
    may_regroup,
    pad_down_proj,
    parameter_of,
    regrouped,
)
from .mapping import Held, cast_by, find_weights, is_transposed, joins_scales, scale_converters
from .mxfp4 import unpacked
from .reader import read_checkpoint
from .reloading import FileLayout
from .shards import have_powers_of_two, hold_without_values
from .static import input_scales_now
from .writing import FileEntry, file_entries, file_state, gathered_state, scale_shapes_of

METHOD = "apex_te"


@register_quantization_config(METHOD)
class CheckpointConfig(QuantizationConfigMixin):
    """Configuration of a checkpoint's own method, which is also what files of the model get.

    Args:
        original: ``quantization_config`` as the checkpoint has it.
        recipe: the recipe whose weights are held; None for that of the checkpoint.
        key_mapping: as in ``from_pretrained``.
    """

    def __init__(
        self,
        original: dict[str, Any],
        recipe: Recipe | None = None,
        key_mapping: dict[str, str] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        self.quant_method: Any = quant_method
        self.original, self.recipe, self.key_mapping = original, recipe, key_mapping

    def to_dict(self) -> dict[str, Any]:
        """Returns the checkpoint's own configuration."""
        return dict(self.original)


@register_quantizer(METHOD)
class CheckpointQuantizer(HfQuantizer):
    """Makes linear layers and experts hold the codes and scales of the checkpoint's files.

    Attributes:
        checkpoint: description of the files.
        held: the model's weights that are in FP8 there, by name.
        recipe: recipe of most weights' form, for ``fp8_autocast``.
        recipes: recipe of each of these weights.
        embeddings: those that are in FP8 there, and have values in the model.
        cast_again: names of weights that are not held by the codes in the files.
        regrouped: names of weights in MXFP4 or MXFP8, whose values blocks of FP8 hold unless in
            ``cast_again``.
        input_scales: scales of the inputs of weights, by the weights' names.
        files: paths of the files.
        is_on_meta: True until ``load_fp8_shards`` has read a model that was made without values.
    """

    quantization_config: CheckpointConfig
    is_trainable = True
    is_qat_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: CheckpointConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.checkpoint: Checkpoint | None = None
        self.held: dict[str, Held] = {}
        self.recipe: Recipe | None = quantization_config.recipe
        self.recipes: dict[str, Recipe] = {}
        self.embeddings: dict[str, Held] = {}
        self.cast_again: list[str] = []
        self.regrouped: list[str] = []
        self.input_scales: dict[str, torch.Tensor] = {}
        self.files: list[str] = []
        self.is_on_meta = False

    def is_serializable(self) -> bool:
        """Returns True: ``save_pretrained`` writes codes and scales."""
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        """Gives layers Parameters, on the meta device, for codes and scales."""
        self.files = list(checkpoint_files or ())
        headers = read_headers(self.files)
        self.checkpoint = read_checkpoint(self.quantization_config.original, headers)
        mapping = get_model_conversion_mapping(model, self.quantization_config.key_mapping)
        found = find_weights(model, self.checkpoint.weights, mapping)
        self.embeddings = {
            name: held
            for name, held in found.items()
            if isinstance(_owner(model, name), nn.Embedding)
        }
        self.held = {name: held for name, held in found.items() if name not in self.embeddings}
        if self.recipe is None:
            _check_forms(self.held)
        else:
            _check_recipe(self.recipe, self.held)
        for name, held in found.items():
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            codes = torch.empty(held.shape, dtype=torch.float8_e4m3fn, device="meta")
            if held.stored.form is Form.PACKED:
                del module._parameters[own]
                module.__dict__[own] = _initialized()
                own += PACKED
                shape = (*held.stored.scale_header.shape, 16)
                codes = torch.empty(shape, dtype=torch.uint8, device="meta")
            module.register_parameter(own, nn.Parameter(codes, requires_grad=False))
            for scale, shape, scale_dtype in scale_shapes_of(held):
                value = torch.empty(shape, dtype=scale_dtype, device="meta")
                module.register_parameter(scale, nn.Parameter(value, requires_grad=False))

    def update_weight_conversions(self, weight_conversions: Any, model: nn.Module) -> Any:
        """Adds converters that join scales as the model's converters join weights."""
        updated = []
        for converter in weight_conversions:
            updated += [converter, *scale_converters(converter, self.held.values())]
        return updated

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Makes FP8 Parameters of codes and scales."""
        if self.embeddings:
            self._decode_embeddings(model)
        matrices: dict[str, torch.Tensor] = {}
        for name, held in self.held.items():
            module = _owner(model, name)
            matrices[name] = matrix_of(_taken(module, held.scale), held)
            if held.input_scale is not None:
                self.input_scales[name] = _taken(module, held.input_scale)
        self.is_on_meta = any(scale.is_meta for scale in matrices.values())
        recipes = self._recipes(matrices)
        for owner in {_owner(model, name) for name in self.held}:
            if is_transposed(owner):
                hold_upright(owner)
        if self.is_on_meta:
            self.recipes = {name: recipes[held.stored.form] for name, held in self.held.items()}
            hold_without_values(model, self)
            return model
        for name, held in self.held.items():
            whole = len(held.shape) == 2 or held.parts == 1
            if not whole and form_of(recipes[held.stored.form]) is Form.BLOCK:
                pad_down_proj(_owner(model, name), held.shape[-2] // held.parts)
        for name, held in self.held.items():
            module, own = _owner(model, name), name.rpartition(".")[2]
            recipe, scale = recipes[held.stored.form], matrices.pop(name)
            self.recipes[name] = recipe
            if held.stored.form is Form.PACKED:
                del module.__dict__[own]
                codes = unpacked(_taken(module, own + PACKED))
            else:
                codes = _taken(module, own)
            weight, found = None, "scales that differ within a matrix of the model"
            if may_regroup(recipe, held):
                weight, lost = regrouped(codes, scale, held, recipe)
                found = f"{lost} values that blocks of 128x128 do not hold"
                self.regrouped.append(name)
            if weight is None and not keeps_bytes(recipe, scale, held):
                if self.quantization_config.recipe is None:
                    raise _needs_recipe(held, found)
                self.cast_again.append(name)
            if weight is None:
                weight = parameter_of(codes, scale, held, recipe)
            module.register_parameter(own, nn.Parameter(weight))
        if self.cast_again or self.regrouped:
            self._describe_anew(model)
        model.register_load_state_dict_pre_hook(FileLayout())
        return model

    def _decode_embeddings(self, model: Any) -> None:
        """Gives embeddings their values in the model's dtype, which files then have, too."""
        for name, held in self.embeddings.items():
            module, own = _owner(model, name), name.rpartition(".")[2]
            scale, codes = matrix_of(_taken(module, held.scale), held), _taken(module, own)
            if codes.is_meta:
                raise NotImplementedError(
                    "from_fp8_checkpoint: device_map must be of devices with memory for embeddings "
                    f"in FP8, which are decoded, got 'meta' and {held.key}"
                )
            value = decoded(codes, scale, held.stored.block).to(held.dtype)
            module.register_parameter(own, nn.Parameter(value))
        model.tie_weights()
        names = [name.removesuffix(".weight") for name in self.embeddings]
        original = self.quantization_config.original = dict(self.quantization_config.original)
        if original.get("modules_to_convert"):
            original["modules_to_convert"] = [
                each for each in original["modules_to_convert"]
                if not any(name == each or name.endswith(f".{each}") for name in names)
            ]  # fmt: skip
        warnings.warn(
            "from_fp8_checkpoint: embeddings in FP8 are held, and written, as values in "
            f"{next(iter(self.embeddings.values())).dtype}: {', '.join(names)}",
            stacklevel=2,
        )

    def _recipes(self, matrices: dict[str, torch.Tensor]) -> dict[Form, Recipe]:
        """Returns the recipe by which weights of each form are held, and sets ``recipe``."""
        counts: Counter[Form] = Counter()
        for held in self.held.values():
            counts[held.stored.form] += math.prod(held.shape)
        if self.recipe is not None:
            return dict.fromkeys(counts, self.recipe)
        assert self.checkpoint is not None
        if self.is_on_meta:
            pow2 = have_powers_of_two(self.files, self.checkpoint.weights.values())
        else:
            pow2 = all(
                are_powers_of_two(matrices[name])
                for name, held in self.held.items()
                if held.stored.form is Form.BLOCK
            )
        recipes: dict[Form, Recipe] = {
            Form.BLOCK: BlockScaling(pow2=pow2),
            Form.TENSOR: DelayedScaling() if self.checkpoint.static else CurrentScaling(),
            Form.CHANNEL: RowwiseScaling(
                activation_scale_ub=self.checkpoint.config.get("activation_scale_ub")
            ),
            Form.PACKED: BlockScaling(),
            Form.GROUP: BlockScaling(),
        }
        self.recipe = recipes[counts.most_common(1)[0][0]]
        return recipes

    def _describe_anew(self, model: Any) -> None:
        """Makes the model's files describe what it holds, after weights were cast again."""
        assert self.recipe is not None
        form = form_of(self.recipe)
        if form is None:
            return
        ignored = [
            name
            for name, module in model.named_modules()
            if f"{name}.weight" not in self.held and not isinstance(module, nn.Embedding)
            if getattr(module._parameters.get("weight"), "ndim", 0) == 2
        ]
        method = "compressed-tensors" if form is Form.CHANNEL else "fp8"
        export = Export(method, form.value, "dynamic")
        key, config = export.scale_key, quantization_config(export, ignored)
        self.quantization_config.original = config
        self.held = {name: cast_by(name, held, form, key) for name, held in self.held.items()}
        mapping = [c for c in model._weight_conversions if not joins_scales(c)]
        model._weight_conversions = self.update_weight_conversions(mapping, model)

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Any], dict]:
        """Returns the state dict with codes and scales under the names that the files give them."""
        self._check_form("save_pretrained")
        made = gathered_state if is_spread(model) else file_state
        return made(model, self.held, self._input_scales_now(model)), {}

    def file_entries(self, model: nn.Module) -> list[FileEntry]:
        """Returns the tensors of the files, which ranks that have parts of them gather."""
        self._check_form("export_fp8")
        return file_entries(model, self.held, self._input_scales_now(model))

    def _input_scales_now(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return input_scales_now(model, self.input_scales) if self.input_scales else {}

    def _check_form(self, owner: str) -> None:
        """Raises NotImplementedError for weights in a form that no file has."""
        if self.recipe is None or form_of(self.recipe) is None:
            raise NotImplementedError(
                f"{owner}: weights must be held by BlockScaling, RowwiseScaling, CurrentScaling or "
                f"DelayedScaling to be written in FP8, got {type(self.recipe).__name__}"
            )


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _initialized() -> torch.Tensor:
    """Returns what takes a Parameter's place for transformers' initialization of new ones."""
    value: Any = torch.empty(0, device="meta")
    value._is_hf_initialized = True
    return value


def _taken(module: nn.Module, name: str) -> torch.Tensor:
    """Returns the data of a Parameter that it takes from its module."""
    parameter = module._parameters.pop(name)
    assert parameter is not None
    return parameter.data


def _check_forms(weights: dict[str, Held]) -> None:
    """Raises an error for weights that no FP8 Parameter holds as they are."""
    for held in weights.values():
        form, block = held.stored.form, held.stored.block
        if Expected(form, block) not in (TENSOR, BLOCKS, CHANNEL, MXFP4, MXFP8):
            raise _needs_recipe(held, f"{form.value} scales of {list(block)}")


def _check_recipe(recipe: Recipe, weights: dict[str, Held]) -> None:
    """Raises an error for a recipe in whose form weights of the checkpoint cannot be written."""
    for held in weights.values():
        if held.stored.form is Form.PACKED and form_of(recipe) is not Form.BLOCK:
            raise NotImplementedError(
                "from_fp8_checkpoint: recipe must be None or BlockScaling for weights in MXFP4, "
                f"such as {held.key}, got {type(recipe).__name__}"
            )


def _needs_recipe(held: Held, found: str) -> NotImplementedError:
    return NotImplementedError(
        "from_fp8_checkpoint: recipe must be given, to quantize the decoded weights again, for "
        "weights whose scales are not one per weight, per row or per 128x128 block, got "
        f"{held.key} with {found}"
    )
