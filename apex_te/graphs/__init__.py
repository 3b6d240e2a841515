"""CUDA graphs of modules that compute in FP8."""
