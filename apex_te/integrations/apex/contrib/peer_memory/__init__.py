"""apex.contrib.peer_memory: halo exchange along one dimension."""

from .peer_halo_exchanger_1d import PeerHaloExchanger1d as PeerHaloExchanger1d
from .peer_memory import PeerMemoryPool as PeerMemoryPool
