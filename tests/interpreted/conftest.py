"""Kernels in Triton's interpreter: collected only where it is asked for by TRITON_INTERPRET=1."""

import os
from importlib.util import find_spec

import pytest

asked = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
collect_ignore_glob = [] if asked else ["test_*.py"]

if asked:
    from support import triton_interpreter

    triton_interpreter.apply(fp32_dot="tf32")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a whole run of the AMD provider's kit has: HAL_ROCM_KIT=whole."""
    kit = [item for item in items if item.path.name == "test_rocm.py"]
    if not kit or os.environ.get("HAL_ROCM_KIT") == "whole":
        return
    from support.rocm_kit import chosen

    left_out = set(kit) - set(chosen(kit))
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
