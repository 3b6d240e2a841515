"""apex.contrib.nccl_allocator: memory pools that NCCL has registered."""

from .nccl_allocator import create_nccl_mem_pool as create_nccl_mem_pool
from .nccl_allocator import init as init
from .nccl_allocator import nccl_mem as nccl_mem
