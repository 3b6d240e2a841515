"""JAX's tests see four CPU devices, and no GPU, whose memory each process would reserve.

The folder is not called jax: beside other test folders on the path it would pass for the package.
"""

import os

FOUR = "--xla_force_host_platform_device_count=4"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FOUR}".strip()
# JAX takes three quarters of a GPU when it starts there, from the other tests beside.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
