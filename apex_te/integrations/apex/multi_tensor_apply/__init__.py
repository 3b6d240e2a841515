"""Callers of operations on lists of tensors, such as those of ``amp_C``."""

from .multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(256 * 32)
multi_tensor_applier_l2norm = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier", "multi_tensor_applier_l2norm"]
