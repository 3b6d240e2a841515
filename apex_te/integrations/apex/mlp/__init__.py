"""Linear layers with an activation after each, in one function."""

from .mlp import MLP, mlp_function

__all__ = ["MLP", "mlp_function"]
