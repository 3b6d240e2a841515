"""Base of the FP8 modules: a call's settings, FP8 state, cached FP8 weights, saving and moving."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ...fp8.autocast import Region, graph_task_id, local
from ...fp8.delayed.compiled import follow_traced_region
from ...fp8.delayed.ranks import intern
from ...fp8.delayed.serialize import NAMES, read_state, save_state
from ...fp8.delayed.state import FP8State
from ...fp8.module_fp8 import ModuleFP8
from ...fp8.parameter.operands import dequantized, fp8_operands, record_weight
from ...fp8.parameter.parameter import FP8Parameter
from ...fp8.tensor import QuantizedTensor
from ...runtime import invariance
from ...runtime.stamp import stamp
from ...runtime.tracing import is_transformed, refuse_state
from .arguments import autocast_dtype, shown_name
from .fp8_entries import joined_scales, save_parameters
from .gemm import FP8Call, GemmOptions, as_matrix, with_independent_rows
from .kept_weights import KeptWeights, tensors_of
from .plain_functions import HighPrecisionLinearFunction
from .programs import Programs, is_autocast, programs_of
from .weight_cache import CapturedWeights, WeightCache

if TYPE_CHECKING:
    from ...fp8.scheme import GemmQuantizers
    from ...recipe import Recipe

STATE_PREFIX = "fp8_state."
_DEFAULTS = GemmOptions()
_SAVES_INPUT = GemmOptions(save_original=True)
_PLAIN = FP8Call(torch.float32, False, None, (), (), None)  # of which only ``is_fp8`` is read


@functools.cache
def _say_cache_is_off() -> None:
    """Warns, once, that FSDP2 leaves no weight whose FP8 copies could be cached."""
    warnings.warn(
        "apex_te: is_first_microbatch keeps no FP8 weights under fully_shard, which frees the "
        "weights they are made of; apex_te.distributed.enable_fp8_all_gather gathers FP8 data",
        stacklevel=4,
    )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Modes:
    """State of an FP8 module between its calls; has slots, because nn.Module's setattr is slow.

    Attributes:
        captured: FP8 weights of a CUDA graph in warm-up and capture, instead of ``weight_cache``.
        gathered: ``HookedParam`` by name; its ``renew(module)`` follows a moved parameter.
        plain: ``Programs`` of ops in bf16 or fp32.
        programs: ``Programs`` by the ids of the quantizers and the kept tensors that they hold.
        in_ddp: the last call except recomputes ran under DistributedDataParallel.
        independent_rows: the last call except recomputes ran under ``batch_invariant``.
        kept: FP8 weights that stay between steps; None unless ``keep_fp8_weights`` was called.
        part: ``grouped.parts.Part`` that the module computes of a call, None for all of it.
        recompute: quantizers for a recompute of the last call, if that call recorded amax values.
        recompute_saves: ``(keep_columnwise, small)`` of ``FP8Call`` for that recompute.
        splits: the last ``m_splits`` that ``GroupedLinear`` copied to the device, and the copy.
    """

    __slots__ = (
        "captured", "gathered", "in_ddp", "independent_rows", "kept", "part", "plain", "programs",
        "recompute", "recompute_fp8", "recompute_saves", "splits", "weight_cache", "wgrad_store",
    )  # fmt: skip

    def __init__(self) -> None:
        self.captured: CapturedWeights | None = None
        self.in_ddp = False
        self.independent_rows = False
        self.kept: KeptWeights | None = None
        self.part: Any = None
        self.recompute: tuple[GemmQuantizers, ...] | None = None
        self.recompute_fp8 = False
        self.recompute_saves = (False, False)
        self.weight_cache = WeightCache()
        self.wgrad_store: list[Callable[[], None]] = []
        self.gathered: dict[str, Any] = {}
        self.programs: dict[Any, Programs] = {}
        self.plain = Programs(())
        self.splits: tuple[tuple[int, ...], torch.Tensor] | None = None


class FP8Module(torch.nn.Module):
    """Base of modules with GEMMs, which gives a module one FP8 state for all its GEMMs.

    A module's ``forward`` passes tensors to ``_call``. That prepares an ``FP8Call``, the settings
    of the call, and passes it to the module's ``_run``.
    """

    _get_name = shown_name
    _fp8: ModuleFP8
    _modes: Modes
    tp_size = 1
    fuse_wgrad_accumulation = False
    delay_wgrad_compute = False
    save_original_input = False
    can_separate_rows = False  # under ``batch_invariant``
    joins_weights = False  # each forward makes the weight from several parameters
    can_keep_weights = True  # by ``keep_fp8_weights``

    def _make_fp8_state(self, gemms: int = 1) -> None:
        # Plain attributes, not buffers: DDP would broadcast buffers and half() would cast them.
        self._fp8 = ModuleFP8(gemms, self)
        self._modes = Modes()

    @property
    def fp8_state(self) -> FP8State:
        """Returns the module's FP8 state; state dicts have it as ``fp8_state.*``."""
        return self._fp8.state

    def _state_device(self) -> torch.device:
        """Returns the device of the parameters, else that of the FP8 state, else the CPU."""
        for parameter in self._parameters.values():
            if parameter is not None:
                return parameter.device
        return self.fp8_state.device if self.fp8_state.allocated else torch.device("cpu")

    def _init_fp8_state(self, recipe: Recipe) -> None:
        """Allocates the FP8 state for ``recipe``, if the recipe keeps one and there is none yet."""
        if recipe.keeps_state and not self.fp8_state.allocated:
            self._fp8.adapt(*intern(recipe), self._state_device())

    def _call(
        self,
        inp: torch.Tensor,
        features: int,
        parameters: tuple[Any, ...],
        weights: tuple[torch.Tensor, ...],
        is_first_microbatch: bool | None,
        *args: Any,
    ) -> Any:
        """Returns ``self._run(call, inp, *args)``, computed without ``torch.autocast``.

        Every call of every FP8 module passes here. Outside of autocast ``parameters``, whose
        first one is a tensor, must have the dtype of ``inp``. ``weights`` are those whose FP8
        copies may be cached, one for each GEMM; empty if the module caches them itself.
        """
        device_type = inp.device.type
        autocast = is_autocast(device_type)
        checked = self._compute_dtype if self.tp_size == 1 else self._agreed_dtype
        dtype = checked(inp, features, parameters, autocast)
        if autocast:
            with torch.autocast(device_type, enabled=False):
                call = self.prepare(dtype, parameters[0].device, weights, is_first_microbatch)
                return self._run(call, inp, *args)
        call = self.prepare(dtype, parameters[0].device, weights, is_first_microbatch)
        return self._run(call, inp, *args)

    def _known_call(
        self, inp: torch.Tensor, features: int, parameters: tuple[torch.Tensor | None, ...]
    ) -> FP8Call | None:
        """Returns in a few steps the settings that ``_call`` would prepare for default options.

        ``_PLAIN`` stands for a call outside of FP8; None means that ``_call`` must be used.
        """
        if torch.compiler.is_compiling():  # must not come to depend on earlier calls
            return None
        dtype, shape, modes = inp.dtype, inp.shape, self._modes
        if (
            self.tp_size != 1
            or invariance.local.enabled
            or modes.independent_rows
            or self.fuse_wgrad_accumulation
            or self.delay_wgrad_compute
            or torch._C._is_any_autocast_enabled()
            or not shape
            or shape[-1] != features
        ):
            return None
        for p in parameters:
            if p is not None and (p.dtype is not dtype or type(p) is not torch.nn.Parameter):
                return None
        region = local.region
        if region is None or not (region.enabled or region.calibrating):
            return _PLAIN if modes.recompute is None else None
        if (
            not region.enabled
            or not region.records
            or region.keep_columnwise_weights
            or modes.captured is not None
            or modes.kept is not None
            or graph_task_id() != -1
            or not torch.is_grad_enabled()
        ):
            return None
        sets = self._fp8.active(region.recipe_key, region.amax_group)
        if sets is None:
            return None
        programs = modes.programs.get(id(sets.recording))
        if programs is None or not programs.is_usable():
            return None
        small, saves = region.save == "small", self.save_original_input
        call = programs.calls.get((dtype, False, small, saves) if small or saves else dtype)
        if call is None:
            return None
        modes.recompute, modes.recompute_fp8 = sets.recompute, True
        modes.recompute_saves = (False, small)
        return call

    def _separates_rows(self) -> bool:
        """Returns True if this call runs under ``batch_invariant``; checks that it can."""
        modes = self._modes
        found = invariance.current(modes.independent_rows)
        if not torch.compiler.is_compiling():
            modes.independent_rows = found
        if not found:
            return False
        name = type(self).__name__
        if not self.can_separate_rows:
            text = "batch_invariant must be off for this module, got on"
            raise NotImplementedError(f"{name}: {text}")
        if self.tp_size > 1:
            raise NotImplementedError(
                f"{name}: tp_size must be 1 under batch_invariant, because the order in which"
                f" ranks are summed may depend on the number of rows, got {self.tp_size}"
            )
        return True

    def prepare(
        self,
        dtype: torch.dtype,
        device: torch.device,
        weights: tuple[torch.Tensor, ...],
        is_first_microbatch: bool | None,
    ) -> FP8Call:
        """Decides all settings of a call of the module before the call computes anything.

        Args:
            weights: the weights whose FP8 copies may be cached: one for each GEMM, or an empty
                tuple.
        """
        options = self._options(is_first_microbatch)
        sets, is_fp8, recomputed = self._select(device)
        if self._separates_rows():
            options = options._replace(independent_rows=True)
            if is_fp8:
                assert sets is not None
                name, region = type(self).__name__, local.region
                recipe = None if region is None else region.recipe
                sets = tuple(with_independent_rows(name, recipe, each) for each in sets)
        keep, small = self._saves(recomputed) if is_fp8 else (False, False)
        programs = None
        gemms = len(weights) or 1
        cached: tuple[QuantizedTensor | None, ...] = (None,) * gemms
        if is_fp8 and is_first_microbatch is None and self._modes.kept is not None:
            assert sets is not None
            found = [self._kept(i, w, sets[i], recomputed) for i, w in enumerate(weights)]
            cached = tuple(found) if found else cached
        usual = options is _DEFAULTS or options is _SAVES_INPUT
        if is_fp8 and usual and is_first_microbatch is None and self.tp_size == 1:
            assert sets is not None
            programs = self._programs(sets, cached)
            saves = options is _SAVES_INPUT
            key = (dtype, keep, small, saves) if keep or small or saves else dtype
            if programs is not None and key in programs.calls:
                return programs.calls[key]
        each = (options,) * gemms if self.tp_size == 1 else self._split_options(options, gemms)
        # A recompute repeats the forward that filled the cache.
        fill = False if is_first_microbatch and recomputed else is_first_microbatch
        if is_fp8 and (fill is not None or self._modes.captured is not None):
            assert sets is not None
            cached = self._cached_weights(weights, sets, fill)
        call = FP8Call(dtype, is_fp8, sets, cached, each, fill, programs, keep, small)
        if programs is not None:
            programs.calls[key] = call
        return call

    def _programs(
        self,
        quantizers: tuple[GemmQuantizers, ...],
        cached: tuple[QuantizedTensor | None, ...],
    ) -> Programs | None:
        """Returns the ``Programs`` for a call with default options; None if ops must be called."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        modes = self._modes
        if modes.captured is not None:
            return None
        if modes.kept is None:
            return programs_of(modes.programs, quantizers)
        return programs_of(modes.programs, quantizers, tensors_of(cached))

    def _saves(self, recomputed: bool) -> tuple[bool, bool]:
        """Returns ``keep_columnwise`` and ``small`` of this call's ``FP8Call``."""
        modes = self._modes
        region = local.region
        # A recompute without a recorded forward has entered the region itself.
        if region is None or (recomputed and modes.recompute is not None):
            return modes.recompute_saves if recomputed else (False, False)
        # FSDP2 frees the weights after forward, which copies of them would undo.
        keep = region.keep_columnwise_weights and not self.__dict__.get("_is_fsdp_managed_module")
        small = region.save == "small"
        # A weight that forward joins would be saved itself, in more bytes.
        saves = keep or (small and self.joins_weights), small
        if region.records and not torch.compiler.is_compiling():
            modes.recompute_saves = saves
        return saves

    def _run(self, call: FP8Call, inp: torch.Tensor, *args: Any) -> Any:
        """Computes the module's output as ``call`` says; each module defines it."""
        raise NotImplementedError

    def _agreed_dtype(self, *args: Any) -> torch.dtype:
        """Returns the dtype to compute in; ``ParallelModule`` also compares it over ranks."""
        return self._compute_dtype(*args)

    def _split_options(self, options: GemmOptions, gemms: int) -> tuple[GemmOptions, ...]:
        """Returns one ``GemmOptions`` for each GEMM; ``ParallelModule`` adds the collectives."""
        return (options,) * gemms

    def _select(self, device: torch.device) -> tuple[tuple[GemmQuantizers, ...] | None, bool, bool]:
        """Returns ``(quantizers, is_fp8, is_recompute)`` of this call.

        Without ``is_fp8`` quantizers only stage amax values; they are None if nothing is staged,
        either.
        """
        compiling = torch.compiler.is_compiling()
        modes = self._modes
        region = local.region
        if not compiling and graph_task_id() != -1:
            if modes.recompute is None and region is not None and region.in_backward:
                return self._select_in_backward(region, device)
            return modes.recompute, modes.recompute_fp8, True
        if region is None:
            if not compiling:
                modes.recompute = None
                modes.recompute_fp8 = False
            return None, False, False
        fp8 = region.enabled
        # On the meta device there are shapes only, the same in FP8, and no state to begin.
        if (not fp8 and not region.calibrating) or device.type == "meta":
            if region.records and not compiling:
                modes.recompute = None
                modes.recompute_fp8 = False
            return None, False, False
        key = region.recipe_key
        if region.recipe.keeps_state and (region.records or not self._fp8.state.allocated):
            refuse_state(type(self).__name__)
        sets = self._fp8.quantizers(key, region.recipe, device, region.records, region.amax_group)
        if region.records:
            if compiling:
                follow_traced_region(region.traced, self._fp8, key)
            if not compiling:
                modes.recompute = sets.recompute
                modes.recompute_fp8 = fp8
            return sets.recording, fp8, False
        if not fp8:
            return None, False, False
        # A CUDA graph outlives the region, with whose entry those scales are made.
        if region.previewed and not (not compiling and _is_capturing(device)):
            return sets.previewed, True, False
        return sets.frozen, True, False

    def _select_in_backward(
        self, region: Region, device: torch.device
    ) -> tuple[tuple[GemmQuantizers, ...] | None, bool, bool]:
        """Chooses the quantizers of a recompute that enters its region itself.

        Its forward has recorded nothing: torch's reentrant checkpoint runs it under no_grad.
        """
        if not region.enabled or device.type == "meta":
            return None, False, True
        key, recipe = region.recipe_key, region.recipe
        sets = self._fp8.quantizers(key, recipe, device, False, region.amax_group)
        return sets.frozen, True, True

    def _compute_dtype(
        self,
        inp: torch.Tensor,
        features: int,
        parameters: tuple[torch.Tensor | None, ...],
        autocast: bool,
    ) -> torch.dtype:
        """Returns ``torch.autocast``'s dtype, else that of the input and all parameters."""
        shape = inp.shape
        if not shape or shape[-1] != features:
            raise ValueError(
                f"{type(self).__name__}: inp must have a last dimension of {features}, "
                f"got {list(shape)}"
            )
        if autocast and (dtype := autocast_dtype(type(self).__name__, "inp", inp)) is not None:
            return dtype
        dtype = inp.dtype
        for parameter in parameters:
            if parameter is not None and parameter.dtype is not dtype:
                raise TypeError(
                    f"{type(self).__name__}: inp must have the dtype of the parameters outside "
                    f"torch.autocast, {parameter.dtype}, got {dtype}"
                )
        return dtype

    def _options(self, is_first_microbatch: bool | None) -> GemmOptions:
        """Returns the options that all GEMMs of this call share, without collectives."""
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
            raise TypeError(  # 1, taken for True here and not there, would mix gradients
                f"{type(self).__name__}: is_first_microbatch must be None or a bool, "
                f"got {type(is_first_microbatch).__name__}"
            )
        accumulate = None
        in_ddp = False
        if self.fuse_wgrad_accumulation:
            accumulate = is_first_microbatch is not True
            in_ddp = DistributedDataParallel._active_ddp_module is not None
            in_ddp = in_ddp or self._has_ddp_hooks()
            if not torch.compiler.is_compiling():
                modes = self._modes
                if graph_task_id() == -1:
                    modes.in_ddp = in_ddp
                in_ddp = modes.in_ddp  # a recompute, in backward, is what its first run was
                if modes.part is not None:
                    accumulate = modes.part.accumulate
        wgrad_store = None
        if self.delay_wgrad_compute:
            if torch.compiler.is_compiling() and torch.is_grad_enabled():
                raise NotImplementedError(
                    f"{type(self).__name__}: delay_wgrad_compute must be False inside of a graph "
                    "of torch.compile, whose tensors are gone after backward, got True"
                )
            wgrad_store = self._modes.wgrad_store.append
        if accumulate is None and wgrad_store is None:
            return _SAVES_INPUT if self.save_original_input else _DEFAULTS
        return GemmOptions(accumulate, self.save_original_input, wgrad_store, None, in_ddp)

    def _has_ddp_hooks(self) -> bool:
        """Returns True if DistributedDataParallel's "python_reducer" hooked the parameters."""
        return any(
            getattr(getattr(hook, "func", hook), "__module__", "")
            == DistributedDataParallel.__module__
            for parameter in self._parameters.values()
            if parameter is not None
            for hook in (parameter._post_accumulate_grad_hooks or {}).values()
        )

    # torch.compile does not see hooks: asked while it traces.
    _has_ddp_hooks._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def backward_dw(self) -> None:
        """Computes the weight gradients that ``delay_wgrad_compute=True`` left out of backward.

        Adds them to ``.grad``, or with ``fuse_wgrad_accumulation`` to ``main_grad``. Does nothing
        if none are pending, such as in a second call.
        """
        store = self._modes.wgrad_store  # the same list for forwards whose backward is to come
        waiting = store.copy()
        store.clear()
        for compute in waiting:
            compute()

    def _linear(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: FP8Call,
        gemm: int = 0,
    ) -> torch.Tensor:
        """Computes ``inp @ weight.T + bias`` in bf16 or fp32; calibrating records amax values."""
        dtype, options = call.dtype, call.options[gemm]
        quantizers = None if call.quantizers is None else call.quantizers[gemm]
        if quantizers is not None:
            with torch.no_grad():
                quantizers.input.record(as_matrix(inp))
                record_weight(weight, quantizers.weight)
        own_wgrad = options.accumulate is not None or options.wgrad_store is not None
        own_wgrad = own_wgrad and weight.requires_grad and torch.is_grad_enabled()
        if own_wgrad or options.parallel is not None or options.independent_rows:
            out = HighPrecisionLinearFunction.apply(inp, weight, bias, dtype, options)
        else:
            inp, weight = inp.to(dtype), weight.to(dtype)
            out = functional.linear(inp, weight, None if bias is None else bias.to(dtype))
        if quantizers is not None and out.requires_grad:
            grad_output = quantizers.grad_output
            out.register_hook(lambda grad: grad_output.record(as_matrix(grad.detach())))
        return out

    def _kept(
        self,
        gemm: int,
        weight: torch.Tensor,
        quantizers: GemmQuantizers,
        recomputed: bool = False,
        for_cache: bool = False,
    ) -> QuantizedTensor | None:
        """Returns the FP8 copies of a weight that ``keep_fp8_weights`` keeps; None without any."""
        modes, region = self._modes, local.region
        if (
            modes.kept is None
            or not self.can_keep_weights
            or modes.captured is not None
            or not (recomputed or (region is not None and region.records))
            or torch.compiler.is_compiling()
            or _is_capturing(weight.device)
            or weight.device.type == "meta"
            or self.__dict__.get("_is_fsdp_managed_module", False)
            or is_transformed((weight,))
        ):
            return None
        return modes.kept.copies(self._fp8, gemm, weight, quantizers.weight, for_cache)

    def _keep_fp8_weights(self, enabled: bool) -> None:
        """Keeps FP8 copies of weights from the next forward on, or drops them."""
        self._modes.kept = KeptWeights() if enabled else None
        self._modes.weight_cache.clear()
        self._modes.programs.clear()

    def _cached_weight(
        self, weight: torch.Tensor, quantizers: GemmQuantizers, fill: bool, gemm: int = 0
    ) -> QuantizedTensor:
        """Returns both FP8 copies of ``weight``, cached ones if up to date, or its own FP8 data."""
        if type(weight) is FP8Parameter:
            held = fp8_operands(weight, quantizers, True, keep=True)
            if held is not None:
                return held
        sources = self._weight_sources(weight)
        stamps = tuple([stamp(source) for source in sources])
        key = stamps, type(quantizers.weight_recast), quantizers.weight_recast.dtype

        def cast() -> QuantizedTensor:
            # A later training step may need what an evaluation in inference mode cached.
            kept = self._kept(gemm, weight, quantizers, for_cache=True)
            if kept is not None:
                return kept
            with torch.inference_mode(False), torch.no_grad():
                values = dequantized(weight).contiguous()
                return quantizers.weight.quantize(values, True, True)[0]

        copies: QuantizedTensor = self._modes.weight_cache.copies(gemm, key, fill, cast)
        return copies

    def _traced_weight(
        self, gemm: int, weight: torch.Tensor, quantizer: Any, fill: bool
    ) -> QuantizedTensor | None:
        """Returns both FP8 copies of ``weight`` that compiled code keeps; ``fill`` casts again.

        None lets the GEMM cast the weight: it is held in FP8, or its scale comes from the weight
        itself, so that a new cast gives the same FP8 data.
        """
        if type(weight) is FP8Parameter:
            return None
        sources = self._weight_sources(weight)
        with torch.no_grad():
            weight = dequantized(weight).contiguous()
            scaling = quantizer.known_scale(weight)
            if scaling is None:
                return None
            kept = self._fp8.traced_weight(gemm, quantizer.dtype, *weight.shape, len(sources))
            scale, amax = scaling
            return kept.quantized(weight, sources, scale, amax, fill)

    def _weight_sources(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the parameters that make up ``weight``; their versions tell if it changed."""
        return (weight,)

    def _cached_weights(
        self,
        weights: tuple[torch.Tensor, ...],
        quantizers: tuple[GemmQuantizers, ...],
        fill: bool | None,
    ) -> tuple[QuantizedTensor | None, ...]:
        """Returns for each GEMM FP8 copies of its weight that outlive the call, or None."""
        captured = self._modes.captured
        if captured is not None:
            return tuple(
                captured.quantized(gemm, weight, self._weight_sources(weight), quantizers[gemm])
                for gemm, weight in enumerate(weights)
            )
        if fill is None or self._sharded_by_fsdp(weights):
            return (None,) * len(weights)
        if torch.compiler.is_compiling():
            region = local.region
            if fill and region is not None and not region.records:
                # An evaluation leaves the copies of training as they are.
                return (None,) * len(weights)
            return tuple(
                self._traced_weight(gemm, weight, quantizers[gemm].weight, fill)
                for gemm, weight in enumerate(weights)
            )
        if is_transformed(weights):
            return (None,) * len(weights)
        return tuple(
            self._cached_weight(weight, quantizers[gemm], fill, gemm)
            for gemm, weight in enumerate(weights)
        )

    def _sharded_by_fsdp(self, weights: tuple[torch.Tensor, ...]) -> bool:
        """Returns True if FSDP2 frees the weights' memory, so that no FP8 copy is cached."""
        if not self.__dict__.get("_is_fsdp_managed_module", False):
            return False
        # Codes that were gathered are what a cache would hold.
        if not all(type(w) is FP8Parameter and w._gathered is not None for w in weights):
            _say_cache_is_off()
        return True

    def _gemm_weights(self) -> list[list[str]]:
        """Returns, for each GEMM, the names of the parameters whose rows make up its weight."""
        names = [name for name, p in self._parameters.items() if p is not None and p.dim() == 2]
        return [names] if self.fp8_state.gemms == 1 else [[name] for name in names]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self._modes.weight_cache.clear()
        if self._modes.kept is not None:
            self._modes.kept = KeptWeights()
        self._modes.programs.clear()
        self._modes.plain = Programs(())
        for source in self._modes.gathered.values():
            source.renew(self)
        fp8, state = self._fp8, self._fp8.state
        if state.allocated:
            owned = any(p is not None for p in self._parameters.values())
            # Without a parameter the state itself tells where fn sends tensors; dtype never counts.
            fp8.move(self._state_device() if owned else fn(state.scale_fwd).device)
        else:
            fp8.forget()
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for a copy or pickle, without the memory of earlier calls."""
        kept = self.__dict__.copy()
        kept.pop("_modes", None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self._fp8, FP8State):  # in a pickle of an earlier version
            self._fp8 = ModuleFP8.of_saved(self._fp8)
        self._fp8.belong_to(self)
        self._modes = Modes()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            save_parameters(self, destination, prefix)
        self._save_fp8_state(destination, prefix + STATE_PREFIX)

    def _save_fp8_state(self, destination: dict[str, Any], prefix: str) -> None:
        """Puts the FP8 state into a state dict, under keys that begin with ``prefix``."""
        save_state(self._fp8.state, destination, prefix)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # What is refused leaves the module as it was, weights included.
        loaded = None
        if any(key.startswith(prefix) for key in state_dict):
            before = len(error_msgs)
            own_prefix = prefix + STATE_PREFIX
            loaded = read_state(self._fp8, state_dict, own_prefix, missing_keys, error_msgs)
            if len(error_msgs) > before:
                return
        before = len(error_msgs)
        state_dict = joined_scales(self, state_dict, prefix, error_msgs)
        if len(error_msgs) > before:
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._modes.weight_cache.clear()
        for source in self._modes.gathered.values():
            source.renew(self)
        own = {prefix + STATE_PREFIX + name for name in NAMES}
        unexpected_keys[:] = [key for key in unexpected_keys if key not in own]
        # None where this module is not part of what is being loaded, or not all of it.
        if loaded is not None and len(error_msgs) == before:
            loaded.commit(self._fp8, self._state_device())
