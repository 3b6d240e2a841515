"""Builder of moe_permute."""

from .builder import CUDAOpBuilder


class MoePermuteBuilder(CUDAOpBuilder):
    """Rows of tokens permuted to their experts and back."""

    NAME = "moe_permute"
