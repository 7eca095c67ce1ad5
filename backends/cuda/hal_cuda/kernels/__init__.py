"""Device functions that only NVIDIA compilers take."""
