"""A zoo of fake distributions that discovery sees alone."""

import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import pytest

from hal_registry import discovery
from support.registry import Zoo


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Zoo]:
    """An empty zoo; whatever its plugins import is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    found = partial(distributions, path=[str(tmp_path)])
    monkeypatch.setattr(discovery, "distributions", found)
    for name in ("HAL_PLUGINS", "HAL_BLOCK", "HAL_STRICT"):
        monkeypatch.delenv(name, raising=False)
    yield Zoo(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]
