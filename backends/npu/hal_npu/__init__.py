"""Ascend NPU provider of `hal`."""
