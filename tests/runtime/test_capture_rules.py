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
from hal.errors import ProviderError, StepOrderError
from hal.model.spec import ShortConvDims
from hal.runtime import tape
from hal.runtime.batch import Batch, Mode
from hal.runtime.params import ShortConvParams
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


def breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the second call of every tape's replay fail."""
    seen: list[object] = []
    run = cast("Any", tape._Entry.run)

    def entry(self: object) -> None:
        seen.append(self)
        if len(seen) == 2:
            raise RuntimeError("device lost")
        run(self)

    monkeypatch.setattr(tape._Entry, "run", entry)


def test_a_replayed_verify_that_failed_is_not_committed_on_old_scratch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(bound_for_graphs("gated_delta_net"), Mode.VERIFY, (2,), 2)
    backend, batch = rig.bound.backend, Batch(Mode.VERIFY, [2, 1], [4, 4], [1, 2], [1, 2])
    rig.replay(batch, rig.bound.inputs(3))
    backend.commit([1, 1])
    before = [tensor.clone() for tensor in states(rig.bound)]
    with monkeypatch.context() as patched:
        breaks(patched)
        with pytest.raises(ProviderError, match="captured VERIFY step of 2 rows failed: device l"):
            backend.replay(batch)
    with pytest.raises(StepOrderError, match="commit without a verify"):
        backend.commit([2, 1])
    assert same(states(rig.bound), before)
    rig.replay(batch, rig.bound.inputs(3))
    backend.commit([2, 1])


def test_a_replayed_decode_that_failed_stores_no_track_point_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(bound_for_graphs("gated_delta_net", track=True), Mode.DECODE, (2,))
    with monkeypatch.context() as patched:
        breaks(patched)
        with pytest.raises(ProviderError, match="replay: the captured DECODE step of 2 rows"):
            rig.bound.backend.replay(Batch(Mode.DECODE, [1], [5], [2], [2], [(0, 6, 4)]))
    for tensor in states(rig.bound):
        tensor[4] = 7
    rig.bound.backend.begin(Batch(Mode.IDLE))
    assert all((tensor[4] == 7).all() for tensor in states(rig.bound))


def test_an_interrupt_of_a_replay_owes_nothing_and_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    rig = Rig(bound_for_graphs("short_conv"), Mode.VERIFY, (2,), 2)
    monkeypatch.setattr(tape._Entry, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.bound.backend.replay(Batch(Mode.VERIFY, [2], [4], [1], [1]))
    rig.bound.backend.begin(Batch(Mode.IDLE))


def test_a_step_that_was_staged_and_not_run_has_no_commit() -> None:
    rig = Rig(bound_for_graphs("gated_delta_net"), Mode.VERIFY, (2,), 2)
    backend, batch = rig.bound.backend, Batch(Mode.VERIFY, [2], [4], [1], [1])
    rig.replay(batch, rig.bound.inputs(2))
    backend.commit([1])
    captured = backend.stage(batch)
    with pytest.raises(StepOrderError, match="did not run in the verify step"):
        backend.commit([2])
    backend.launch(captured)
    backend.commit([2])


def test_a_capture_is_neither_ended_nor_abandoned_in_its_block() -> None:
    bound = bound_for_graphs("short_conv")
    with bound.backend.capture(Mode.VERIFY, 2, 2) as captured:
        bound.call(bound.inputs(4))
        for call in (bound.backend.abandon, bound.backend.end):
            assert refused(call, StepOrderError).endswith("a step is being captured")
    assert not captured.committed
    bound.backend.replay(Batch(Mode.VERIFY, [2], [4], [1], [1]))
    assert refused(lambda: bound.backend.begin(Batch(Mode.IDLE)), StepOrderError) == (
        "begin: step after an uncommitted verify"
    )


def test_a_capture_that_was_opened_before_a_verify_is_not_entered_behind_it() -> None:
    bound = bound_for_graphs("short_conv")
    opened = bound.backend.capture(Mode.DECODE, 2)
    bound.backend.begin(Batch(Mode.VERIFY, [2], [4], [1], [1]))
    bound.call(bound.inputs(2))
    with pytest.raises(StepOrderError, match="capture: step after an uncommitted verify"):
        with opened:
            pass
    bound.backend.commit([1])


def owing_a_point() -> Bound:
    """An engine's own graph has moved slot 2 to threes, which the step owes to slot 4."""
    bound = bound_for_graphs("short_conv", track=True)
    with bound.backend.capture(Mode.DECODE, 2, record=False):
        bound.call(bound.inputs(2))
    bound.backend.replay(Batch(Mode.DECODE, [1], [5], [2], [2], [(0, 6, 4)]))
    for tensor in states(bound):
        tensor[2], tensor[4] = 3, 7
    return bound


def stored(bound: Bound) -> bool:
    """Whether slot 4 holds the threes, and not what it held before."""
    found = {float(value) for tensor in states(bound) for value in tensor[4].flatten()}
    assert found in ({3.0}, {7.0})
    return found == {3.0}


def test_a_replay_stores_what_the_one_before_it_owes() -> None:
    bound = owing_a_point()
    bound.backend.replay(Batch(Mode.DECODE, [1], [6], [2], [2]))
    assert stored(bound)


def test_an_abandoned_replay_owes_no_track_point() -> None:
    bound = owing_a_point()
    bound.backend.abandon()
    bound.backend.begin(Batch(Mode.IDLE))
    assert not stored(bound)


@pytest.mark.parametrize("call", ["begin", "replay"])
def test_an_unknown_mode_is_refused_before_anything_changes(call: str) -> None:
    bound = owing_a_point()
    begin = getattr(bound.backend, call)
    unknown = Batch(cast("Mode", "SPLIT"))
    assert refused(lambda: begin(unknown)) == "Invalid forward mode: SPLIT"
    assert not stored(bound)
    bound.backend.begin(Batch(Mode.EXTEND, [2], [0], [-1], [1]))
    assert stored(bound)
    assert refused(lambda: begin(unknown)) == "Invalid forward mode: SPLIT"
    assert bound.backend.mode is Mode.EXTEND
    bound.backend.begin(Batch(Mode.VERIFY, [1], [4], [1], [1]))
    assert refused(lambda: begin(unknown)) == "Invalid forward mode: SPLIT"


@pytest.mark.parametrize("call", ["begin", "replay"])
def test_a_batch_that_is_refused_leaves_no_step_to_run(call: str) -> None:
    bound = owing_a_point()
    bound.backend.begin(Batch(Mode.EXTEND, [2], [0], [-1], [1]))
    far = Batch(Mode.DECODE, [1], [5], [9], [9])
    assert "slot 9" in refused(lambda: getattr(bound.backend, call)(far))
    with pytest.raises(StepOrderError, match=r"before begin\(batch\)"):
        bound.call(bound.inputs(2))


def bind_again(bound: Bound) -> None:
    spec = next(bound.backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, ShortConvDims)
    weight = torch.zeros(spec.dims.hidden, spec.dims.W)
    bound.backend.layer(spec.index, ShortConvParams(weight, None))


TAKES_BACK: dict[str, Callable[[Bound], object]] = {
    "abandon": lambda bound: bound.backend.abandon(),
    "begin": lambda bound: bound.backend.begin(Batch(Mode.IDLE)),
    "bind": bind_again,
    "end": lambda bound: bound.backend.end(),
    "launch": lambda bound: bound.backend.replay(Batch(Mode.DECODE)),
    "refused": lambda bound: refused(lambda: bound.backend.begin(Batch(Mode.DECODE, [1]))),
    "stage": lambda bound: bound.backend.stage(decode_batch(Random(0), 3)),
}


@pytest.mark.parametrize("what", sorted(TAKES_BACK))
@pytest.mark.parametrize("launched", [False, True])
def test_a_staged_step_runs_once_and_not_behind_another_call(what: str, launched: bool) -> None:
    """A record runs on whatever its buffer holds, so that a second run would move states again."""
    bound = bound_for_graphs("short_conv", track=True)
    Rig(bound, Mode.DECODE, (2, 4))
    batch = Batch(Mode.DECODE, [1], [5], [2], [2], [(0, 6, 4)])
    captured = bound.backend.stage(batch)
    assert captured.rows == 2
    if launched:
        bound.backend.launch(captured)
    before = [tensor.clone() for tensor in states(bound)]
    TAKES_BACK[what](bound)
    with pytest.raises(StepOrderError, match="launch: the step is not the one staged last"):
        bound.backend.launch(captured)
    bound.backend.end()
    assert same(states(bound), before)


def test_nothing_is_launched_that_was_not_staged() -> None:
    bound = bound_for_graphs("short_conv")
    with bound.backend.capture(Mode.DECODE, 2) as captured:
        bound.call(bound.inputs(2))
    for never in (captured, None):
        with pytest.raises(StepOrderError, match="is not the one staged last"):
            bound.backend.launch(cast("Any", never))


@pytest.mark.parametrize("sizes", [(2.0, 1), (2, 1.0)])
def test_rows_and_width_of_a_capture_are_integers(sizes: tuple[Any, Any]) -> None:
    bound = bound_for_graphs("short_conv")
    assert "integer" in refused(lambda: open_capture(bound, Mode.DECODE, *sizes), TypeError)


def test_a_staged_step_is_not_launched_inside_a_capture() -> None:
    bound = bound_for_graphs("short_conv")
    Rig(bound, Mode.DECODE, (2,))
    captured = bound.backend.stage(Batch(Mode.DECODE, [1], [5], [2], [2]))
    before = [tensor.clone() for tensor in states(bound)]
    with bound.backend.capture(Mode.DECODE, 4):
        with pytest.raises(StepOrderError, match="launch: a step is being captured"):
            bound.backend.launch(captured)
    assert same(states(bound), before)
