"""``clip_grad_norm_``: PyTorch's, which takes lists of gradients in a few launches."""

from torch.nn.utils import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
