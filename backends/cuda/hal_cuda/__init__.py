"""NVIDIA provider of `hal`."""
