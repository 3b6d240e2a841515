"""apex.contrib.conv_bias_relu: 2D convolutions with bias, mask or scale, and ReLU."""

from .conv_bias_relu import ConvBias as ConvBias
from .conv_bias_relu import ConvBiasMaskReLU as ConvBiasMaskReLU
from .conv_bias_relu import ConvBiasReLU as ConvBiasReLU
from .conv_bias_relu import ConvFrozenScaleBiasReLU as ConvFrozenScaleBiasReLU
