"""``MultiTensorApply``, which passes its chunk size to an operation on lists of tensors."""

from ..._multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply"]
