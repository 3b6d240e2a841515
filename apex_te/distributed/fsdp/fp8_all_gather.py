"""FSDP2 whose all-gathers carry weights as FP8 data, of one byte per element.

The shards stay in bf16 or fp32. Before an all-gather each rank casts its rows with the scale of the
whole weight; the gathered FP8 data are the weight's rowwise copy, from which each rank makes the
columnwise copy. With delayed scaling the scale is that of the module's FP8 state: the forward that
reads the weight stages the amax of this rank's rows, which the update reduces over ranks with all
other amax values. With current scaling and HiF8 the amax values of all weights are computed in one
pass and reduced in one collective, at the first all-gather after weights have changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ...fp8.parameter.dispatch import KERNEL_DTYPES
from ...fp8.parameter.fsdp_gather import check_resharding, replace
from ...fp8.parameter.parameter import FP8Parameter
from ...fp8.tensor import QuantizedTensor
from ...recipe import Recipe, chosen_recipe
from ...runtime.named_arguments import check_model, named_arguments
from .gather_set import GatheredParam, GatherGroup, GatherSet, GatherUnit, params_gathered_with
from .sharded_weight import ShardedWeight, local_of


@named_arguments()
def enable_fp8_all_gather(model: torch.nn.Module, recipe: Recipe | str | None = None) -> None:
    """Makes ``fully_shard`` gather the weights of FP8 GEMMs as FP8 data, one byte per element.

    Call it once, on the whole model, before ``fully_shard`` and before an optimizer is made.
    Sharded parameters, their gradients and state dicts stay in bf16 or fp32. ``fp8_autocast`` must
    quantize weights as ``recipe`` does. Enter it before the sharded modules run: GEMMs then get the
    same FP8 data and scales as from weights gathered in bf16 or fp32. Weights gathered before the
    region, or kept by FSDP2 over several regions, have the scales of the time of their gather.
    Outside ``fp8_autocast`` modules compute with the values that the FP8 data represent. Weights
    held in FP8 (``fp8_model_init``) are always gathered as FP8 data, without this call. For a deep
    copy of a model, call it again.

    Args:
        model: module that contains FP8 modules; their weight parameters are replaced.
        recipe: how weights are quantized, a recipe or its name; None is ``DelayedScaling()``.
            Delayed scaling needs ``reduce_amax=True`` and an ``fp8_group`` with all ranks of a
            weight's shards. For block scaling, all shards must have the same number of rows, a
            multiple of 128.

    Raises:
        TypeError: an argument has a wrong type, or a weight is not float32, float16 or bfloat16.
        ValueError: the model is already sharded or enabled, or has no FP8 module with a weight in
            bf16 or fp32; in forward, the recipe of ``fp8_autocast`` quantizes weights differently,
            or its ``fp8_group`` lacks ranks that have shards.
        NotImplementedError: the recipe (MXFP8, for example) cannot make a weight's transpose from
            its FP8 data, or a weight's parts cut a block; in forward, shards cut a block, or
            ``fully_shard(reshard_after_forward=<int>)`` would shard FP8 data.
    """
    recipe = chosen_recipe("enable_fp8_all_gather", "recipe", recipe)
    check_model("enable_fp8_all_gather", model)
    gather_set = GatherSet(recipe)
    if not gather_set.layout.exact:
        raise NotImplementedError(
            "enable_fp8_all_gather: recipe must be one whose columnwise weights can be made of "
            f"their FP8 data, got {gather_set.name}"
        )
    found: dict[torch.Tensor, HookedParam] = {}  # a parameter of several modules is one
    for module in model.modules():
        if hasattr(module, "_gemm_weights"):
            _add_weights(gather_set, module, found)
    if not found:
        raise ValueError(
            "enable_fp8_all_gather: model must have FP8 modules with weights in high precision, "
            "got none"
        )
    new = {old: _parameter(old, param) for old, param in found.items()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in new:
                module._parameters[name] = new[parameter]


def _add_weights(
    gather_set: GatherSet, module: Any, found: dict[torch.Tensor, HookedParam]
) -> None:
    """Registers the weights of an FP8 module, also in its ``_modes.gathered``, to be gathered."""
    block = gather_set.layout.block_rows
    for gemm, names in enumerate(module._gemm_weights()):
        unit = GatherUnit(gather_set, module, gemm)
        for name in names:
            weight = module._parameters[name]
            if weight in found or type(weight) is FP8Parameter:
                continue
            _check(name, weight)
            if block and name != names[-1] and weight.shape[0] % block:
                raise NotImplementedError(
                    f"enable_fp8_all_gather: parts of a weight must be of whole {block}-row "
                    f"blocks, got {list(weight.shape)} for {name}"
                )
            param = found[weight] = HookedParam(unit, name)
            unit.params.append(param)
            module._modes.gathered[name] = param
        if unit.params:
            gather_set.units.append(unit)


def _parameter(old: torch.Tensor, param: HookedParam) -> torch.nn.Parameter:
    """Returns a ``ShardedWeight`` parameter of ``param`` with values and attributes of ``old``."""
    new = torch.nn.Parameter(ShardedWeight.of(old.detach(), param), old.requires_grad)
    for name, value in vars(old).items():
        setattr(new, name, value)
    return new


def _check(name: str, weight: torch.Tensor) -> None:
    """Raises the error of ``enable_fp8_all_gather`` for a parameter that it cannot replace."""
    if local_of(weight) is not None:
        raise ValueError(
            "enable_fp8_all_gather: model must not be sharded yet (call it before fully_shard, and "
            "split layers by tp_group=, not by styles such as LayerParallel), got a DTensor as "
            f"{name}"
        )
    if type(weight) is ShardedWeight:
        raise ValueError(f"enable_fp8_all_gather: must be called once, got {name} a second time")
    if weight.dtype not in KERNEL_DTYPES:
        raise TypeError(
            "enable_fp8_all_gather: weights must be float32, float16 or bfloat16, got "
            f"{weight.dtype} for {name}"
        )


class HookedParam(GatheredParam):
    """Weight parameter that is gathered as FP8 data; implements FSDP2's two all-gather hooks."""

    _together: GatherGroup | None = None

    def renew(self, module: torch.nn.Module) -> None:
        """Makes the module's parameter a ``ShardedWeight`` again if torch has replaced it."""
        self.changes += 1
        parameter: Any = module._parameters.get(self.name)
        shard = local_of(parameter)
        if type(shard) is torch.Tensor:
            parameter._local_tensor = ShardedWeight.of(shard.detach(), self)
        elif shard is None and type(parameter) is torch.nn.Parameter:
            module._parameters[self.name] = _parameter(parameter, self)

    def payload(
        self, shard: ShardedWeight, mesh: Any, size: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Quantizes this rank's rows; implements the hook ``fsdp_pre_all_gather``.

        Returns ``(inputs, context)``. ``inputs`` are the tensors to gather: uint8 FP8 data, padded
        to equally many rows on each rank, and with block scaling ``scale_inv``. FSDP2 passes
        ``context`` to ``whole``.
        """
        ready = self.ready
        if ready is not None:  # made as the first of those that are gathered with it was asked
            self.ready = None
            return ready
        dtype = mp_policy.param_dtype
        if dtype is not None and dtype not in KERNEL_DTYPES:
            raise TypeError(
                "enable_fp8_all_gather: param_dtype must be float32, float16 or bfloat16, got "
                f"{dtype}"
            )
        if mesh is not self.mesh and mesh != self.mesh:
            self._meet(mesh, size)
        assert self._together is not None
        if self._together.params[0] is self and self._together.quantize(shard, dtype):
            ready, self.ready = self.ready, None
            return ready
        self.size = size
        return self._payload_alone(shard.plain(), dtype)

    def _meet(self, mesh: Any, size: Any) -> None:
        """Stores mesh, process group and whole shape in the first gather on a mesh."""
        check_resharding("enable_fp8_all_gather", self.unit.module())
        self.mesh, self.size, self.ranks = mesh, size, mesh.size()
        self.group = mesh.get_group() if self.ranks > 1 else None
        if self._together is None:
            together = GatherGroup(params_gathered_with(self))
            for param in together.params:
                param._together = together  # type: ignore[attr-defined]

    def _payload_alone(
        self, x: torch.Tensor, dtype: torch.dtype | None
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Does what ``payload`` does, for this parameter alone."""
        self._check_shard(x)
        if dtype is not None and dtype is not x.dtype:
            x = x.to(dtype)
        fp8_data, scale_inv, note = self.unit.quantized(self, x)
        fp8_data = fp8_data.view(torch.uint8)
        rows = -(-self.size[0] // self.ranks)
        if fp8_data.shape[1] == self.size[1] and fp8_data.shape[0] != rows:
            fp8_data = functional.pad(fp8_data, (0, 0, 0, rows - fp8_data.shape[0]))
        has_blocks = self.unit.gather_set.layout.block_rows
        inputs = (fp8_data, scale_inv) if has_blocks else (fp8_data,)
        return inputs, (note, scale_inv, self.size, False)

    def _check_shard(self, x: torch.Tensor) -> None:
        """Raises NotImplementedError, on all ranks, for shards that cut a block."""
        block, size = self.unit.gather_set.layout.block_rows, self.size
        if not block or self.ranks == 1:
            return
        if x.shape[1] != size[1] or size[0] % (block * self.ranks):
            raise NotImplementedError(
                f"enable_fp8_all_gather: shards must be rows in whole {block}-row blocks, as many "
                f"on each of {self.ranks} ranks, got {list(size)} for {self.name}"
            )

    def whole(
        self, outputs: tuple[torch.Tensor, ...], context: Any, dtype: torch.dtype, out: Any
    ) -> Any:
        """Makes the weight from the gathered FP8 data; implements ``fsdp_post_all_gather``."""
        note, scale_inv, size, kept = context
        if len(outputs) > 1:  # with one rank FSDP2 hands over the first only
            scale_inv = outputs[1]
        fp8_data = outputs[0]
        if fp8_data.shape != size:
            fp8_data = fp8_data.view(-1)[: size[0] * size[1]].view(size)
        fp8_dtype = note.settings[1]
        fp8_data = fp8_data.view(fp8_dtype)
        if not kept and fp8_data.is_cuda:
            # Made on FSDP2's stream of copies, read by the stream of GEMMs.
            stream = torch.cuda.current_stream()
            for tensor in (scale_inv, note.amax):
                if tensor is not None:
                    tensor.record_stream(stream)
        held = QuantizedTensor(fp8_data, scale_inv, None, None, fp8_dtype)
        if out is not None:
            replace(out, held, note)
            return None
        whole = FP8Parameter(held, self.unit.gather_set.stored, dtype)
        whole._gathered = note
        return whole, ()
