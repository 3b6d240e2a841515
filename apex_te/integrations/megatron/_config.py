"""Base of Megatron's layers, and reader of ``config`` and of Megatron's global state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...fp8.delayed.ranks import number_layer
from ...module._core.arguments import INIT_STD
from ...module._core.parallel import GroupHolder, checked_tp_size, divided, tag
from ...recipe import make_recipe

# Attributes of ``config`` that are read, each with its default. The comments say what None means.
DEFAULTS: dict[str, Any] = {
    "params_dtype": None,  # torch.get_default_dtype()
    "sequence_parallel": False,
    "gradient_accumulation_fusion": False,  # weight gradients go into main_grad
    "delay_wgrad_compute": False,
    "layernorm_epsilon": 1e-5,
    "normalization": "LayerNorm",  # or "RMSNorm"
    "layernorm_zero_centered_gamma": False,
    "tp_group": None,  # a process group
    "expert_tp_group": None,
    "tensor_model_parallel_size": None,  # the ranks of the group, else 1
    "expert_tensor_parallel_size": None,  # tensor_model_parallel_size
    "expert_model_parallel_size": 1,
    "pipeline_model_parallel_rank": None,  # that of Megatron's parallel_state, if it is in use
    "get_rng_state_tracker": None,
    "init_method": None,  # N(0, 0.023^2)
    "perform_initialization": True,  # False: new weights have no values yet
    "use_cpu_initialization": False,  # on the CPU; split weights are parts of one whole draw
    "init_model_with_meta_device": False,
    # False: FP8 weights are kept from one forward to the next until ``is_first_microbatch`` is set.
    "disable_parameter_transpose_cache": True,
    "fp8": None,  # a format, checked against
    "fp8_recipe": None,  # the recipe
    "use_gmm_fp8": True,  # False: grouped layers stay in high precision
}

EXPERT_RNG = "expert-parallel-rng"


def refuse(owner: str, name: str, wanted: object, got: object) -> NotImplementedError:
    """Returns the error for an argument that must have another value."""
    return NotImplementedError(f"{owner}: {name} must be {wanted}, got {got}")


class Layout(NamedTuple):
    """Split of a layer over tensor-parallel ranks; a ``group`` of None must be set before forward.

    ``explicit`` is True for an expert's layer if Megatron's dispatcher runs its collectives.
    ``allreduce`` is False if experts are spread over ranks, so that their gradients are reduced
    over fewer ranks; Megatron reads it.
    """

    group: Any
    ranks: int
    explicit: bool
    allreduce: bool


class Reader:
    """View of ``config`` for one layer that adds defaults (``DEFAULTS``) and checks."""

    def __init__(self, owner: str, config: Any) -> None:
        if config is None or isinstance(config, (dict, str, int, float)):
            raise TypeError(
                f"{owner}: config must be an object with attributes, got {type(config).__name__}"
            )
        self.owner = owner
        self.config = config
        self.recipe = self._checked_recipe()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name, DEFAULTS[name])

    def _checked_recipe(self) -> str | None:
        """Returns the recipe's command-line name, None if ``config`` does not turn FP8 on."""
        fp8, recipe = _plain(self.fp8), _plain(self.fp8_recipe)
        if not fp8:
            return None
        recipe = "delayed" if recipe is None else recipe
        try:
            make_recipe(recipe, fp8 if isinstance(fp8, str) else None)
        except ValueError as error:
            raise ValueError(
                f"{self.owner}: config.fp8 and config.fp8_recipe must go together: {error}"
            ) from error
        return recipe

    def layout(self, tp_group: Any, is_expert: bool) -> Layout:
        """Returns the split of the layer over the ranks of ``tp_group``."""
        group = tp_group
        if group is None:
            group = self.expert_tp_group if is_expert else self.tp_group
        if group is None:
            group = _megatron_group(is_expert)
        name = "tensor_model_parallel_size"
        if is_expert and self.expert_tensor_parallel_size is not None:
            name = "expert_tensor_parallel_size"
        size = getattr(self, name)
        if group is not None:
            ranks = checked_tp_size(self.owner, group, 1)
            if size not in (None, ranks):
                raise ValueError(
                    f"{self.owner}: config.{name} must be the {ranks} ranks of the group, "
                    f"got {size}"
                )
            size = ranks
        ranks = 1 if size is None else size
        experts = is_expert and self.expert_model_parallel_size > 1
        return Layout(group, ranks, is_expert and (ranks > 1 or experts), not experts)

    @property
    def device(self) -> torch.device:
        """Returns the device on which parameters are created, according to ``config``."""
        if self.init_model_with_meta_device:
            return torch.device("meta")
        if self.use_cpu_initialization or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def initializer(
        self, init_method: Any, dim: int, layout: Layout
    ) -> Callable[[torch.Tensor], Any]:
        """Returns the function that fills this rank's shard of a new weight, in place."""
        if init_method is None:
            init_method = self.init_method
        if init_method is not None and not callable(init_method):
            raise TypeError(
                f"{self.owner}: init_method must be a callable, got {type(init_method).__name__}"
            )
        if not self.perform_initialization:
            return _leave
        init_method = _normal if init_method is None else init_method
        tracker = self.tracker()
        if layout.explicit and tracker is not None:  # to the module itself it is not split

            def forked(weight: torch.Tensor) -> None:
                with tracker().fork(EXPERT_RNG):
                    init_method(weight)

            return forked
        if not self.use_cpu_initialization or layout.ranks == 1:
            return init_method
        if layout.group is None:
            raise ValueError(
                f"{self.owner}: tp_group must be given with config.use_cpu_initialization and "
                f"{layout.ranks} ranks, got None"
            )
        rank, ranks = torch.distributed.get_rank(layout.group), layout.ranks

        def part_of_whole(weight: torch.Tensor) -> None:
            shape = list(weight.shape)
            shape[dim] *= ranks
            whole = torch.empty(shape, dtype=torch.float32)
            init_method(whole)
            weight.copy_(whole.chunk(ranks, dim)[rank])

        return part_of_whole

    def tracker(self) -> Callable[[], Any] | None:
        """Returns ``config``'s or Megatron's function for the tracker of random states, or None."""
        if self.use_cpu_initialization:
            return None
        if self.get_rng_state_tracker is not None:
            return self.get_rng_state_tracker
        random: Any = sys.modules.get("megatron.core.tensor_parallel.random")
        if random is None or not random.get_cuda_rng_tracker().is_initialized():
            return None
        return random.get_cuda_rng_tracker

    def shared(self, layout: Layout, is_expert: bool) -> dict[str, Any]:
        """Returns keyword arguments that all linear modules of apex_te take."""
        ranks = 1 if layout.explicit else layout.ranks
        return {
            "sequence_parallel": bool(self.sequence_parallel) and not layout.explicit,
            "fuse_wgrad_accumulation": bool(self.gradient_accumulation_fusion),
            "delay_wgrad_compute": bool(self.delay_wgrad_compute),
            "tp_group": None if layout.explicit else layout.group,
            "tp_size": ranks,
            "get_rng_state_tracker": self.tracker(),
            "rng_tracker_name": EXPERT_RNG if is_expert and self.tracker() is not None else None,
            "params_dtype": self.params_dtype,
            "device": self.device,
        }

    def part(self, name: str, value: int, layout: Layout) -> int:
        """Returns ``value`` divided by the number of ranks, for an expert's layer that is split."""
        return divided(self.owner, name, value, layout.ranks)


def _leave(weight: torch.Tensor) -> None:
    """Leaves a new weight uninitialised, for a checkpoint to fill."""


def _normal(weight: torch.Tensor) -> None:
    """Fills a new weight with N(0, 0.023^2)."""
    torch.nn.init.normal_(weight, 0.0, INIT_STD)


def _plain(value: Any) -> Any:
    """Returns the value of an enum's member, such as Megatron's recipes; else ``value`` itself."""
    return getattr(value, "value", value)


def _megatron_group(is_expert: bool) -> Any:
    """Returns Megatron's tensor-parallel group, None if ``parallel_state`` is not initialised."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    if is_expert:
        return state.get_expert_tensor_parallel_group(check_initialized=False)
    return state.get_tensor_model_parallel_group(check_initialized=False)


def check_flags(owner: str, required: dict[str, tuple[Any, Any]], **flags: Any) -> None:
    """Checks that arguments have their required values, and that flags are bools."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{owner}: {name} must be a bool, got {type(value).__name__}")
    for name, (wanted, got) in required.items():
        if got != wanted:
            raise refuse(owner, name, wanted, got)


class MegatronLayer(torch.nn.Module):
    """Mixin that makes linear modules return ``(out, bias)`` and save sharded state dicts.

    Attributes:
        sharded_axes: dimension along which each split parameter is split over ranks, by name;
            parameters that every rank has in full are left out.
        is_first_microbatch: True until the first forward. A Megatron-style loop sets it to True
            before the first microbatch of a step, so that FP8 weights are cast anew. It is
            ignored if ``config.disable_parameter_transpose_cache`` is True.
        return_bias: True if forward returns a bias that it has not added.
    """

    sharded_axes: dict[str, int]
    return_bias: bool
    _several = False  # True for layers with the weights of several experts

    def _finish(self, read: Reader, layout: Layout, axes: dict[str, int]) -> None:
        """Sets attributes of the layer and its parameters, which are split along ``axes``."""
        self.is_first_microbatch = True
        self.disable_parameter_transpose_cache = bool(read.disable_parameter_transpose_cache)
        self.sharded_axes = axes if layout.ranks > 1 else {}
        self._shard_group = GroupHolder(layout.group)
        self._spread = not layout.allreduce
        number_layer(self, read.pipeline_model_parallel_rank, "stage")
        for name, parameter in self.named_parameters(recurse=False):
            if layout.explicit:
                tag(parameter, self.sharded_axes.get(name), False, layout.group)
            parameter.allreduce = layout.allreduce  # type: ignore[attr-defined]

    def _first(self, is_first_microbatch: bool | None) -> bool | None:
        """Returns the argument ``is_first_microbatch`` for the module's forward."""
        if is_first_microbatch is None and not self.disable_parameter_transpose_cache:
            is_first_microbatch = self.is_first_microbatch
        if self.is_first_microbatch:
            self.is_first_microbatch = False
        return is_first_microbatch

    def _paired(self, out: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns ``(out, bias)`` for the result of a module, which may be ``out`` alone."""
        return out if self.return_bias else (out, None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns a state dict in which split parameters are marked as shards of the full ones.

        If the program has imported Megatron, the entries are its sharded tensors, for
        ``dist_checkpointing``. Otherwise split parameters are DTensors over the tensor-parallel
        ranks, for ``torch.distributed.checkpoint``. Both share memory with the parameters, so
        loading in place fills these. FP8 state does not share memory: load it by
        ``load_state_dict``.

        Args:
            prefix: text before each key.
            sharded_offsets: as Megatron passes them; must be () without Megatron.
            metadata: as Megatron passes it; only the key ``dp_cp_group`` is read, if present.

        Raises:
            ValueError: ``sharded_offsets`` are given without Megatron, or no group is known.
            NotImplementedError: experts are spread over ranks, and Megatron is not imported or the
                module holds several experts.
        """
        owner, axes = type(self).__name__, self.sharded_axes
        group = getattr(self, "tp_group", None)
        if group is None:
            group = self._shard_group.group
        megatron: Any = sys.modules.get("megatron.core.transformer.utils")
        if self._spread and (megatron is None or self._several):
            raise refuse(
                owner, "sharded_state_dict", "of layers that all ranks have",
                "experts of this rank (config.expert_model_parallel_size above 1)",
            )  # fmt: skip
        if megatron is not None:
            more: dict[str, Any] = {}
            if metadata is not None and "dp_cp_group" in metadata:
                more = {"tp_group": group, "dp_cp_group": metadata["dp_cp_group"]}
            return megatron.make_sharded_tensors_for_checkpoint(
                self.state_dict(keep_vars=True), prefix, axes, sharded_offsets, **more
            )
        if sharded_offsets:
            raise ValueError(
                f"{owner}: sharded_offsets must be () without Megatron, got {sharded_offsets}"
            )
        state = self.state_dict()
        if axes and group is None:
            raise ValueError(
                f"{owner}: set_tensor_parallel_group must be called before sharded_state_dict"
            )
        if axes:
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.tensor import DTensor, Shard

            mesh: Any = None
            for name, dim in axes.items():
                if name in state:
                    value = state[name]
                    if mesh is None:
                        mesh = DeviceMesh.from_group(group, value.device.type)
                    state[name] = DTensor.from_local(value, mesh, [Shard(dim)], run_check=False)
        return {prefix + name: value for name, value in state.items()}
