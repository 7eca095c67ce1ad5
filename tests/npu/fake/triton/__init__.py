"""Stands in for triton-ascend, of which the vendor's wrappers need one module to be there."""
