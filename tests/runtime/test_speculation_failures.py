"""A verify or commit that fails or is refused leaves the states of all layers at one token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import hal
from hal.errors import ProviderError, StepOrderError
from hal.model.spec import DeltaDims, ScanDims, ShortConvDims
from hal.runtime.backend import Backend
from hal.runtime.batch import Batch, DeviceSlots, Mode
from hal.runtime.params import ShortConvParams
from support.backends import backend_for, selected_with
from support.bound import FAMILIES, GDN_CONFIG, LFM2_CONFIG, Bound, delta_params
from support.bound_scan import scan_params
from support.model_configs import tiny

WIDTH = 4
SERVED = sorted(set(FAMILIES) - {"zamba"})
"""Zamba's scans run head by head, which has no verify."""
MODELS = {"gated_delta_net": GDN_CONFIG, "mamba2": tiny("bamba"), "short_conv": LFM2_CONFIG}
Call = Callable[[list[Tensor]], Tensor]


@dataclass
class Model:
    """All linear layers of a model, and inputs that every one of them takes."""

    backend: Backend
    calls: list[Call]
    tokens: list[Tensor]

    def run(self, begin: int, end: int, layers: slice = slice(None)) -> None:
        for call in self.calls[layers]:
            call([tensor[begin:end] for tensor in self.tokens])

    def verified(self) -> "Model":
        """Four tokens in slot 1, and a VERIFY step of three more that no layer has run."""
        self.backend.begin(Batch(Mode.EXTEND, [4], [0], [-1], [1]))
        self.run(0, 4)
        self.backend.begin(Batch(Mode.VERIFY, [3], [4], [1], [1]))
        return self

    @property
    def states(self) -> list[Tensor]:
        pool = self.backend.pool
        return [pool.tensors(spec.layer)[spec.name].clone() for spec in pool.states]


def model(name: str) -> Model:
    backend = backend_for(MODELS[name], speculative=hal.Speculative(WIDTH))
    rng = torch.Generator().manual_seed(0)
    calls, widths = [], [(1,)]
    for spec in backend.selection.model.stateful_layers():
        params, widths = bound_by(spec.dims)
        layer = cast("Any", backend.layer(spec.index, params))
        calls.append(lambda given, layer=layer: layer(*given))
    return Model(backend, calls, [torch.randn(8, *width, generator=rng) for width in widths])


def bound_by(dims: object) -> tuple[Any, list[tuple[int, ...]]]:
    if isinstance(dims, DeltaDims):
        channels = sum(size for _, size in dims.segments)
        return delta_params(dims), [(channels,), (dims.HV,), (dims.HV,)]
    if isinstance(dims, ScanDims):
        return scan_params(dims), [(dims.I + 2 * dims.G * dims.N,), (dims.H,)]
    assert isinstance(dims, ShortConvDims)
    return ShortConvParams(torch.ones(dims.hidden, dims.W), None), [(dims.hidden,)] * 3


def same(left: list[Tensor], right: list[Tensor], slots: slice = slice(None)) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a[slots].nan_to_num(7), b[slots].nan_to_num(7)) for a, b in pairs)


def broken(*given: object, **named: object) -> Tensor:
    raise RuntimeError("device lost")


@pytest.mark.parametrize("name", MODELS)
def test_a_commit_before_the_last_layer_ran_moves_none_and_moves_each_once_when_it_did(
    name: str,
) -> None:
    made, twin = model(name).verified(), model(name).verified()
    twin.run(4, 7)
    twin.backend.commit([2])
    made.run(4, 7, slice(0, -1))
    before = made.states
    with pytest.raises(StepOrderError, match="did not run in the verify step"):
        made.backend.commit([2])
    assert same(made.states, before)
    made.run(4, 7, slice(-1, None))
    made.backend.commit([2])
    assert same(made.states, twin.states)


@pytest.mark.parametrize("name", MODELS)
def test_a_commit_that_fails_while_it_writes_is_not_owed_and_cannot_be_made_twice(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model(name).verified()
    made.run(4, 7)
    last, layer = list(cast("Any", made.backend)._layers.items())[-1]
    with monkeypatch.context() as patched:
        patched.setattr(type(layer.bound_conv.verify), "commit", fails_after(len(made.calls) - 1))
        with pytest.raises(ProviderError, match=f"commit failed in layer {last}: device lost"):
            made.backend.commit([2])
    after = made.states
    with pytest.raises(StepOrderError, match="commit without a verify"):
        made.backend.commit([2])
    with pytest.raises(StepOrderError, match=r"before begin\(batch\)"):
        made.run(4, 7)
    made.backend.begin(Batch(Mode.IDLE))
    assert same(made.states, after)


def fails_after(calls: int) -> Callable[..., None]:
    seen: list[object] = []

    def commit(*given: object, **named: object) -> None:
        seen.append(given)
        if len(seen) > calls:
            raise RuntimeError("device lost")

    return commit


def served_bound(name: str, tree: bool = False) -> Bound:
    """A bound layer with four tokens in slot 1, and a first verify committed in part."""
    with selected_with(speculative=hal.Speculative(WIDTH, tree=tree)):
        bound = FAMILIES[name]()
    bound.backend.begin(Batch(Mode.EXTEND, [4], [0], [-1], [1]))
    bound.call(bound.inputs(4))
    bound.backend.begin(Batch(Mode.VERIFY, [WIDTH], [4], [1], [1]))
    bound.call(bound.inputs(WIDTH))
    bound.backend.commit([1])
    return bound


def layer_of(bound: Bound) -> Any:
    return next(iter(cast("Any", bound.backend)._layers.values()))


def states(bound: Bound) -> list[Tensor]:
    layer = next(bound.backend.selection.model.stateful_layers()).index
    return list(bound.backend.pool.tensors(layer).values())


def snapshot(bound: Bound) -> list[Tensor]:
    return [tensor.clone() for tensor in states(bound)]


def parts(name: str) -> list[str]:
    return {"short_conv": ["conv"], "lightning": ["rule"], "cca": ["rule"]}.get(
        name, ["conv", "rule"]
    )


@pytest.mark.parametrize(("name", "part"), [(n, part) for n in SERVED for part in parts(n)])
def test_a_verify_that_raised_is_not_committed_on_what_the_scratch_held_before(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = served_bound(name)
    layer, drafts, before = layer_of(bound), bound.inputs(3), snapshot(bound)
    rule = layer.bound_conv.verify if part == "conv" else layer.verify
    bound.backend.begin(Batch(Mode.VERIFY, [3], [5], [1], [1]))
    with monkeypatch.context() as patched:
        patched.setattr(type(rule), "verify", broken)
        with pytest.raises(ProviderError, match="device lost"):
            bound.call(drafts)
    with pytest.raises(StepOrderError, match="did not run in the verify step"):
        bound.backend.commit([3])
    assert same(snapshot(bound), before)
    bound.call(drafts)
    bound.backend.commit([3])
    assert not same(snapshot(bound), before)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("value", [0, 2, 10**6])
def test_scratch_that_names_no_path_is_refused_and_never_walked_for_ever(
    name: str, value: int
) -> None:
    bound = served_bound(name)
    bound.backend.begin(Batch(Mode.VERIFY, [3], [5], [1], [1]))
    bound.call(bound.inputs(3))
    layer = layer_of(bound)
    conv = getattr(layer, "bound_conv", None)
    for draft in (conv and conv.draft, getattr(layer, "draft", None)):
        if draft is not None:
            draft.scratch[-1].fill_(value)
    with pytest.raises(ValueError, match="it was not filled by a verify of these rows"):
        bound.backend.commit([3])


def test_scratch_that_leads_into_another_row_is_refused() -> None:
    bound = served_bound("short_conv")
    bound.backend.begin(Batch(Mode.VERIFY, [2, 2], [5, 0], [1, -1], [1, 2]))
    bound.call(bound.inputs(4))
    layer_of(bound).bound_conv.draft.scratch[-1][3] = 1
    with pytest.raises(ValueError, match="token 3 follows 1, expected one from 2 up to it"):
        bound.backend.commit([2, 2])


@pytest.mark.parametrize("name", SERVED)
def test_a_verify_that_is_run_again_and_raises_is_not_committed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = served_bound(name)
    layer, drafts = layer_of(bound), bound.inputs(3)
    rule = layer.bound_conv.verify if name == "short_conv" else layer.verify
    bound.backend.begin(Batch(Mode.VERIFY, [3], [5], [1], [1]))
    bound.call(drafts)
    with monkeypatch.context() as patched:
        patched.setattr(type(rule), "verify", broken)
        with pytest.raises(ProviderError, match="device lost"):
            bound.call(drafts)
    with pytest.raises(StepOrderError, match="did not run in the verify step"):
        bound.backend.commit([3])


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_a_row_of_which_nothing_holds_leaves_the_state_of_its_src_in_its_dst(
    name: str, device: bool, held: bool
) -> None:
    bound = served_bound(name)
    for tensor in states(bound):
        tensor[2].normal_()
        tensor[3:] = float("nan")
    lengths, start = [2, 3, 2, 0, 1], [5, 5, 0, 5, 5]
    src, dst, counts = [1, 1, -1, 1, 2], [3, 4, 5, 6, 2], [0, 2, 0, 0, 0]
    ids = [torch.tensor(slots, dtype=torch.int32) for slots in (src, dst)]
    where: dict[str, Any] = {"held": DeviceSlots(*ids, 6)} if held else {"src": src, "dst": dst}
    bound.backend.begin(Batch(Mode.VERIFY, lengths, start, **where))
    bound.call(bound.inputs(sum(lengths)))
    before = snapshot(bound)
    bound.backend.commit(torch.tensor(counts, dtype=torch.int32) if device else counts)
    for now, old in zip(states(bound), before, strict=True):
        assert torch.equal(now[3], old[1])
        assert not now[4].isnan().any() and not torch.equal(now[4], old[1])
        assert not now[5].any()
        assert now[6].isnan().all()
    assert same(snapshot(bound), before, slice(0, 3))


def test_a_decode_goes_on_from_a_fork_of_which_nothing_held() -> None:
    bound = served_bound("gated_delta_net")
    bound.backend.begin(Batch(Mode.VERIFY, [2], [5], [1], [3]))
    bound.call(bound.inputs(2))
    bound.backend.commit([0])
    token = bound.inputs(1)
    pair = [torch.cat((tensor, tensor)) for tensor in token]
    bound.backend.begin(Batch(Mode.DECODE, [1, 1], [5, 5], [1, 3], [1, 3]))
    out = bound.call(pair)
    assert torch.equal(out[0], out[1]) and out.isfinite().all()


@pytest.mark.parametrize(
    ("accepted", "tips", "message"),
    [
        ([1], [2], "1 accepted in row 0, but the path to its tip 2 has 3 tokens"),
        ([3], [0], "3 accepted in row 0, but the path to its tip 0 has 1 tokens"),
        ([0], [1], "0 accepted in row 0, but the path to its tip 1 has 2 tokens"),
        ([2], [-1], "2 accepted in row 0, but the path to its tip -1 has 0 tokens"),
        ([1], [3], "tip 3 in row 0, which has 3 tokens"),
        ([99, 3], torch.tensor([2], dtype=torch.int32), "2 counts, the verify step had 1 rows"),
        ([4], torch.tensor([2], dtype=torch.int32), "4 accepted in row 0, width is 3"),
    ],
)
def test_a_tree_takes_counts_that_are_the_depths_of_their_tips(
    accepted: list[int], tips: Any, message: str
) -> None:
    bound = served_bound("short_conv", tree=True)
    bound.backend.begin(Batch(Mode.VERIFY, [3], [5], [1], [1], parents=[[-1, 0, 1]]))
    bound.call(bound.inputs(3))
    before = snapshot(bound)
    with pytest.raises(ValueError, match=f"commit: {message}"):
        bound.backend.commit(accepted, tips)
    assert same(snapshot(bound), before)
    bound.backend.commit([3], [2])


@pytest.mark.parametrize(("accepted", "tips"), [([1.0], None), ([1.0], [0]), ([1], [0.0])])
def test_a_count_or_tip_that_is_no_integer_is_refused(accepted: Any, tips: Any) -> None:
    bound = served_bound("short_conv", tree=True)
    parents = None if tips is None else [[-1, 0]]
    bound.backend.begin(Batch(Mode.VERIFY, [2], [5], [1], [1], parents=parents))
    bound.call(bound.inputs(2))
    with pytest.raises(TypeError):
        bound.backend.commit(accepted, tips)
    bound.backend.commit([0], None if tips is None else [-1])


def test_no_layer_runs_between_a_commit_and_the_next_step() -> None:
    bound = served_bound("short_conv")
    with pytest.raises(StepOrderError, match=r"before begin\(batch\)"):
        bound.call(bound.inputs(1))
