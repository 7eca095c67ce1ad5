"""What an engine may get wrong is refused with a typed error, before any state has moved."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import hal
from hal.errors import ProviderError, StepOrderError
from hal.interfaces import Gate
from hal.model.spec import DeltaDims, GateKind, Kind
from hal.runtime.batch import LAST_POSITION, Batch, DeviceSlots, Mode
from hal.runtime.layers import DeltaLayer
from hal.runtime.params import DeltaParams, ShortConvParams
from hal.runtime.pool import Slot
from support.backends import Bound, backend_for, selected_with
from support.bound import FAMILIES, GDN_CONFIG, delta, delta_params

KINDS = sorted(set(FAMILIES) - {"zamba"})


def states(bound: Bound) -> list[Tensor]:
    layer = next(bound.backend.selection.model.stateful_layers()).index
    return [tensor.clone() for tensor in bound.backend.pool.tensors(layer).values()]


def unchanged(bound: Bound, before: list[Tensor]) -> bool:
    pairs = zip(before, states(bound), strict=True)
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


def begin(bound: Bound, tokens: int = 2) -> list[Tensor]:
    """Open a step of one fresh row, and give its inputs."""
    bound.backend.begin(Batch(Mode.EXTEND, [tokens], [0], [-1], [1]))
    return bound.inputs(tokens)


@pytest.fixture(params=KINDS)
def bound(request: pytest.FixtureRequest) -> Bound:
    made: Callable[[], Bound] = FAMILIES[request.param]
    return made()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracked_decode_row_leaves_its_new_state_in_the_slot(kind: str) -> None:
    with selected_with(prefix_cache=True):
        bound = FAMILIES[kind]()
    given = bound.inputs(6)
    bound.backend.begin(Batch(Mode.EXTEND, [5], [0], [-1], [2]))
    bound.call([tensor[:5] for tensor in given])
    step = [torch.cat((tensor[5:], tensor[5:])) for tensor in given]
    track = [(0, 6, 4)]
    bound.backend.begin(Batch(Mode.DECODE, [1, 1], [5, 0], [2, -1], [2, 3], track=track))
    bound.call(step)
    for tensor in states(bound):
        assert torch.equal(tensor[4], tensor[2])
        assert tensor[5].isnan().all()


def test_a_tracked_decode_row_needs_a_slot_to_copy_from() -> None:
    backend = backend_for(GDN_CONFIG, prefix_cache=True)
    with pytest.raises(ValueError, match="track point of row 0, which has no dst to copy from"):
        backend.begin(Batch(Mode.DECODE, [1], [5], [2], [-1], track=[(0, 6, 4)]))


def test_slots_in_tensors_are_seen_to_be_equal() -> None:
    backend = backend_for(GDN_CONFIG)
    with pytest.raises(ValueError, match="slot 1 is dst of row 0 and dst of row 1"):
        backend.begin(Batch(Mode.EXTEND, [2, 3], [0, 0], [-1, -1], torch.tensor([1, 1])))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="row 1 reads slot 1, which row 0 writes"):
        slots = torch.tensor([1, 2])
        backend.begin(Batch(Mode.EXTEND, [2, 3], [0, 4], torch.tensor([-1, 1]), slots))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "bound", "message"),
    [
        ([1], 6, "src held is a list, expected a tensor; slots on the host go in src and dst"),
        (torch.tensor([1], dtype=torch.int32), None, "bounded by None, expected an integer"),
        (torch.tensor([1], dtype=torch.int32), 6.0, "bounded by 6.0, expected an integer"),
    ],
)
def test_slots_held_that_are_no_tensors_or_have_no_bound_are_refused_by_name(
    ids: Any, bound: Any, message: str
) -> None:
    backend = backend_for(GDN_CONFIG)
    with pytest.raises(TypeError, match=f"begin: .*{message}"):
        backend.begin(Batch(Mode.DECODE, [1], [4], held=DeviceSlots(ids, ids, bound)))


def test_what_is_no_integer_is_no_slot() -> None:
    with pytest.raises(TypeError):
        Batch(Mode.EXTEND, [2.0], [0], [-1], [1])  # type: ignore[list-item]


def test_positions_and_ids_beyond_int32_never_reach_the_device() -> None:
    backend = backend_for(GDN_CONFIG)
    backend.begin(Batch(Mode.EXTEND, [2], [0], [-(2**40)], [1]))
    with pytest.raises(ValueError, match=f"row 0 ends at {LAST_POSITION + 2}, beyond"):
        backend.begin(Batch(Mode.EXTEND, [2], [LAST_POSITION], [1], [1]))


def test_what_is_no_batch_or_no_point_is_refused() -> None:
    backend = backend_for(GDN_CONFIG, prefix_cache=True)
    with pytest.raises(TypeError, match="begin: expected a Batch, got int"):
        backend.begin(cast("Batch", 5))
    with pytest.raises(ValueError, match=r"expected \(row, position, slot\)"):
        short = cast("Any", [(0, 1)])
        backend.begin(Batch(Mode.EXTEND, [2], [0], [-1], [1], track=short))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"mamba1"}))
def test_an_input_of_another_length_moves_no_state(kind: str) -> None:
    """Mamba-1 is left out: its dt, B and C come from the conv's output, in a call of their own."""
    bound = FAMILIES[kind]()
    given = begin(bound)
    before = states(bound)
    for at in range(1, len(given)):
        wrong = [t[:1] if i == at else t for i, t in enumerate(given)]
        with pytest.raises(ValueError):
            bound.call(wrong)
        assert unchanged(bound, before)
    bound.call(given)


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": Tensor.double,
    "int64": Tensor.long,
    "gradients": lambda tensor: tensor.clone().requires_grad_(),
}


@pytest.mark.parametrize("odd", sorted(ODD))
def test_one_input_that_no_provider_takes_moves_no_state(bound: Bound, odd: str) -> None:
    """Of Mamba-1 the conv is a call of its own, and only the scan's inputs are odd behind it."""
    given = begin(bound)
    apart = len(states(bound)) - 1 if bound_is_mamba1(bound) else 0
    for at in range(len(given)):
        before = states(bound)
        wrong = [ODD[odd](t) if i == at else t for i, t in enumerate(given)]
        with pytest.raises((TypeError, ValueError), match="layer call: "):
            bound.call(wrong)
        kept = list(zip(before, states(bound), strict=True))[apart:]
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in kept)
        bound.backend.abandon()
        begin(bound)
    bound.call(given)
    assert not any(tensor.requires_grad for tensor in states(bound))


def bound_is_mamba1(bound: Bound) -> bool:
    spec = next(bound.backend.selection.model.stateful_layers())
    return spec.stateful is Kind.MAMBA1


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND, Mode.MIXED, Mode.VERIFY])
def test_fewer_tokens_than_the_step_has_reach_no_provider(mode: Mode) -> None:
    """A provider on a device cannot look at the rows' bounds, and would read behind the end."""
    for kind in KINDS:
        with selected_with(speculative=hal.Speculative(2)):
            bound = FAMILIES[kind]()
        length = 1 if mode is Mode.DECODE else 2
        bound.backend.begin(Batch(mode, [length] * 2, [3] * 2, [1, 2], [1, 2]))
        before = states(bound)
        with pytest.raises(ValueError, match=rf"tokens, the step has {2 * length}$"):
            bound.call(bound.inputs(2 * length - 1))
        assert unchanged(bound, before)
        bound.backend.abandon()


def test_the_pieces_of_a_layer_take_no_graph_into_the_pool() -> None:
    bound = delta()
    layer = next(iter(bound.backend._layers.values()))
    assert isinstance(layer, DeltaLayer)
    mixed, a, b, _ = bound.inputs(2)
    begin(bound)
    pieces = dict(zip("qkv", layer.split(mixed), strict=True)) | {"a": a, "b": b}

    def run(given: dict[str, Tensor], gate: Gate | None) -> Tensor:
        q, k, v, a, b = (given[name] for name in "qkvab")
        return layer.delta_rule(q, k, v, a, b, gate)

    before = states(bound)
    for name, tensor in pieces.items():
        wrong = pieces | {name: tensor.clone().requires_grad_()}
        with pytest.raises(ValueError, match=f"layer call: {name} requires grad"):
            run(wrong, layer.params.gate)
    assert unchanged(bound, before)
    gate = layer.params.gate
    assert gate is not None
    trained = replace(gate, A_log=torch.nn.Parameter(gate.A_log))
    out = run(pieces, trained)
    assert not out.requires_grad and not any(t.requires_grad for t in states(bound))


def test_activations_of_another_dtype_or_with_gradients_are_refused(bound: Bound) -> None:
    given = begin(bound)
    before = states(bound)
    with pytest.raises(TypeError, match=r"selected for torch\.float32"):
        bound.call([tensor.bfloat16() for tensor in given])
    with pytest.raises(ValueError, match="requires grad"):
        bound.call([tensor.requires_grad_() for tensor in given])
    assert unchanged(bound, before)


def test_a_layer_runs_once_a_step(bound: Bound) -> None:
    given = begin(bound)
    bound.call(given)
    after = states(bound)
    with pytest.raises(StepOrderError, match="ran twice in one step"):
        bound.call(given)
    assert unchanged(bound, after)


def test_no_layer_runs_after_the_step_has_ended(bound: Bound) -> None:
    given = begin(bound)
    bound.backend.end()
    before = states(bound)
    with pytest.raises(StepOrderError, match="before begin"):
        bound.call(given)
    assert unchanged(bound, before)


def test_z_without_a_bound_norm_moves_no_state() -> None:
    backend = backend_for(GDN_CONFIG)
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, DeltaDims)
    bare = replace(delta_params(spec.dims), norm_weight=None)
    layer = backend.layer(spec.index, bare)
    assert isinstance(layer, DeltaLayer)
    plain = Bound(backend, delta().inputs, lambda given: layer(*given), lambda given: given[0])
    given = begin(plain)
    before = states(plain)
    with pytest.raises(ValueError, match="bound without norm_weight"):
        plain.call(given)
    assert unchanged(plain, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_weight": torch.ones(1)}, r"norm_weight is \[1\], expected \[12\]"),
        ({"norm_weight": torch.ones(12, dtype=torch.int32)}, "expected a float dtype"),
        ({"norm_weight": torch.ones(12, device="meta")}, "is on meta, expected cpu"),
        ({"norm_eps": float("nan")}, "norm_eps is nan"),
        ({"gate": None}, "gate is None, expected a scalar gate"),
        ({"A_log": torch.zeros(3)}, r"A_log is \[3\], expected \[4\]"),
        ({"dt_bias": torch.zeros(4, 8)}, r"dt_bias is \[4, 8\], expected \[4\]"),
        ({"kind": GateKind.CHANNEL}, "got a channel gate, the model has scalar"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused_at_bind(
    change: dict[str, Any], message: str
) -> None:
    backend = backend_for(GDN_CONFIG)
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, DeltaDims)
    params = delta_params(spec.dims)
    assert params.gate is not None
    if change.keys() & {"A_log", "dt_bias", "kind"}:
        changed: DeltaParams = replace(params, gate=replace(params.gate, **change))
    else:
        changed = replace(params, **change)
    with pytest.raises((ValueError, TypeError), match=message):
        backend.layer(spec.index, changed)


@pytest.mark.parametrize("params", [None, {}, ShortConvParams(torch.ones(2, 3), None)])
def test_weights_of_no_layer_or_of_another_kind_are_refused_by_name(params: Any) -> None:
    backend = backend_for(GDN_CONFIG)
    spec = next(backend.selection.model.stateful_layers())
    with pytest.raises(TypeError, match=f"is DeltaDims, got {type(params).__name__}"):
        backend.layer(spec.index, params)


def test_weights_that_train_leave_no_graph_in_the_pool() -> None:
    backend = backend_for(GDN_CONFIG)
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, DeltaDims)
    params = delta_params(spec.dims)
    assert params.gate is not None
    gate = replace(params.gate, A_log=torch.nn.Parameter(params.gate.A_log))
    layer = backend.layer(spec.index, replace(params, gate=gate))
    assert isinstance(layer, DeltaLayer)
    backend.begin(Batch(Mode.EXTEND, [2], [0], [-1], [1]))
    out = layer(*delta().inputs(2))
    assert not out.requires_grad
    assert not any(t.requires_grad for t in backend.pool.tensors(spec.index).values())


def test_a_prepare_that_loses_a_weight_is_a_provider_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from hal_cpu.provider import TorchProvider

    backend = backend_for(GDN_CONFIG)
    spec = next(backend.selection.model.stateful_layers())
    assert isinstance(spec.dims, DeltaDims)
    for answer in (None, {}, {"conv_weight": None, "conv_bias": None}):
        monkeypatch.setattr(TorchProvider, "prepare", lambda *given, a=answer: a)
        with pytest.raises(ProviderError, match="prepare"):
            backend.layer(spec.index, delta_params(spec.dims))


def test_the_pool_takes_whole_slots_alone() -> None:
    backend = backend_for(GDN_CONFIG)
    slots = backend.pool.alloc(2)
    with pytest.raises(TypeError):
        backend.pool.free([cast("Slot", 1.0)])
    backend.pool.free(torch.tensor(slots))  # type: ignore[arg-type]
    assert all(type(slot) is int for slot in backend.pool.alloc(6))


def test_the_index_of_the_backend_is_the_providers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from hal_cpu.provider import TorchProvider

    seen = []
    start = TorchProvider.__init__

    def record(self: TorchProvider, device: str, options: dict[str, object]) -> None:
        seen.append(device)
        start(self, device, options)

    selection = hal.select("cpu", GDN_CONFIG)
    monkeypatch.setattr(TorchProvider, "__init__", record)
    backend = selection.backend(2, 2, 8, device_index=0)
    assert str(backend.device) == "cpu:0" and seen == ["cpu:0"]
