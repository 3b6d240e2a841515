"""Tensor-parallel styles for torch's ``parallelize_module``, with DTensors as parameters."""
