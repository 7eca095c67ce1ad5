"""Synthetic providers that can be imported, and an installed torch of a known version."""

from collections.abc import Iterator

import pytest

from support.providers import importable


@pytest.fixture
def providers() -> Iterator[None]:
    """Make `synthetic_providers` importable."""
    with importable():
        yield
