"""Options of ops that are given by name, and what kernels take for them; no framework.

The functions of an op that PyTorch has and those that JAX has check their options here, so that
both know the same names and refuse others in the same words.
"""

from __future__ import annotations

__all__ = [
    "ACTIVATIONS",
    "KINDS",
    "activation_number",
    "gated_activation_number",
    "is_most_recent",
    "is_tanh",
]

# Activation functions of one input, in the order of csrc/common/activation/functions.h.
KINDS = ("gelu", "gelu_erf", "quick_gelu", "relu", "squared_relu", "silu")
# Activation functions of a gate, and their numbers there.
ACTIVATIONS = {"silu": 5, "gelu": 0, "gelu_erf": 1, "relu": 3, "sigmoid": 6}


def activation_number(op: str, kind: str) -> int:
    """Returns the kernels' number of an activation function; raises ValueError if there is none.

    Args:
        op: name of the function, for the error.
        kind: one of ``KINDS``.
    """
    if kind not in KINDS:
        raise ValueError(f"{op}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return KINDS.index(kind)


def gated_activation_number(op: str, activation: str) -> int:
    """Returns the kernels' number of a gate's activation; raises ValueError if there is none.

    Args:
        op: name of the function, for the error.
        activation: one of ``ACTIVATIONS``.
    """
    code = ACTIVATIONS.get(activation)
    if code is None:
        raise ValueError(
            f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    return code


def is_tanh(op: str, form: str) -> bool:
    """Returns True for GELU's form "tanh", False for "erf"; raises ValueError otherwise."""
    if form not in ("tanh", "erf"):
        raise ValueError(f"{op}: form must be 'tanh' or 'erf', got {form!r}")
    return form == "tanh"


def is_most_recent(op: str, algo: str) -> bool:
    """Returns True for the algorithm "most_recent", False for "max"; raises ValueError otherwise.

    Args:
        op: name of the function, for the error.
        algo: "most_recent" takes scales from the newest amax, "max" from the whole history.
    """
    if algo not in ("max", "most_recent"):
        raise ValueError(f"{op}: algo must be 'max' or 'most_recent', got {algo!r}")
    return algo == "most_recent"
