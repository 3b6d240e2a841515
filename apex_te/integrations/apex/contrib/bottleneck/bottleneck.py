"""ResNet bottleneck blocks with frozen batch norms, computed by PyTorch's convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Conv2d
from torch.nn.functional import conv2d

from .halo_exchangers import HaloPadder

__all__ = ["Bottleneck", "FrozenBatchNorm2d", "SpatialBottleneck"]


class FrozenBatchNorm2d(torch.nn.Module):
    """Batch norm of ``n`` channels with fixed statistics and weights, all of them buffers.

    As in apex nothing is added to the variance.

    Args:
        n: number of channels.

    Attributes:
        weight, bias, running_mean, running_var: buffers [n]; at first 1, 0, 0 and 1.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(n))
        self.register_buffer("bias", torch.zeros(n))
        self.register_buffer("running_mean", torch.zeros(n))
        self.register_buffer("running_var", torch.ones(n))

    def get_scale_bias(self, nhwc: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scale and bias, [1, n, 1, 1], or [1, 1, 1, n] if ``nhwc``."""
        scale = self.weight * self.running_var.rsqrt()
        bias = self.bias - self.running_mean * scale
        shape = (1, 1, 1, -1) if nhwc else (1, -1, 1, 1)
        return scale.reshape(shape), bias.reshape(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [N, n, H, W], scaled and shifted."""
        scale, bias = self.get_scale_bias(False)
        return torch.addcmul(bias, x, scale)


class Bottleneck(torch.nn.Module):
    """ResNet block of convolutions 1x1, 3x3 and 1x1 with frozen batch norms and a shortcut.

    The first convolution has the stride. The shortcut is the input if the stride is 1 and
    ``in_channels`` equals ``out_channels``, else a 1x1 convolution.

    Args:
        in_channels, bottleneck_channels, out_channels: channels of input, middle and output.
        stride: stride of the block.
        groups, dilation: must be 1.
        norm_func: must be None; batch norms are frozen.
        use_cudnn: ignored; PyTorch chooses the kernels.
        explicit_nhwc: tensors are [N, H, W, C], and weights [K, R, S, C].

    Raises:
        NotImplementedError: ``groups``, ``dilation`` or ``norm_func`` is another value; write the
            block of ``torch.nn`` modules.

    Source: apex.contrib.bottleneck.
    """

    def __init__(
        self,
        in_channels: int,
        bottleneck_channels: int,
        out_channels: int,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
        norm_func: Any = None,
        use_cudnn: bool = False,
        explicit_nhwc: bool = False,
    ) -> None:
        super().__init__()
        for name, value, only in (
            ("groups", groups, 1), ("dilation", dilation, 1), ("norm_func", norm_func, None),
        ):  # fmt: skip
            if value != only:
                raise NotImplementedError(
                    f"{type(self).__name__}: {name} must be {only}, got {value!r}; "
                    "torchvision.models.resnet.Bottleneck has others"
                )
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = torch.nn.Sequential(
                Conv2d(in_channels, out_channels, 1, stride, bias=False),
                FrozenBatchNorm2d(out_channels),
            )
        self.conv1 = Conv2d(in_channels, bottleneck_channels, 1, stride, bias=False)
        self.conv2 = Conv2d(bottleneck_channels, bottleneck_channels, 3, padding=1, bias=False)
        self.conv3 = Conv2d(bottleneck_channels, out_channels, 1, bias=False)
        self.bn1 = FrozenBatchNorm2d(bottleneck_channels)
        self.bn2 = FrozenBatchNorm2d(bottleneck_channels)
        self.bn3 = FrozenBatchNorm2d(out_channels)
        self.stride, self.use_cudnn, self.explicit_nhwc = stride, use_cudnn, explicit_nhwc
        for weight in self.parameters():
            torch.nn.init.kaiming_uniform_(weight, a=1)
            if explicit_nhwc:
                weight.data = weight.data.permute(0, 2, 3, 1).contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output for x [N, C, H, W], or [N, H, W, C] if ``explicit_nhwc``.

        ``x`` has the parameters' dtype. The output has ``out_channels``, and H and W divided by the
        stride, rounded up.
        """
        if self.explicit_nhwc:
            x = x.permute(0, 3, 1, 2)
        out = torch.relu(self.bn1(self._convolve(self.conv1, x)))
        out = torch.relu(self.bn2(self._middle(out)))
        out = self.bn3(self._convolve(self.conv3, out))
        if self.downsample is not None:
            x = self.downsample[1](self._convolve(self.downsample[0], x))
        out = torch.relu(out + x)
        return out.permute(0, 2, 3, 1) if self.explicit_nhwc else out

    def _convolve(self, conv: Any, x: torch.Tensor, padding: Any = None) -> torch.Tensor:
        """Returns the convolution of x [N, C, H, W] with the weight in its layout."""
        weight = conv.weight.permute(0, 3, 1, 2) if self.explicit_nhwc else conv.weight
        return conv2d(x, weight, None, conv.stride, conv.padding if padding is None else padding)

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        return self._convolve(self.conv2, x)


class SpatialBottleneck(Bottleneck):
    """``Bottleneck`` of images whose rows are split over ranks.

    Gradients of weights are this rank's terms of a sum over the ranks, as in data parallelism.

    Args:
        spatial_parallel_args: (number of ranks, this rank's place, process group, halo exchanger,
            method, use_delay_kernel); the last two are ignored. None means one rank. The other
            arguments are as in ``Bottleneck``.

    Raises:
        ValueError: there are several ranks and the halo exchanger is None.

    Source: apex.contrib.bottleneck.
    """

    def __init__(
        self,
        in_channels: int,
        bottleneck_channels: int,
        out_channels: int,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
        norm_func: Any = None,
        use_cudnn: bool = False,
        explicit_nhwc: bool = False,
        spatial_parallel_args: tuple[Any, ...] | None = None,
    ) -> None:
        super().__init__(
            in_channels, bottleneck_channels, out_channels, stride, groups, dilation, norm_func,
            use_cudnn, explicit_nhwc,
        )  # fmt: skip
        self.spatial_parallel_args = spatial_parallel_args or (1, 0, None, None, 0, False)
        ranks, _, _, exchanger, *_ = self.spatial_parallel_args
        if ranks > 1 and exchanger is None:
            raise ValueError(
                "SpatialBottleneck: spatial_parallel_args must have a halo exchanger for "
                f"{ranks} ranks, got None"
            )

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        ranks, _, _, exchanger, *_ = self.spatial_parallel_args
        if ranks == 1:
            return super()._middle(x)
        padded = HaloPadder(exchanger)(x, 1, explicit_nhwc=False, H_split=True)
        return self._convolve(self.conv2, padded, (0, 1))
