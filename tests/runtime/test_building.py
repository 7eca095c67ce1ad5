"""What a backend may be asked, found from its selection."""

from types import SimpleNamespace
from typing import cast

import pytest

from hal.runtime.building import track_grid
from hal.selection import Selection


def chosen(*grids: tuple[int, ...], prefix_cache: bool = True) -> Selection:
    """A selection of one operation for each granularity offered."""
    choices = {}
    for number, track in enumerate(grids):
        manifest = SimpleNamespace(offers={number: SimpleNamespace(track=track)})
        choices[number] = SimpleNamespace(candidate=SimpleNamespace(manifest=manifest))
    options = SimpleNamespace(prefix_cache=prefix_cache)
    return cast("Selection", SimpleNamespace(options=options, choices=choices))


@pytest.mark.parametrize(
    ("grids", "wanted"),
    [
        (((1,), (64,), ()), 64),
        (((64,), (128,)), 128),
        (((16, 64), (24,)), 48),
        (((), ()), None),
        ((), None),
    ],
)
def test_a_track_point_is_one_that_every_operation_of_a_layer_can_store(
    grids: tuple[tuple[int, ...], ...], wanted: int | None
) -> None:
    assert track_grid(chosen(*grids)) == wanted


def test_nothing_is_tracked_without_a_prefix_cache() -> None:
    assert track_grid(chosen((64,), prefix_cache=False)) is None
