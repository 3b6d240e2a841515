"""JAX's tests see four CPU devices and no GPU; ``four_devices`` says so before JAX starts."""

import four_devices  # noqa: F401
