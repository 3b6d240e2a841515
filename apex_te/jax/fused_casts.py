"""Ops before a GEMM, norms and activations, whose results are cast to FP8."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from .ops import swiglu, swiglu_block
from .ops._norm import norm_bwd, norm_fwd
from .ops.block_quantize import BlockQuantized
from .ops.fp8_output import FP8Output


class FusedCast:
    """Base of ops with bound inputs that can write their result in FP8 themselves.

    Attributes:
        can_fuse: True if ``fp8`` is supported; ``plain`` always is.
        can_fuse_blocks: True if ``blocks`` is supported.
        copies: True if the op only copies elements of its inputs.
        flatten_axis: index of the first dimension that counts as columns of the result.
        with_dbias: True if the column sums of the result are wanted.
    """

    can_fuse = True
    can_fuse_blocks = False
    copies = False
    flatten_axis = -1
    with_dbias = False

    def plain(self) -> tuple[jax.Array, jax.Array | None]:
        """Runs the op without a cast; returns the result and its column sums.

        The sums are None if they are not wanted or the op does not compute them.
        """
        raise NotImplementedError

    def fp8(
        self, scale: jax.Array, dtype: Any, rowwise: bool, columnwise: bool, amax: Any
    ) -> tuple[FP8Output, jax.Array | None]:
        """Returns the op's float32 result in FP8, and its column sums or None.

        Without a copy, ``amax`` must be given; column sums are then not computed.
        """
        raise NotImplementedError

    def blocks(self, dtype: Any, **options: Any) -> BlockQuantized:
        """Returns the op's result in 1x128 blocks, if ``can_fuse_blocks`` is True.

        The options are ``rowwise``, ``columnwise``, ``scales``, ``eps``, ``padded``, and of inputs
        ``columnwise_block_rows``.
        """
        raise NotImplementedError


class Norm(NamedTuple):
    """Options of the norm before a layer.

    Attributes:
        op: "rms_norm" or "layer_norm".
        epsilon: added to the variance or mean square.
        zero_centered_gamma: gamma is 1 + weight instead of weight.
    """

    op: str
    epsilon: float
    zero_centered_gamma: bool

    def gradients(
        self, dy: jax.Array, kept: tuple[Any, ...], with_scale: bool, with_bias: bool
    ) -> list[Any]:
        """Computes the gradients of x, scale and bias; None for one that was not requested.

        ``kept`` has x, scale, bias and ``NormForward.statistics`` of the forward.
        """
        x, scale, bias, statistics = kept
        made = norm_bwd(
            self.op, dy, x, scale, bias, statistics, self.zero_centered_gamma, None, with_scale,
            with_bias, any_rank=True,
        )  # fmt: skip
        return [made.dx, made.dweight, made.dbias]


class NormForward(FusedCast):
    """Norm of x [..., cols], two dimensions or more; ``statistics`` is empty until it has run."""

    def __init__(self, norm: Norm, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> None:
        self.statistics: dict[str, jax.Array] = {}
        self._norm = norm
        self._primals = x, scale, bias

    def plain(self) -> tuple[jax.Array, None]:
        """Runs the norm without a cast to FP8; see ``FusedCast.plain``."""
        return self._run(None)["y"], None

    def fp8(
        self, scale: jax.Array, dtype: Any, rowwise: bool, columnwise: bool, amax: Any
    ) -> tuple[FP8Output, None]:
        """Runs the norm and quantizes its result; see ``FusedCast.fp8``."""
        made = self._run((scale, dtype, rowwise, columnwise, amax))
        return FP8Output(*(made.get(name) for name in FP8Output._fields)), None

    def _run(self, fp8: Any) -> dict[str, Any]:
        """Returns what ``norm_fwd`` does, and sets ``statistics``."""
        op, eps, centered = self._norm
        made = norm_fwd(op, *self._primals, eps, centered, None, fp8, any_rank=True)
        self.statistics = {name: made[name] for name in ("mean", "rstd") if name in made}
        return made


class ActivationForward(FusedCast):
    """Gated activation of x [..., 2, F], gate first, as a fused cast."""

    can_fuse_blocks = True

    def __init__(self, activation: str | swiglu.ClampedSwiglu, x: jax.Array) -> None:
        self._x = x
        self._gate: dict[str, Any] = {"activation": activation, "axis": -2}

    def plain(self) -> tuple[jax.Array, None]:
        """Returns act(gate) * up [..., F]; see ``FusedCast.plain``."""
        return swiglu.swiglu_fwd(self._x, **self._gate), None

    def fp8(
        self, scale: jax.Array, dtype: Any, rowwise: bool, columnwise: bool, amax: Any
    ) -> tuple[FP8Output, None]:
        """Returns act(gate) * up in FP8; see ``FusedCast.fp8``."""
        made = swiglu.swiglu_fwd_fp8(
            self._x, None, scale, dtype, rowwise=rowwise, columnwise=columnwise, amax=amax,
            **self._gate,
        )  # fmt: skip
        return made, None

    def blocks(self, dtype: Any, **options: Any) -> BlockQuantized:
        """Returns act(gate) * up, quantized in blocks; see ``FusedCast.blocks``."""
        return swiglu_block.swiglu_fwd_block(self._x, None, dtype, **self._gate, **options)


class ActivationBackward(FusedCast):
    """Gradient of the input x [..., 2, F] of a gated activation, from ``dy`` [..., F]."""

    flatten_axis = -2

    def __init__(
        self, activation: str | swiglu.ClampedSwiglu, dy: jax.Array, x: jax.Array, with_dbias: bool
    ) -> None:
        self.with_dbias = with_dbias
        self.can_fuse_blocks = not with_dbias  # the kernel has no column sums
        self._dy = dy
        self._x = x
        self._gate: dict[str, Any] = {"activation": activation, "axis": -2}

    def plain(self) -> tuple[jax.Array, jax.Array | None]:
        """Returns the gradient [..., 2, F] and its column sums; see ``FusedCast.plain``."""
        made = swiglu.swiglu_bwd(self._dy, self._x, with_dbias=self.with_dbias, **self._gate)
        if not isinstance(made, swiglu.SwigluGrads):
            return made, None
        return made.input, made.dbias

    def fp8(
        self, scale: jax.Array, dtype: Any, rowwise: bool, columnwise: bool, amax: Any
    ) -> tuple[FP8Output, jax.Array | None]:
        """Returns the gradient in FP8 and its column sums; see ``FusedCast.fp8``."""
        made = swiglu.swiglu_bwd_fp8(
            self._dy, self._x, None, scale, dtype, rowwise=rowwise, columnwise=columnwise,
            amax=amax, with_dbias=self.with_dbias and (rowwise or columnwise), **self._gate,
        )  # fmt: skip
        return made.output, made.dbias

    def blocks(self, dtype: Any, **options: Any) -> BlockQuantized:
        """Returns the gradient, quantized in blocks; see ``FusedCast.blocks``."""
        return swiglu_block.swiglu_bwd_block(
            self._dy, self._x, None, dtype, **self._gate, **options
        )
