"""``FusedLAMB`` with apex's step count and attributes."""

from ....compatibility.apex import amp_C
from ....optimizers import fused_lamb
from ..._group_steps import GroupSteps
from ._overflow import Overflow


class FusedLAMB(GroupSteps, Overflow, fused_lamb.FusedLAMB):
    """LAMB (arXiv 1904.00962); ``apex_te.optimizers.FusedLAMB``, whose arguments and errors it has.

    As in apex a parameter group counts the steps, in ``group["step"]``, and the state of a
    parameter is ``exp_avg``, ``exp_avg_sq`` and, with master weights, ``master_param``.
    """

    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm)
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb)
