"""Device functions that the kernels of several operations share."""
