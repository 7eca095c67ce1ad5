"""Triton kernels that the CUDA and ROCm providers of `hal` share."""
