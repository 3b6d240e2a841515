"""apex.contrib.bottleneck: ResNet bottleneck blocks, also of images split over ranks."""

from .bottleneck import Bottleneck as Bottleneck
from .bottleneck import SpatialBottleneck as SpatialBottleneck
from .halo_exchangers import HaloExchangerAllGather as HaloExchangerAllGather
from .halo_exchangers import HaloExchangerNoComm as HaloExchangerNoComm
from .halo_exchangers import HaloExchangerPeer as HaloExchangerPeer
from .halo_exchangers import HaloExchangerSendRecv as HaloExchangerSendRecv
