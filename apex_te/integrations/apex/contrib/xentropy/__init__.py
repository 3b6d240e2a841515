"""Cross entropy of logits with label smoothing."""

from .softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["SoftmaxCrossEntropyLoss"]
