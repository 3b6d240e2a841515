"""``FusedLAMB`` of apex's older programs: ``apex_te.optimizers.FusedLAMB``."""

from .....optimizers.fused_lamb import FusedLAMB as FusedLAMB
