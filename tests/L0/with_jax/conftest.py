"""JAX's tests see four CPU devices.

The folder is not called jax: beside other test folders on the path it would pass for the package.
"""

import os

FOUR = "--xla_force_host_platform_device_count=4"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FOUR}".strip()
