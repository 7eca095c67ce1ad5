"""What can be captured and replayed, in which order, and how the rest is refused."""

import gc
import weakref
from collections.abc import Callable
from random import Random
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import hal
from hal.errors import StepOrderError
from hal.runtime.batch import Batch, Mode
from support.backends import Bound, backend_for
from support.bound import GDN_CONFIG
from support.captured import Rig, bound_for_graphs, decode_batch, put_back, same, states


@pytest.fixture(params=["cca", "gated_delta_net", "mamba2", "short_conv"], scope="module")
def decoding(request: pytest.FixtureRequest) -> Rig:
    return Rig(bound_for_graphs(request.param), Mode.DECODE, (2, 4, 8))


def test_a_replay_takes_the_smallest_step_with_room() -> None:
    backend = bound_for_graphs("short_conv").backend
    for rows, width in ((8, 3), (2, 3), (4, 2), (4, 3)):
        with backend.capture(Mode.VERIFY, rows, width, record=False):
            pass
    chosen = {}
    for lengths in ((3,), (2,), (2, 2, 2), (3, 1, 1), (1,) * 5):
        slots = list(range(1, len(lengths) + 1))
        captured = backend.stage(Batch(Mode.VERIFY, lengths, slots, slots, slots))
        chosen[lengths] = (captured.rows, captured.width)
        backend.abandon()
    assert list(chosen.values()) == [(2, 3), (2, 3), (4, 2), (4, 3), (8, 3)]


def test_a_capture_moves_no_state(decoding: Rig) -> None:
    before = [tensor.clone() for tensor in states(decoding.bound)]
    with decoding.bound.backend.capture(Mode.DECODE, 2):
        out = decoding.bound.call(decoding.bound.inputs(2))
    assert same(states(decoding.bound), before)
    assert not out.any()
    Rig(decoding.bound, Mode.DECODE, (2,))


def refused(call: Callable[[], object], error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def open_capture(bound: Bound, mode: Mode, rows: int, width: int = 1) -> None:
    with bound.backend.capture(mode, rows, width):
        pass


@pytest.mark.parametrize(
    ("mode", "rows", "width", "message"),
    [
        (Mode.EXTEND, 2, 1, "capture: mode EXTEND has no graphs, DECODE and VERIFY have"),
        (cast("Mode", "SPLIT"), 2, 1, "Invalid forward mode: SPLIT"),
        (Mode.DECODE, 9, 1, "capture: 9 rows, the backend was built for 1..8"),
        (Mode.DECODE, 0, 1, "capture: 0 rows, the backend was built for 1..8"),
        (Mode.DECODE, 2, 2, "capture: width 2 in a DECODE step, expected 1..1"),
        (Mode.VERIFY, 2, 4, "capture: width 4 in a VERIFY step, expected 1..3"),
    ],
)
def test_a_step_that_cannot_be_captured_is_refused_with_both_numbers(
    mode: Mode, rows: int, width: int, message: str
) -> None:
    bound = bound_for_graphs("short_conv")
    assert refused(lambda: open_capture(bound, mode, rows, width)) == message


def test_more_tokens_than_the_backend_was_built_for_are_not_captured() -> None:
    selection = hal.select("cpu", GDN_CONFIG, graphs=True, speculative=hal.Speculative(4))
    backend = selection.backend(slots=4, max_batch=8, max_tokens=24)
    with pytest.raises(ValueError, match="capture: 32 tokens, the backend was built for 24"):
        with backend.capture(Mode.VERIFY, 8, 4):
            pass


def test_a_selection_without_graphs_or_speculation_captures_nothing_of_it() -> None:
    plain, eager = backend_for(GDN_CONFIG, graphs=True), backend_for(GDN_CONFIG)
    with pytest.raises(ValueError, match="capture: mode VERIFY needs a selection with speculative"):
        with plain.capture(Mode.VERIFY, 2, 2):
            pass
    with pytest.raises(ValueError, match="capture: the selection was made without graphs"):
        with eager.capture(Mode.DECODE, 2):
            pass


def test_a_batch_without_room_is_refused_with_both_numbers() -> None:
    bound = bound_for_graphs("short_conv")
    open_capture(bound, Mode.DECODE, 2)
    open_capture(bound, Mode.VERIFY, 2, 2)
    backend, slots = bound.backend, [1, 2, 3]
    three = Batch(Mode.DECODE, [1] * 3, slots, slots, slots)
    assert refused(lambda: backend.replay(three)) == (
        "replay: 3 rows of up to 1 tokens, captured DECODE steps have room for 2 x 1"
    )
    wide = Batch(Mode.VERIFY, [3], [4], [1], [1])
    assert refused(lambda: backend.replay(wide)) == (
        "replay: 1 rows of up to 3 tokens, captured VERIFY steps have room for 2 x 2"
    )
    extend = Batch(Mode.EXTEND, [3], [4], [1], [1])
    assert refused(lambda: backend.replay(extend), StepOrderError) == (
        "replay: no EXTEND step was captured"
    )


def test_two_track_points_of_a_row_have_no_room_in_a_captured_verify() -> None:
    bound = bound_for_graphs("short_conv", track=True)
    open_capture(bound, Mode.VERIFY, 2, 2)
    batch = Batch(Mode.VERIFY, [2], [4], [1], [1], [(0, 5, 2), (0, 6, 3)])
    assert refused(lambda: bound.backend.replay(batch)) == (
        "replay: a row has 2 track points, a captured VERIFY step has room for 1"
    )
    bound.backend.begin(Batch(Mode.IDLE))


def test_a_step_captured_anew_frees_the_old_one_at_the_next_capture_and_no_sooner() -> None:
    """An engine may be recording when the block ends: freeing a graph would break its record."""
    backend = bound_for_graphs("short_conv").backend

    def graph() -> weakref.ref[object]:
        with backend.capture(Mode.DECODE, 2, record=False) as captured:
            return weakref.ref(captured.graph)

    first = graph()
    second = graph()
    gc.collect()
    assert first() is not None
    graph()
    gc.collect()
    assert first() is None
    assert second() is not None


def test_a_layer_bound_behind_a_capture_is_not_in_it() -> None:
    bound = bound_for_graphs("gated_delta_net")
    open_capture(bound, Mode.DECODE, 2)
    layers = bound.backend.selection.model.stateful_layers()
    first = next(layers)
    layer = cast("Any", bound.backend)._layers[first.index]
    bound.backend.layer(next(layers).index, layer.params)
    assert refused(lambda: bound.backend.replay(Batch(Mode.DECODE)), StepOrderError) == (
        "replay: the step was captured after 1 layers were bound, now it is 2: capture it again"
    )


def test_the_order_of_calls_is_held() -> None:
    bound = bound_for_graphs("short_conv")
    backend = bound.backend
    open_capture(bound, Mode.DECODE, 2)
    idle = Batch(Mode.IDLE)
    with backend.capture(Mode.DECODE, 2):
        for call in (lambda: backend.begin(idle), lambda: backend.replay(idle)):
            assert refused(call, StepOrderError).endswith("a step is being captured")
        assert refused(lambda: open_capture(bound, Mode.DECODE, 1), StepOrderError) == (
            "capture: a step is being captured"
        )
    backend.begin(Batch(Mode.VERIFY, [1], [4], [1], [1]))
    for call in (
        lambda: backend.replay(Batch(Mode.DECODE)),
        lambda: open_capture(bound, Mode.DECODE, 1),
    ):
        assert refused(call, StepOrderError).endswith("step after an uncommitted verify")


def test_a_layer_has_no_step_behind_a_replay_or_a_capture(decoding: Rig) -> None:
    decoding.replay(decode_batch(Random(1), 2), decoding.bound.inputs(2))
    with pytest.raises(StepOrderError, match=r"before begin\(batch\)"):
        decoding.bound.call(decoding.bound.inputs(2))


def test_a_block_that_fails_is_not_replayed() -> None:
    bound = bound_for_graphs("short_conv")
    with pytest.raises(KeyError, match="mine"):
        with bound.backend.capture(Mode.VERIFY, 2, 2):
            raise KeyError("mine")
    assert refused(lambda: bound.backend.replay(Batch(Mode.VERIFY)), StepOrderError) == (
        "replay: no VERIFY step was captured"
    )
    bound.backend.begin(Batch(Mode.IDLE))


@pytest.mark.parametrize("inference", [False, True])
def test_what_runs_between_layers_is_replayed_too(inference: bool) -> None:
    bound = bound_for_graphs("short_conv")
    weight, x = torch.randn(24, 24), torch.randn(4, 24)

    def model() -> Tensor:
        return bound.call([(x @ weight).relu(), x, x * 2]).softmax(-1).bfloat16()

    with torch.inference_mode(inference), bound.backend.capture(Mode.DECODE, 4):
        y = model()
    batch = Batch(Mode.DECODE, [1] * 4, [9] * 4, [1, 2, 3, 4], [1, 2, 3, 4])
    x.normal_()
    with put_back(bound) as want:
        bound.backend.begin(batch)
        out = model()
    bound.backend.replay(batch)
    assert torch.equal(y, out)
    assert same(states(bound), want)
