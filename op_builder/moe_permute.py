"""Builder of moe_permute."""

from .builder import CUDAOpBuilder


class MoePermuteBuilder(CUDAOpBuilder):
    """Builder of the permutation of tokens' rows to their experts and back."""

    NAME = "moe_permute"
