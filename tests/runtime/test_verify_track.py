"""A track point of a verify step is stored by the commit, if the accepted path reaches it."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hal
from hal.runtime.batch import Batch, Mode
from support.backends import Bound, selected_with
from support.bound import FAMILIES
from support.captured import depths

WIDTH = 5
SERVED = sorted(set(FAMILIES) - {"zamba"})
"""Zamba's scans run head by head, which has no verify."""


@pytest.fixture(params=SERVED, scope="module")
def bound(request: pytest.FixtureRequest) -> Bound:
    with selected_with(speculative=hal.Speculative(WIDTH, tree=True), prefix_cache=True):
        return FAMILIES[request.param]()


def states(bound: Bound) -> list[Tensor]:
    layer = next(bound.backend.selection.model.stateful_layers()).index
    return list(bound.backend.pool.tensors(layer).values())


def close(got: Tensor, want: Tensor) -> bool:
    """Equal within float32 rounding of two different orders of sums."""
    return float((got.double() - want.double()).norm()) <= 3e-5 * float(want.double().norm()) + 1e-9


def extend(bound: Bound, given: list[Tensor], src: int, dst: int, start: int) -> Tensor:
    batch = Batch(Mode.EXTEND, [given[0].shape[0]], [start], [src if start else -1], [dst])
    bound.backend.begin(batch)
    return bound.call(given)


def cut(given: list[Tensor], begin: int, end: int) -> list[Tensor]:
    return [tensor[begin:end] for tensor in given]


def path_to(links: list[int], tip: int) -> list[int]:
    """The tokens from a root to `tip`."""
    found = []
    while tip >= 0:
        found.append(tip)
        tip = links[tip]
    return found[::-1]


def continued(bound: Bound, given: list[Tensor], slot: int, start: int, want: Tensor) -> bool:
    """Whether a slot goes on as the request alone does; it is only read."""
    return close(extend(bound, given, slot, -1, start), want)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    tree=st.booleans(),
    device=st.booleans(),
    fork=st.booleans(),
)
def test_a_point_on_the_accepted_path_is_stored_and_any_other_slot_untouched(
    bound: Bound, seed: int, tree: bool, device: bool, fork: bool
) -> None:
    bound.backend.abandon()  # of an example that failed
    rng = Random(seed)
    torch.manual_seed(seed)
    for tensor in states(bound):
        tensor.fill_(float("nan"))
    done = rng.randint(1, 5)
    prompt, drafts, more = bound.inputs(done), bound.inputs(WIDTH), bound.inputs(2)
    src, dst = (1, 2) if fork else (1, 1)
    extend(bound, prompt, -1, src, 0)
    links = [rng.randint(-1, t - 1) for t in range(WIDTH)] if tree else list(range(-1, WIDTH - 1))
    counts = rng.sample(range(1, WIDTH + 1), 3)
    points = {count: 3 + i for i, count in enumerate(counts)}
    track = [(0, done + count, slot) for count, slot in points.items()]
    fields = {"parents": [links]} if tree else {}
    bound.backend.begin(Batch(Mode.VERIFY, [WIDTH], [done], [src], [dst], track, **fields))
    bound.call(drafts)
    tip = rng.randint(-1, WIDTH - 1)
    accepted = depths(links)[tip] if tip >= 0 else 0
    given_counts = torch.tensor([accepted], dtype=torch.int32) if device else [accepted]
    given_tips = torch.tensor([tip], dtype=torch.int32) if device else [tip]
    bound.backend.commit(given_counts, given_tips if tree else None)
    path = path_to(links, tip)
    assert len(path) == accepted
    for count, slot in [*points.items(), (accepted, dst)]:
        if count > accepted:
            assert all(tensor[slot].isnan().all() for tensor in states(bound))
            continue
        kept = [tensor[path[:count]] for tensor in drafts]
        whole = [torch.cat(parts) for parts in zip(prompt, kept, more, strict=True)]
        want = bound.alone(whole)[-2:]
        assert continued(bound, more, slot, done + count, want)


def test_rows_track_apart_from_each_other(bound: Bound) -> None:
    """One row reaches its point, one does not, and one without tokens has none."""
    bound.backend.abandon()
    prompts = [bound.inputs(4) for _ in range(2)]
    for slot, prompt in enumerate(prompts, 1):
        extend(bound, prompt, -1, slot, 0)
    for tensor in states(bound):
        tensor[3:] = float("nan")
    drafts = bound.inputs(6)
    track = [(0, 6, 4), (2, 6, 5)]
    lengths, start, slots = [3, 0, 3], [4, 9, 4], [1, 3, 2]
    bound.backend.begin(Batch(Mode.VERIFY, lengths, start, slots, slots, track))
    bound.call(drafts)
    bound.backend.commit([3, 0, 1])
    more = bound.inputs(1)
    parts = zip(prompts[0], cut(drafts, 0, 2), more, strict=True)
    want = bound.alone([torch.cat(part) for part in parts])[-1:]
    assert continued(bound, more, 4, 6, want)
    assert all(tensor[slot].isnan().all() for tensor in states(bound) for slot in (3, 5))


@pytest.mark.parametrize(
    ("track", "message"),
    [
        ([(0, 6, 1)], "slot 1 is dst of row 0 and a track point of row 0"),
        ([(0, 6, 2)], "row 1 reads slot 2, which a track point of row 0 writes"),
        ([(0, 6, 5), (1, 6, 5)], "slot 5 is a track point of row 0 and a track point of row 1"),
        ([(0, 8, 5)], r"track point \(row 0, count 4\), row 0 has 3 tokens"),
        ([(0, 4, 5)], r"track point \(row 0, count 0\), row 0 has 3 tokens"),
    ],
)
def test_a_point_that_would_race_or_lies_outside_its_row_is_refused(
    bound: Bound, track: list[tuple[int, int, int]], message: str
) -> None:
    batch = Batch(Mode.VERIFY, [3, 3], [4, 4], [1, 2], [1, 3], track)
    with pytest.raises(ValueError, match=message):
        bound.backend.begin(batch)


def test_points_do_not_outlive_their_step(bound: Bound) -> None:
    extend(bound, bound.inputs(4), -1, 1, 0)
    for tensor in states(bound):
        tensor[5] = float("nan")
    bound.backend.begin(Batch(Mode.EXTEND, [2], [4], [1], [1], [(0, 5, 5)]))
    bound.call(bound.inputs(2))
    for tensor in states(bound):
        tensor[5] = float("nan")
    bound.backend.begin(Batch(Mode.VERIFY, [3], [6], [1], [1]))
    bound.call(bound.inputs(3))
    bound.backend.commit([3])
    assert all(tensor[5].isnan().all() for tensor in states(bound))
