"""Kernels in CUDA C++ for sm_90, compiled on demand: the provider `cuda.hopper`."""
