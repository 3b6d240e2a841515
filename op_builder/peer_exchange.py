"""Builder of peer_exchange."""

from .builder import CUDAOpBuilder


class PeerExchangeBuilder(CUDAOpBuilder):
    """Bytes written to the memory of other GPUs of a host, and sums of what arrived."""

    NAME = "peer_exchange"
    DEVICES = ("cuda",)
