"""The ops: each in plain Python over its kernel, with a plain-PyTorch reference."""
