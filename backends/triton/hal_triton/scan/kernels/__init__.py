"""Kernels: pointers first, then numbers, then constants."""
