"""Full and linear attention begin, run and commit as one; a failure leaves no half of a step."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hal
from hal.errors import CompositionError, ProviderError, StepOrderError
from hal.model.spec import DeltaDims, ScanDims, ShortConvDims
from hal.runtime import tape
from hal.runtime.backend import Backend
from hal.runtime.batch import Batch, Mode
from hal.runtime.hybrid import HybridBackend
from hal.runtime.inputs import (
    AttentionInputs,
    CcaInputs,
    DeltaInputs,
    LinearInputs,
    ScanInputs,
    ShortConvInputs,
)
from hal.runtime.params import LayerParams, ShortConvParams
from hal.runtime.phase_split import PhaseSplit
from hal.runtime.phases import Phases
from hal.runtime.scan_layer import ScanLayer
from support.attention import Attention, Speculating
from support.bound import GDN_CONFIG, LFM2_CONFIG, delta_params
from support.bound_scan import cca_params, scan_params
from support.model_configs import tiny

WIDTH = 3


@dataclass
class Made:
    """A hybrid over one family's first linear layer, and random inputs for it."""

    hybrid: HybridBackend
    full: Speculating
    layer_id: int
    inputs: Callable[[int], LinearInputs]

    @property
    def states(self) -> list[Tensor]:
        """The layer's state tensors."""
        return list(self.hybrid.pool.tensors(self.layer_id).values())


def make(family: str, **options: object) -> Made:
    selection = hal.select("cpu", CONFIGS[family], **options)
    full = Speculating("flash", scale=2.0)
    hybrid = selection.backend(slots=6, max_batch=8, max_tokens=64, full=full)
    spec = next(selection.model.stateful_layers())
    params, inputs = BINDINGS[type(spec.dims)](spec.dims)
    hybrid.layer(spec.index, params)
    made = Made(hybrid, full, spec.index, inputs)
    for state in made.states:
        state.fill_(float("nan"))
    return made


Binding = tuple[LayerParams, Callable[[int], LinearInputs]]


def _delta(dims: DeltaDims) -> Binding:
    channels = sum(size for _, size in dims.segments)
    return delta_params(dims), lambda tokens: DeltaInputs(
        torch.randn(tokens, channels), torch.randn(tokens, dims.HV), torch.randn(tokens, dims.HV)
    )


def _scan(dims: ScanDims) -> Binding:
    channels = dims.I + 2 * dims.G * dims.N
    return scan_params(dims), lambda tokens: ScanInputs(
        torch.randn(tokens, channels), torch.randn(tokens, dims.H), torch.randn(tokens, dims.I)
    )


def _short(dims: ShortConvDims) -> Binding:
    weight = torch.randn(dims.hidden, dims.W)
    return ShortConvParams(weight, None), lambda tokens: ShortConvInputs(
        *(torch.randn(tokens, dims.hidden) for _ in range(3))
    )


def _cca(dims: hal.model.CcaDims) -> Binding:
    return cca_params(dims), lambda tokens: CcaInputs(
        torch.randn(tokens, dims.channels), torch.randn(tokens, dims.hidden)
    )


BINDINGS = {DeltaDims: _delta, ScanDims: _scan, ShortConvDims: _short, hal.model.CcaDims: _cca}
CONFIGS = {
    "cca": tiny("zaya"),
    "delta": GDN_CONFIG,
    "falcon_h1": tiny("falcon_h1"),
    "mamba2": tiny("bamba"),
    "short_conv": LFM2_CONFIG,
}


def attention(tokens: int, heads: int = 4) -> AttentionInputs:
    """Two key-value heads, a value dim of its own."""
    q, k, v = (torch.randn(tokens, n, d) for n, d in ((heads, 8), (2, 8), (2, 6)))
    return AttentionInputs(q, k, v)


def tensors(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def decode(slots: list[int], start: int) -> Batch:
    return Batch(Mode.DECODE, [1] * len(slots), [start] * len(slots), slots, slots)


def prompt(slot: int, tokens: int, mode: Mode = Mode.EXTEND) -> Batch:
    return Batch(mode, [tokens], [0], [-1], [slot])


def test_a_selection_gives_a_hybrid_where_full_is_given() -> None:
    selection = hal.select("cpu", GDN_CONFIG)
    full = Attention("flash")
    assert type(selection.backend(2, 2, 8)) is Backend
    hybrid = selection.backend(2, 2, 8, full=full)
    assert type(hybrid) is HybridBackend
    assert hybrid.full is full
    assert hybrid.pool is hybrid.linear.pool


@pytest.mark.parametrize("family", CONFIGS)
def test_each_part_of_a_layer_is_found_by_its_id_and_inputs(family: str) -> None:
    made = make(family)
    hybrid, twin = made.hybrid, make(family).hybrid.linear
    layer = twin.layer(made.layer_id, _params_of(made))
    given, heads = made.inputs(5), attention(5)
    with torch.inference_mode():
        hybrid.begin(prompt(2, 5))
        twin.begin(prompt(2, 5))
        for got, wanted in zip(
            tensors(hybrid.forward(made.layer_id, given)), tensors(given.run(layer)), strict=True
        ):
            assert torch.equal(got, wanted)
        attends = _attending(made)
        out = hybrid.forward(attends, heads)
    assert torch.equal(out, heads.v.repeat_interleave(2, 1) * 2)
    assert made.full.log == [("begin", Mode.EXTEND), ("forward", attends)]


def _params_of(made: Made) -> LayerParams:
    """The weights that `make` drew, which are those of the seed; short conv keeps its own."""
    spec = next(made.hybrid.linear.selection.model.stateful_layers())
    if isinstance(spec.dims, ShortConvDims):
        bound = made.hybrid._bound[made.layer_id]
        return ShortConvParams(bound.bound_conv.weight, None)  # type: ignore[union-attr]
    return BINDINGS[type(spec.dims)](spec.dims)[0]


def test_a_hybrid_layer_runs_both_its_parts_in_one_step() -> None:
    """Falcon-H1: attention and scan beside each other in every layer."""
    made = make("falcon_h1")
    with torch.inference_mode():
        made.hybrid.begin(prompt(1, 4))
        scanned = made.hybrid.forward(made.layer_id, made.inputs(4))
        attended = made.hybrid.forward(made.layer_id, attention(4))
    assert scanned.shape[0] == attended.shape[0] == 4
    assert made.full.log == [("begin", Mode.EXTEND), ("forward", made.layer_id)]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("pads", [0, 3])
def test_an_idle_step_gives_the_shapes_of_a_real_one_without_its_rows(
    family: str, pads: int
) -> None:
    made, real = make(family), make(family)
    before = [state.clone() for state in made.states]
    layer = _attending(made)
    with torch.inference_mode():
        made.hybrid.begin(Batch(Mode.IDLE))
        real.hybrid.begin(prompt(1, 5))
        pairs = [
            (made.hybrid.forward(layer, attention(pads)), real.hybrid.forward(layer, attention(5))),
            *zip(
                tensors(made.hybrid.forward(made.layer_id, made.inputs(pads))),
                tensors(real.hybrid.forward(real.layer_id, real.inputs(5))),
                strict=True,
            ),
        ]
    for idle, busy in pairs:
        assert idle.shape == (pads, *busy.shape[1:])
        assert idle.dtype == busy.dtype
        assert not idle.any()
    assert made.full.log == [("begin", Mode.IDLE)]
    for state, old in zip(made.states, before, strict=True):
        assert torch.equal(torch.nan_to_num(state), torch.nan_to_num(old))


@contextmanager
def failing(part: Attention) -> Iterator[None]:
    part.failure = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        yield
    part.failure = None


@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.VERIFY])
def test_a_step_that_fails_in_the_full_part_is_begun_in_neither(mode: Mode) -> None:
    made = make("delta", speculative=hal.Speculative(WIDTH))
    before = [state.clone() for state in made.states]
    with failing(made.full):
        made.hybrid.begin(prompt(1, 2, mode))
    for inputs in (made.inputs(2), attention(2)):
        with pytest.raises(StepOrderError, match="before begin"):
            made.hybrid.forward(made.layer_id, inputs)
    with pytest.raises(StepOrderError, match="commit without a verify"):
        made.hybrid.commit([1])
    made.hybrid.begin(prompt(1, 2))
    assert made.full.log == [("begin", Mode.EXTEND)]
    for state, old in zip(made.states, before, strict=True):
        assert torch.equal(torch.nan_to_num(state), torch.nan_to_num(old))


def test_a_batch_that_the_linear_part_refuses_never_reaches_the_full_part() -> None:
    made = make("delta")
    with pytest.raises(ValueError, match=r"slot 7 in dst, pool has slots 1\.\.6"):
        made.hybrid.begin(prompt(7, 2))
    assert made.full.log == []
    with pytest.raises(StepOrderError, match="before begin"):
        made.hybrid.forward(3, attention(2))


def test_a_step_on_an_uncommitted_verify_is_refused_and_the_commit_still_comes() -> None:
    made = make("delta", speculative=hal.Speculative(WIDTH))
    with torch.inference_mode():
        made.hybrid.begin(prompt(1, 2, Mode.VERIFY))
        made.hybrid.forward(made.layer_id, made.inputs(2))
        with pytest.raises(StepOrderError, match="step after an uncommitted verify"):
            made.hybrid.begin(decode([1], 2))
        made.hybrid.commit([2])
    assert made.full.log == [("begin", Mode.VERIFY), ("commit", [2], None)]


def test_counts_that_the_linear_part_refuses_move_nothing_in_the_full_part() -> None:
    made = make("delta", speculative=hal.Speculative(WIDTH))
    with torch.inference_mode():
        made.hybrid.begin(prompt(1, 2, Mode.VERIFY))
        made.hybrid.forward(made.layer_id, made.inputs(2))
        with pytest.raises(ValueError, match="3 accepted in row 0"):
            made.hybrid.commit([3])
    assert made.full.log == [("begin", Mode.VERIFY)]


@pytest.mark.parametrize("kind", [numpy.uint8, torch.tensor])
def test_the_full_part_gets_plain_integers_whatever_an_engine_keeps_them_in(kind: Any) -> None:
    made = make("delta", speculative=hal.Speculative(WIDTH), graphs=True)
    with torch.inference_mode():
        with made.hybrid.capture(Mode.VERIFY, kind(2), kind(WIDTH), record=False):
            pass
        made.hybrid.begin(prompt(1, 2, Mode.VERIFY))
        made.hybrid.forward(made.layer_id, made.inputs(2))
        made.hybrid.commit([kind(2)])
    capture, _, commit = made.full.log
    assert [type(size) for size in capture[2:]] == [int, int]
    assert commit == ("commit", [2], None)
    assert type(commit[1][0]) is int


def test_an_abandoned_verify_leaves_its_slot_as_it_was_and_the_next_step_begins() -> None:
    made = make("delta", speculative=hal.Speculative(WIDTH))
    with torch.inference_mode():
        made.hybrid.begin(prompt(1, 3))
        made.hybrid.forward(made.layer_id, made.inputs(3))
        before = [state[1].clone() for state in made.states]
        made.hybrid.begin(Batch(Mode.VERIFY, [2], [3], [1], [1]))
        made.hybrid.forward(made.layer_id, made.inputs(2))
        made.hybrid.abandon()
        assert all(torch.equal(s[1], b) for s, b in zip(made.states, before, strict=True))
        made.hybrid.begin(decode([1], 3))


@settings(max_examples=20)
@given(st.lists(st.integers(0, WIDTH), min_size=1, max_size=5), st.integers(0, 2**16))
def test_verify_and_commit_through_the_hybrid_equal_the_accepted_tokens_run_alone(
    schedule: list[int], seed: int
) -> None:
    """P048, P053: the commit reaches both parts, for any acceptance."""
    torch.manual_seed(seed)
    made, twin = (make("mamba2", speculative=hal.Speculative(WIDTH)) for _ in range(2))
    done, wanted, full = 0, [], made.full
    with torch.inference_mode():
        for accepted in schedule:
            src = [1] if done else [-1]
            given = made.inputs(WIDTH)
            made.hybrid.begin(Batch(Mode.VERIFY, [WIDTH], [done], src, [1]))
            made.hybrid.forward(made.layer_id, given)
            made.hybrid.commit([accepted])
            wanted += [("begin", Mode.VERIFY), ("commit", [accepted], None)]
            assert isinstance(given, ScanInputs) and given.z is not None
            cut = ScanInputs(given.mixed[:accepted], given.dt[:accepted], given.z[:accepted])
            twin.hybrid.begin(Batch(Mode.EXTEND, [accepted], [done], src, [1]))
            twin.hybrid.forward(twin.layer_id, cut)
            done += accepted
    assert full.log == wanted
    if done:
        for got, alone in zip(made.states, twin.states, strict=True):
            torch.testing.assert_close(got[1], alone[1], rtol=1e-5, atol=1e-5)


def test_speculation_over_a_full_part_without_commit_is_refused_by_name() -> None:
    """P048: it is found when the parts are put together, not at the first commit."""
    selection = hal.select("cpu", GDN_CONFIG, speculative=hal.Speculative(WIDTH))
    split = PhaseSplit(Attention("plain"), Speculating("able"), verify="prefill")
    for full in (Attention("plain"), split):
        with pytest.raises(CompositionError) as caught:
            selection.backend(2, 2, 8, full=full)
        assert str(caught.value) == (
            f"hybrid: speculation of width 3 was selected, and the full part {full.label} has no "
            f"commit; compose one that has, or select without speculative"
        )
    selection.backend(2, 2, 8, full=PhaseSplit(split, Speculating("able"), verify="decode"))
    hal.select("cpu", GDN_CONFIG).backend(2, 2, 8, full=split)


def test_a_commit_without_speculation_is_an_error() -> None:
    made = make("delta")
    made.hybrid.begin(prompt(1, 2))
    with pytest.raises(StepOrderError, match="selection with speculative"):
        made.hybrid.commit([1])


@pytest.mark.parametrize(
    ("family", "phases"),
    [
        ("cca", Phases.SPLIT),
        ("delta", Phases.SPLIT),
        ("falcon_h1", Phases.UNIFIED),
        ("mamba2", Phases.UNIFIED),
        ("short_conv", Phases.SPLIT),
    ],
)
def test_a_bound_layer_serves_just_the_calls_that_it_declares(family: str, phases: Phases) -> None:
    """P057: generic code asks, and what it may call works in every mode of the call."""
    made = make(family)
    assert made.hybrid.phases(made.layer_id) is phases
    with torch.inference_mode():
        made.hybrid.begin(prompt(1, 3))
        given = made.inputs(3)
        if phases is Phases.UNIFIED:
            for call in (made.hybrid.forward_extend, made.hybrid.forward_decode):
                with pytest.raises(NotImplementedError, match=r"use forward\(layer_id, inputs\)"):
                    call(made.layer_id, given)
            made.hybrid.forward(made.layer_id, given)
            return
        with pytest.raises(StepOrderError, match="called in a EXTEND step"):
            made.hybrid.forward_decode(made.layer_id, given)
        made.hybrid.forward_extend(made.layer_id, given)
        made.hybrid.begin(decode([1], 3))
        with pytest.raises(StepOrderError, match="called in a DECODE step"):
            made.hybrid.forward_extend(made.layer_id, made.inputs(1))
        made.hybrid.forward_decode(made.layer_id, made.inputs(1))
        for call in (made.hybrid.forward_decode, made.hybrid.forward_extend):
            made.hybrid.begin(Batch(Mode.IDLE))
            call(made.layer_id, made.inputs(0))


def test_a_call_by_phase_may_be_of_an_attention_layer() -> None:
    made = make("falcon_h1")
    made.hybrid.begin(prompt(1, 3))
    assert made.hybrid.forward_extend(made.layer_id, attention(3)) is not None
    with pytest.raises(StepOrderError, match="forward_decode"):
        made.hybrid.forward_decode(made.layer_id, attention(3))


def test_a_scan_layer_by_itself_names_its_one_call() -> None:
    made = make("mamba2")
    layer = made.hybrid._bound[made.layer_id]
    assert isinstance(layer, ScanLayer)
    assert layer.phases is Phases.UNIFIED
    given = made.inputs(1)
    assert isinstance(given, ScanInputs)
    for call in (layer.forward_decode, layer.forward_extend):
        with pytest.raises(NotImplementedError) as caught:
            call(given.mixed, given.dt, given.z)
        assert str(caught.value) == (
            f"{call.__name__}: a scan takes prefill and decode rows in one call; "
            f"use forward(mixed, dt, z)"
        )


@settings(max_examples=10)
@given(st.permutations(range(4)), st.integers(0, 2**16))
def test_prefill_and_decode_rows_of_one_scan_call_equal_those_of_calls_alone(
    order: list[int], seed: int
) -> None:
    """P055, P056, P058: rows of any kind in any order, beside each other or by themselves."""
    torch.manual_seed(seed)
    mixed, alone = make("mamba2"), make("mamba2")
    lengths, starts = [1, 1, 5, 1], [3, 4, 0, 0]
    slots, src = [1, 2, 3, 4], [1, 2, -1, -1]
    with torch.inference_mode():
        for slot, tokens in ((1, 3), (2, 4)):
            warm = mixed.inputs(tokens)
            for made in (mixed, alone):
                made.hybrid.begin(prompt(slot, tokens))
                made.hybrid.forward(made.layer_id, warm)
        given = [mixed.inputs(n) for n in lengths]
        joined = ScanInputs(*(torch.cat([_at(given[i], f) for i in order]) for f in range(3)))
        fields = [[values[i] for i in order] for values in (lengths, starts, src, slots)]
        mixed.hybrid.begin(Batch(Mode.MIXED, *fields))
        together = mixed.hybrid.forward(mixed.layer_id, joined).split([lengths[i] for i in order])
        for row, out in zip(order, together, strict=True):
            mode = Mode.EXTEND if src[row] < 0 else Mode.DECODE
            batch = Batch(mode, [lengths[row]], [starts[row]], [src[row]], [slots[row]])
            alone.hybrid.begin(batch)
            single = alone.hybrid.forward(alone.layer_id, given[row])
            torch.testing.assert_close(out, single, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(mixed.states, alone.states, strict=True):
        torch.testing.assert_close(got[1:5], wanted[1:5], rtol=1e-5, atol=1e-5)


def _at(inputs: LinearInputs, field: int) -> Tensor:
    assert isinstance(inputs, ScanInputs) and inputs.z is not None
    return (inputs.mixed, inputs.dt, inputs.z)[field]


@pytest.mark.parametrize("family", ["delta", "falcon_h1", "short_conv"])
def test_a_padded_replay_of_both_parts_equals_the_eager_step(family: str) -> None:
    graphed, eager = make(family, graphs=True), make(family, graphs=True)
    if family == "short_conv":
        graphed.hybrid.layer(graphed.layer_id, _params_of(eager))
    attends = _attending(graphed)
    with torch.inference_mode():
        static, heads = graphed.inputs(4), attention(4)
        with graphed.hybrid.capture(Mode.DECODE, 4) as captured:
            outs = [graphed.hybrid.forward(graphed.layer_id, static)]
            outs.append(graphed.hybrid.forward(attends, heads))
        for slot in (1, 2, 3, 4):
            warm = graphed.inputs(3)
            for made in (graphed, eager):
                made.hybrid.begin(prompt(slot, 3))
                made.hybrid.forward(made.layer_id, warm)
        for turn, slots in enumerate(([1, 2, 3, 4], [3], [], [2, 4, 1])):
            fresh, q = eager.inputs(4), attention(4)
            _overwrite(static, fresh)
            _overwrite(heads, q)
            batch = decode(slots, 3 + turn)
            assert graphed.hybrid.replay(batch) is captured
            eager.hybrid.begin(batch)
            wanted = [eager.hybrid.forward(eager.layer_id, _cut(fresh, len(slots)))]
            wanted.append(eager.hybrid.forward(attends, _cut(q, len(slots))))
            for out, alone in zip(outs, wanted, strict=True):
                assert torch.equal(out[: len(slots)], alone)
            for got, twin in zip(graphed.states, eager.states, strict=True):
                assert torch.equal(torch.nan_to_num(got[1:]), torch.nan_to_num(twin[1:]))
    ways = [entry[0] for entry in graphed.full.log if entry[0] != "begin"]
    assert ways == ["capture", "forward", *["replay"] * 4]


def test_a_capture_makes_its_metadata_before_the_block_is_entered() -> None:
    """An engine that records the block itself would replay writes that were made inside it."""
    made = make("delta", graphs=True)
    block = made.hybrid.capture(Mode.DECODE, 2, record=False)
    assert ("capture", Mode.DECODE, 2, 1) in made.full.log
    before = len(made.full.log)
    with torch.inference_mode(), block:
        pass
    assert len(made.full.log) == before


def test_a_capture_ends_the_step_that_ran() -> None:
    """The full part's metadata is of the capture from then on, whether its block is entered."""
    made = make("delta", graphs=True)
    made.hybrid.begin(prompt(1, 3))
    made.hybrid.capture(Mode.DECODE, 2)
    assert made.hybrid.mode is None
    with pytest.raises(StepOrderError, match="before begin"):
        made.hybrid.forward(_attending(made), attention(3))


def _attending(made: Made) -> int:
    model = made.hybrid.linear.selection.model
    return next(layer.index for layer in model.layers if layer.attention is not None)


def _fields(inputs: LinearInputs | AttentionInputs) -> dict[str, Tensor]:
    named = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    return {name: value for name, value in named.items() if value is not None}


def _overwrite(
    static: LinearInputs | AttentionInputs, fresh: LinearInputs | AttentionInputs
) -> None:
    for name, value in _fields(fresh).items():
        _fields(static)[name].copy_(value)


def _cut(inputs: Any, rows: int) -> Any:
    cut = {name: value[:rows] for name, value in _fields(inputs).items()}
    return dataclasses.replace(inputs, **cut)


def test_a_replay_that_fails_in_the_full_part_runs_nothing_and_owes_nothing() -> None:
    made = make("delta", graphs=True, speculative=hal.Speculative(WIDTH))
    with torch.inference_mode():
        static = made.inputs(2 * WIDTH)
        with made.hybrid.capture(Mode.VERIFY, 2, WIDTH):
            made.hybrid.forward(made.layer_id, static)
        with failing(made.full):
            made.hybrid.replay(prompt(1, 2, Mode.VERIFY))
        with pytest.raises(StepOrderError, match="commit without a verify"):
            made.hybrid.commit([1])
        before = [state.clone() for state in made.states]
        made.hybrid.replay(prompt(1, 2, Mode.VERIFY))
        made.hybrid.commit([2])
    assert not torch.equal(before[0][1], made.states[0][1])
    assert made.full.log == [
        ("capture", Mode.VERIFY, 2, WIDTH),
        ("replay", Mode.VERIFY),
        ("commit", [2], None),
    ]


def test_a_replay_whose_block_fails_owes_no_commit_in_either_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(self: object) -> None:
        raise RuntimeError("device lost")

    made = make("delta", graphs=True, speculative=hal.Speculative(WIDTH))
    with torch.inference_mode():
        static = made.inputs(2 * WIDTH)
        with made.hybrid.capture(Mode.VERIFY, 2, WIDTH):
            made.hybrid.forward(made.layer_id, static)
        with monkeypatch.context() as patched:
            patched.setattr(tape._Entry, "run", lost)
            with pytest.raises(ProviderError, match="captured VERIFY step of 2 rows failed"):
                made.hybrid.replay(prompt(1, 2, Mode.VERIFY))
        with pytest.raises(StepOrderError, match="commit without a verify"):
            made.hybrid.commit([1])
        made.hybrid.begin(prompt(1, 2))


def test_a_replay_stores_its_tracked_rows_at_once() -> None:
    made = make("delta", graphs=True, prefix_cache=True)
    with torch.inference_mode():
        static = made.inputs(2)
        made.hybrid.begin(prompt(1, 2))
        made.hybrid.forward(made.layer_id, made.inputs(2))
        with made.hybrid.capture(Mode.DECODE, 2):
            made.hybrid.forward(made.layer_id, static)
        made.hybrid.replay(Batch(Mode.DECODE, [1], [2], [1], [1], [(0, 3, 4)]))
    for state in made.states:
        assert torch.equal(state[4], state[1]) and state[4].isfinite().all()


@pytest.mark.parametrize(("rows", "width"), [(2, 1), (9, 1), (2, 5)])
def test_a_capture_that_is_refused_never_reaches_the_full_part(rows: int, width: int) -> None:
    """In the first case a commit is owed; it then goes to the part that verified."""
    made = make("delta", graphs=True, speculative=hal.Speculative(WIDTH))
    verifies, decodes = Speculating("prefill"), Speculating("decode")
    hybrid = HybridBackend(PhaseSplit(verifies, decodes), made.hybrid.linear)
    if width == 1 and rows == 2:
        hybrid.begin(prompt(1, 2, Mode.VERIFY))
        made.inputs(2).run(hybrid.linear._layers[made.layer_id])
    with pytest.raises((ValueError, StepOrderError), match="capture"):
        hybrid.capture(Mode.DECODE, rows, width)
    assert decodes.log == []
    if width == 1 and rows == 2:
        hybrid.commit([2])
        assert verifies.log[-1] == ("commit", [2], None)


def test_a_hybrid_says_what_its_linear_part_was_built_for() -> None:
    made = make("delta", prefix_cache=True)
    hybrid, linear = made.hybrid, made.hybrid.linear
    assert hybrid.limits is linear.limits and hybrid.limits.track is not None
    assert hybrid.selection is linear.selection and hybrid.device == linear.device
    assert hybrid.mode is None
    hybrid.begin(prompt(1, 2))
    assert hybrid.mode is Mode.EXTEND


def test_inputs_of_another_kind_and_unknown_layers_are_refused_by_name() -> None:
    made = make("delta")
    made.hybrid.begin(prompt(1, 2))
    ones = torch.ones(2, 4)
    for wrong, name in (
        (ScanInputs(ones, ones), "ScanInputs"),
        (ShortConvInputs(ones, ones, ones), "ShortConvInputs"),
        (CcaInputs(ones, ones), "CcaInputs"),
    ):
        with pytest.raises(TypeError, match=f"layer call: {name} for a DeltaLayer"):
            wrong.run(made.hybrid._bound[made.layer_id])
    with pytest.raises(TypeError, match="DeltaInputs for a ScanLayer"):
        scan = make("mamba2")
        made.inputs(2).run(scan.hybrid._bound[scan.layer_id])
    with pytest.raises(ValueError, match=r"layer 0 has no full attention; layers that have: 3"):
        made.hybrid.forward(0, attention(2))
    with pytest.raises(ValueError, match="layer 3 has no linear part that was bound; bound: 0"):
        made.hybrid.forward(3, made.inputs(2))


def test_no_layer_runs_before_begin_or_after_end() -> None:
    made = make("delta")
    for _ in range(2):
        for inputs in (made.inputs(2), attention(2)):
            with pytest.raises(StepOrderError, match="before begin"):
                made.hybrid.forward(3, inputs)
        made.hybrid.begin(prompt(1, 2))
        made.hybrid.end()
    made.hybrid.warmup()
