"""apex's scaled_upper_triang_masked_softmax_cuda: causal softmax(scale * x) of attention scores."""

from apex_te._version import __version__ as __version__

from ._softmax import unmasked

__all__ = ["backward", "forward"]
forward, backward = unmasked(__name__, dims=3, causal="upper_left")
