"""apex's generic_scaled_masked_softmax_cuda: scaled masked softmax of any key length."""

from apex_te._version import __version__ as __version__

from ._softmax import masked

__all__ = ["backward", "forward"]
forward, backward = masked(__name__)
