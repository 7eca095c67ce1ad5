"""Tests on an NVIDIA GPU: collected where Triton is installed, skipped where no device is."""

import os
from importlib.util import find_spec

import pytest

interprets = os.environ.get("TRITON_INTERPRET") == "1"
able = find_spec("triton") is not None and not interprets
collect_ignore_glob = [] if able else ["test_*.py"]


@pytest.fixture(autouse=True)
def device() -> str:
    """The device that every test here needs."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda:0"
