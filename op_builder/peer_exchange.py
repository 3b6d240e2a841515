"""Builder of peer_exchange."""

from .builder import CUDAOpBuilder


class PeerExchangeBuilder(CUDAOpBuilder):
    """Builder of copies to the memory of other GPUs of a host, and of sums of received data."""

    NAME = "peer_exchange"
    DEVICES = ("cuda",)
