"""Parts that the modules share: FP8 state, GEMMs, autograd functions, tensor parallelism."""
