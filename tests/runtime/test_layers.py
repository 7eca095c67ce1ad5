"""Whatever the steps, the slots and the neighbours: a request gets what it gets alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hal
from hal.errors import ProviderError, StepOrderError
from hal.model.spec import DeltaDims
from hal.runtime.batch import Batch, Mode
from hal.runtime.layers import DeltaLayer
from support.bound import FAMILIES, GDN_CONFIG, Bound, backend_for, delta, delta_params


@pytest.fixture(params=sorted(FAMILIES), scope="module")
def bound(request: pytest.FixtureRequest) -> Bound:
    """One bound layer of each family."""
    return FAMILIES[request.param]()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


class Request:
    """A request's inputs, how many tokens are done, its slot, and the outputs so far."""

    def __init__(self, bound: Bound, tokens: int, slot: int) -> None:
        self.given = bound.inputs(tokens)
        self.want = bound.alone(self.given)
        self.tokens, self.done, self.slot = tokens, 0, slot
        self.outputs: list[torch.Tensor] = []

    def take(self, count: int) -> list[torch.Tensor]:
        return [tensor[self.done : self.done + count] for tensor in self.given]


def run_step(bound: Bound, rows: list[tuple[Request, int]], mode: Mode) -> None:
    """Feed `count` tokens of each request, packed, and keep the outputs."""
    batch = Batch(
        mode,
        [count for _, count in rows],
        [request.done for request, _ in rows],
        [request.slot if request.done else -1 for request, _ in rows],
        [request.slot for request, _ in rows],
    )
    bound.backend.begin(batch)
    packed = [torch.cat(parts) for parts in zip(*(r.take(n) for r, n in rows), strict=True)]
    out = bound.call(packed)
    for (request, count), piece in zip(rows, out.split([n for _, n in rows]), strict=True):
        request.outputs.append(piece.clone())
        request.done += count


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_what_each_request_gives_alone(
    bound: Bound, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 20)))
    slots = data.draw(st.permutations(range(1, 7)))[:3]
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=3, max_size=3))
    requests = [Request(bound, n, slot) for n, slot in zip(lengths, slots, strict=True)]
    while live := [r for r in requests if r.done < r.tokens]:
        rows = [
            (r, min(data.draw(st.sampled_from([40, 3, 2, 1, 1, 0])), r.tokens - r.done))
            for r in data.draw(st.permutations(live))
        ]
        if all(n == 1 and r.done for r, n in rows):
            mode = data.draw(st.sampled_from([Mode.DECODE, Mode.MIXED]))
        else:
            mode = data.draw(st.sampled_from([Mode.EXTEND, Mode.MIXED]))
        run_step(bound, rows, mode)
    for request in requests:
        assert relative(torch.cat(request.outputs), request.want) < 1e-5


def test_a_slot_may_be_reused_without_clearing_it(bound: Bound) -> None:
    for tokens in (40, 2, 1):
        request = Request(bound, tokens, slot=3)
        run_step(bound, [(request, tokens)], Mode.EXTEND)
        assert relative(torch.cat(request.outputs), request.want) < 1e-5


def test_a_fork_continues_from_the_cached_state_and_leaves_it_alone(bound: Bound) -> None:
    request = Request(bound, 20, slot=2)
    run_step(bound, [(request, 12)], Mode.EXTEND)
    cached = [
        t[2].clone()
        for spec in bound.backend.pool.states
        for t in [bound.backend.pool.tensors(spec.layer)[spec.name]]
    ]
    bound.backend.begin(Batch(Mode.EXTEND, [8], [12], [2], [5]))
    out = bound.call(request.take(8))
    assert relative(out, request.want[12:]) < 1e-5
    after = [
        t[2]
        for spec in bound.backend.pool.states
        for t in [bound.backend.pool.tensors(spec.layer)[spec.name]]
    ]
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(cached, after, strict=True)
    )


def test_a_decode_pad_row_is_zero_and_changes_no_byte(bound: Bound) -> None:
    request = Request(bound, 9, slot=4)
    run_step(bound, [(request, 8)], Mode.EXTEND)
    pads = [torch.full_like(t[:2], float("nan")) for t in request.given]
    given = [torch.cat((p[:1], t, p[1:])) for p, t in zip(pads, request.take(1), strict=True)]
    bound.backend.begin(Batch(Mode.DECODE, [1, 1, 1], [0, 8, 0], [-1, 4, -1], [-1, 4, -1]))
    out = bound.call(given)
    assert (out[0] == 0).all() and (out[2] == 0).all()
    assert relative(out[1:2], request.want[8:]) < 1e-5


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND, Mode.MIXED, Mode.IDLE])
def test_no_rows_give_the_empty_result_in_every_mode(bound: Bound, mode: Mode) -> None:
    bound.backend.begin(Batch(mode))
    out = bound.call(bound.inputs(0))
    assert out.shape == (0, *bound.alone(bound.inputs(1)).shape[1:])


def test_a_layer_before_begin_or_after_a_failed_one_is_an_error(bound: Bound) -> None:
    fresh = delta()
    with pytest.raises(StepOrderError, match="before begin"):
        fresh.call(fresh.inputs(1))
    bound.backend.begin(Batch(Mode.EXTEND, [1], [0], [-1], [1]))
    with pytest.raises(ValueError):
        bound.backend.begin(Batch(Mode.EXTEND, [1], [0], [-1], [99]))
    with pytest.raises(StepOrderError):
        bound.call(bound.inputs(1))


def test_tracked_positions_hold_the_state_of_the_prefix_run_alone() -> None:
    backend = backend_for(GDN_CONFIG, prefix_cache=True)
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, DeltaDims)
    layer = backend.layer(spec.index, delta_params(spec.dims))
    assert isinstance(layer, DeltaLayer)
    channels = sum(size for _, size in spec.dims.segments)
    x, ab = torch.randn(30, channels), torch.randn(2, 30, spec.dims.HV)
    backend.begin(Batch(Mode.EXTEND, [30], [0], [-1], [1], track=[(0, 17, 2), (0, 2, 3)]))
    layer(x, ab[0], ab[1])
    for count, tracked in ((17, 2), (2, 3)):
        backend.begin(Batch(Mode.EXTEND, [count], [0], [-1], [4]))
        layer(x[:count], ab[0, :count], ab[1, :count])
        for name, tensor in backend.pool.tensors(spec.index).items():
            alone = tensor[4]
            assert torch.allclose(tensor[tracked], alone, rtol=1e-5, atol=1e-6), name


def test_z_without_a_bound_norm_is_refused() -> None:
    backend = backend_for(GDN_CONFIG)
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, DeltaDims)
    params = delta_params(spec.dims)
    bare = type(params)(params.conv_weight, None, params.gate)
    layer = backend.layer(spec.index, bare)
    backend.begin(Batch(Mode.EXTEND, [1], [0], [-1], [1]))
    channels = sum(size for _, size in spec.dims.segments)
    with pytest.raises(ValueError, match="bound without norm_weight"):
        layer(torch.randn(1, channels), torch.randn(1, 4), torch.randn(1, 4), torch.randn(1, 4, 12))


def test_weights_of_another_shape_or_layer_are_refused_at_bind() -> None:
    backend = backend_for(GDN_CONFIG)
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, DeltaDims)
    params = delta_params(spec.dims)
    wrong = type(params)(params.conv_weight[:, :3], None, params.gate)
    with pytest.raises(ValueError, match=r"layer 0: conv weight is \[80, 3\], expected \[80, 4\]"):
        backend.layer(0, wrong)
    with pytest.raises(ValueError, match=r"layer 3 keeps no state; layers \[0, 1, 2\] do"):
        backend.layer(3, params)


def test_a_raw_provider_error_carries_operation_shapes_and_cause() -> None:
    bound = delta()
    bound.backend.begin(Batch(Mode.EXTEND, [2], [0], [-1], [1]))

    class Failing:
        def prefill(self, *given: object, **options: object) -> torch.Tensor:
            raise RuntimeError("inner error 507018")

    spec = next(bound.backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, DeltaDims)
    layer = bound.backend.layer(spec.index, delta_params(spec.dims))
    assert isinstance(layer, DeltaLayer)
    layer.prefill = Failing()  # type: ignore[assignment]
    with pytest.raises(ProviderError) as caught:
        layer(*bound.inputs(2))
    assert "delta_rule failed on inputs [2, 2, 8] torch.float32 on cpu" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_names_of_the_runtime_are_public() -> None:
    assert hal.Batch is Batch and hal.Mode is Mode


def test_tokens_beyond_the_rows_are_zero_whatever_they_hold(bound: Bound) -> None:
    request = Request(bound, 5, slot=4)
    tail = [torch.full_like(t[:3], float("nan")) for t in request.given]
    bound.backend.begin(Batch(Mode.EXTEND, [5], [0], [-1], [4]))
    out = bound.call([torch.cat(pair) for pair in zip(request.take(5), tail, strict=True)])
    assert (out[5:] == 0).all()
    assert relative(out[:5], request.want) < 1e-5
