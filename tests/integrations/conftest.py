"""Tiny models in folders, written once a run."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from threads, and the tests' machine is shared."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model folders are."""
    return tmp_path_factory.mktemp("models")
