"""``FusedAdam`` with apex's step count and attributes."""

from ....compatibility.apex import amp_C
from ....optimizers import fused_adam
from ..._group_steps import GroupSteps
from ._overflow import Overflow


class FusedAdam(GroupSteps, Overflow, fused_adam.FusedAdam):
    """Adam with decoupled (AdamW) or L2 weight decay; ``apex_te.optimizers.FusedAdam``.

    It has the arguments and errors of that class. As in apex a parameter group counts the steps, in
    ``group["step"]``, and the state of a parameter is ``exp_avg``, ``exp_avg_sq`` and, with master
    weights, ``master_param``.
    """

    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)
    multi_tensor_adam_capturable = staticmethod(amp_C.multi_tensor_adam_capturable)
    multi_tensor_adam_capturable_master = staticmethod(amp_C.multi_tensor_adam_capturable_master)
