"""Layers over an engine's own pages: same results, and no byte touched outside the rows' blocks."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hal
from hal.errors import StepOrderError
from hal.model.spec import DeltaDims
from hal.runtime.batch import Mode
from hal.runtime.foreign import Attachment, engine_step
from hal.runtime.layers import DeltaLayer
from hal.runtime.step import Step
from support import bound as delta_bound
from support import bound_scan
from support.bound import FAMILIES, GDN_CONFIG, Bound, delta_params
from support.paged import PADDING, Paged, paged_states

BLOCKS = 7


@pytest.fixture(scope="module", params=["gated_delta_net", "kimi_delta", "mamba2", "short_conv"])
def bound(request: pytest.FixtureRequest) -> Bound:
    """A layer of each kind that an engine of pages is served."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (delta_bound, bound_scan):
            patch.setattr(module, "backend_for", Paged)
        return FAMILIES[request.param]()


def paged(bound: Bound) -> Paged:
    assert isinstance(bound.backend, Paged)
    return bound.backend


def step_for(rows: list[tuple[int, int, int]]) -> Step:
    """The step of rows of (block, tokens seen, new tokens), as an engine of pages makes it."""
    blocks, seen, counts = (torch.tensor(column) for column in zip(*rows, strict=True))
    starts = torch.tensor([0, *accumulate(counts.tolist())])
    return engine_step(blocks, seen, starts, tokens=int(starts[-1]), max_len=int(counts.max()))


class Request:
    """A request's inputs, what they give alone, its block, and what it got so far."""

    def __init__(self, bound: Bound, tokens: int, block: int) -> None:
        self.given = bound.inputs(tokens)
        self.want = bound.alone(self.given)
        self.tokens, self.done, self.block = tokens, 0, block
        self.outputs: list[torch.Tensor] = []

    def take(self, count: int) -> list[torch.Tensor]:
        return [tensor[self.done : self.done + count] for tensor in self.given]

    def error(self) -> float:
        got = torch.cat(self.outputs).double()
        want = self.want[: got.shape[0]]
        return float((got - want).norm() / want.norm().clamp(min=1e-30))


def run(bound: Bound, rows: list[tuple[Request, int]]) -> Mode:
    step = step_for([(request.block, request.done, count) for request, count in rows])
    paged(bound).attachment.enter(step)
    packed = [torch.cat(parts) for parts in zip(*(r.take(n) for r, n in rows), strict=True)]
    pieces = bound.call(packed).split([n for _, n in rows])
    for (request, count), piece in zip(rows, pieces, strict=True):
        request.outputs.append(piece.clone())
        request.done += count
    return step.mode


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_schedule_over_pages_gives_what_each_request_gives_alone(
    bound: Bound, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 20)))
    blocks = data.draw(st.permutations(range(1, BLOCKS)))[:3]
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=3, max_size=3))
    requests = [Request(bound, n, block) for n, block in zip(lengths, blocks, strict=True)]
    while live := [r for r in requests if r.done < r.tokens]:
        rows = [
            (r, min(data.draw(st.sampled_from([30, 3, 1, 1])), r.tokens - r.done))
            for r in data.draw(st.permutations(live))
        ]
        mode = run(bound, rows)
        assert mode is (Mode.DECODE if all(n == 1 for _, n in rows) else Mode.MIXED)
    assert max(request.error() for request in requests) < 1e-5


def test_only_the_blocks_of_the_rows_change_and_no_padding(bound: Bound) -> None:
    for pages in paged(bound).pages.values():
        pages.fill_(-1)
    before = {layer: pages.clone() for layer, pages in paged(bound).pages.items()}
    request = Request(bound, 9, block=4)
    run(bound, [(request, 7)])
    run(bound, [(request, 1)])
    assert request.error() < 1e-5
    for layer, pages in paged(bound).pages.items():
        others = [block for block in range(BLOCKS) if block != 4]
        assert torch.equal(pages[others], before[layer][others])
        assert torch.equal(pages[:, -PADDING:], before[layer][:, -PADDING:])


def test_a_block_that_the_engine_copied_continues_its_request(bound: Bound) -> None:
    request = Request(bound, 12, block=2)
    run(bound, [(request, 8)])
    for pages in paged(bound).pages.values():
        pages[5] = pages[2]
        pages[2] = -1
    request.block = 5
    run(bound, [(request, 3)])
    run(bound, [(request, 1)])
    assert request.error() < 1e-5


def test_a_row_without_a_block_computes_and_writes_nothing(bound: Bound) -> None:
    before = {layer: pages.clone() for layer, pages in paged(bound).pages.items()}
    request = Request(bound, 6, block=-1)
    run(bound, [(request, 6)])
    assert request.error() < 1e-5
    assert all(torch.equal(pages, before[i]) for i, pages in paged(bound).pages.items())


def test_layers_of_other_blocks_enter_steps_of_their_own(bound: Bound) -> None:
    one, two = Request(bound, 5, block=1), Request(bound, 5, block=3)
    for count in (3, 1, 1):
        run(bound, [(one, count)])
        run(bound, [(two, count)])
    assert max(one.error(), two.error()) < 1e-5


def attachment() -> Attachment:
    return Attachment(hal.select("cpu", GDN_CONFIG), max_batch=4)


def test_tensors_of_another_shape_dtype_or_name_are_refused_with_both_sides() -> None:
    served = attachment()
    _, states = paged_states(served.selection, 0, 3)
    conv = states["conv"]
    with pytest.raises(ValueError, match=r"is \[3, 3, 80\], expected \[slots, \*\(80, 3\)"):
        served.take(0, {**states, "conv": conv.transpose(1, 2)})
    with pytest.raises(TypeError, match=r"conv is torch\.float64, expected torch\.float32"):
        served.take(0, {**states, "conv": conv.double()})
    with pytest.raises(ValueError, match=r"got states \['conv'\]"):
        served.take(0, {"conv": conv})
    with pytest.raises(ValueError, match="state conv is on meta, expected cpu"):
        served.take(0, {**states, "conv": conv.to("meta")})


def test_a_layer_whose_tensors_were_not_given_cannot_be_bound() -> None:
    served = attachment()
    _, states = paged_states(served.selection, 0, 3)
    served.take(0, states)
    dims = served.selection.model.layers[1].dims
    with pytest.raises(ValueError, match="layer 1: the engine gave no state tensors"):
        served.layer(1, delta_params(dims))


def test_new_tensors_end_the_step_until_the_layer_is_bound_and_entered_anew() -> None:
    served = attachment()
    layer_dims = served.selection.model.layers[0].dims
    _, states = paged_states(served.selection, 0, 3)
    served.take(0, states)
    layer = served.layer(0, delta_params(layer_dims))
    step = step_for([(1, 0, 2)])
    served.enter(step)
    _, fresh = paged_states(served.selection, 0, 3)
    served.take(0, fresh)
    heads = layer_dims.HV
    with pytest.raises(StepOrderError):
        layer(torch.randn(2, 80), torch.randn(2, heads), torch.randn(2, heads))


def test_a_layer_of_other_tensors_runs_in_no_step_any_more() -> None:
    served = attachment()
    dims = served.selection.model.layers[0].dims
    assert isinstance(dims, DeltaDims)
    given = torch.randn(2, 80), torch.randn(2, dims.HV), torch.randn(2, dims.HV)
    _, old = paged_states(served.selection, 0, 3)
    served.take(0, old)
    stale = served.layer(0, delta_params(dims))
    assert isinstance(stale, DeltaLayer)
    _, new = paged_states(served.selection, 0, 3)
    served.take(0, new)
    layer = served.layer(0, delta_params(dims))
    assert isinstance(layer, DeltaLayer)
    before = {name: tensor.clone() for name, tensor in old.items()}
    served.enter(step_for([(1, 0, 2)]))
    with pytest.raises(StepOrderError):
        stale(*given)
    layer(*given)
    assert all(torch.equal(old[name].nan_to_num(7), before[name].nan_to_num(7)) for name in old)


def test_states_of_one_layer_have_as_many_slots() -> None:
    served = attachment()
    _, states = paged_states(served.selection, 0, 3)
    states["conv"] = states["conv"][:2]
    with pytest.raises(ValueError, match=r"layer 0: got slots .*'conv': 2.* as many in every"):
        served.take(0, states)
