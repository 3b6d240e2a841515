"""Training on several ranks.

Activation checkpoints, random states, FSDP2 with FP8 all-gathers, tensor-parallel styles for
``parallelize_module``, cross entropy of a split vocabulary, expert parallelism, sums of
``main_grad``, norm and overflow of split gradients, and state dicts of split models.
"""

from typing import TYPE_CHECKING

from ..comm.expert_parallel import Dispatch, TokenDispatcher
from ..comm.rng import CudaRNGStatesTracker
from ..runtime.imports import attach
from .checkpoint import checkpoint  # now, as its module of the same name would take its place

if TYPE_CHECKING:
    from .cross_entropy import parallel_cross_entropy as parallel_cross_entropy
    from .dtensor.parallel_styles import ColumnParallel as ColumnParallel
    from .dtensor.parallel_styles import LayerParallel as LayerParallel
    from .dtensor.parallel_styles import Replicated as Replicated
    from .dtensor.parallel_styles import RowParallel as RowParallel
    from .dtensor.parallel_styles import SequenceParallel as SequenceParallel
    from .fsdp.fp8_all_gather import enable_fp8_all_gather as enable_fp8_all_gather
    from .gradients import clip_grad_norm_ as clip_grad_norm_
    from .gradients import reduce_found_inf as reduce_found_inf
    from .main_grad import reduce_main_grads as reduce_main_grads
    from .state_dict.model_and_optimizer import get_model_state_dict as get_model_state_dict
    from .state_dict.model_and_optimizer import get_optimizer_state_dict as get_optimizer_state_dict
    from .state_dict.model_and_optimizer import get_state_dict as get_state_dict
    from .state_dict.model_and_optimizer import set_model_state_dict as set_model_state_dict
    from .state_dict.model_and_optimizer import set_optimizer_state_dict as set_optimizer_state_dict
    from .state_dict.model_and_optimizer import set_state_dict as set_state_dict

_NAMES = {
    "ColumnParallel": "dtensor.parallel_styles",
    "LayerParallel": "dtensor.parallel_styles",
    "Replicated": "dtensor.parallel_styles",
    "RowParallel": "dtensor.parallel_styles",
    "SequenceParallel": "dtensor.parallel_styles",
    "clip_grad_norm_": "gradients",
    "enable_fp8_all_gather": "fsdp",
    "get_model_state_dict": "state_dict",
    "get_optimizer_state_dict": "state_dict",
    "get_state_dict": "state_dict",
    "parallel_cross_entropy": "cross_entropy",
    "reduce_found_inf": "gradients",
    "reduce_main_grads": "main_grad",
    "set_model_state_dict": "state_dict",
    "set_optimizer_state_dict": "state_dict",
    "set_state_dict": "state_dict",
}
__all__ = ["CudaRNGStatesTracker", "Dispatch", "TokenDispatcher", "checkpoint", *_NAMES]
if not TYPE_CHECKING:  # type checkers know the names above, and no others
    __getattr__, __dir__ = attach(__name__, _NAMES)
