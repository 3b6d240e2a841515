"""Compilers and what they are told: C++, CUDA, HIP, pybind11 and the dispatcher."""
