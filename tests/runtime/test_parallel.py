"""The ranks of a tensor-parallel group give what one process gives, outputs and states."""

import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import hal
from hal.binding import build
from hal.model.spec import ScanDims
from hal.options import Shard
from hal.runtime.cutting import cut_params
from hal.runtime.operators import operators
from hal.runtime.params import CcaParams, ScanParams
from hal.runtime.ranks import mean_of_norm
from hal.runtime.transfer import SlotState, merge
from hal.sharding import norm_span, offset, shard, shard_reasons
from support.parallel import CONFIGS, Ran, join, layer_of, params_of, run, run_threads
from support.two_ranks import spawn

FAMILIES = sorted(CONFIGS)
LIMIT = 1e-5
"""Relative, of float32: sums over ranks and matrix tiles go in another order."""


@cache
def alone(family: str) -> Ran:
    """The whole model on one rank."""
    return run(family)


def near(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    assert got.shape == wanted.shape
    return bool((got - wanted).norm() <= LIMIT * max(1.0, float(wanted.norm())))


def assert_equal(family: str, ranks: list[Ran]) -> None:
    """Every output and every state segment, joined, are those of the whole model."""
    layer, whole = layer_of(family), alone(family)
    for step, wanted in enumerate(whole.outputs):
        assert near(join(layer, [ran.outputs[step] for ran in ranks]), wanted)
    for slot in whole.states:
        merged = merge([ran.states[slot] for ran in ranks])
        for got, part in zip(merged.segments, whole.states[slot].segments, strict=True):
            assert got.key == part.key
            assert near(got.values, part.values)


def sizes_of(family: str) -> list[int]:
    model = hal.model.read(CONFIGS[family])
    return [size for size in (2, 4) if not shard_reasons(model, size)]


CASES = [(family, size) for family in FAMILIES for size in sizes_of(family)]


@pytest.mark.parametrize(("family", "size"), CASES)
def test_ranks_together_give_the_result_of_one(family: str, size: int) -> None:
    """P059: heads and groups, cut or shared, in every mode and through a commit."""
    assert_equal(family, run_threads(family, size))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_running_request_goes_on_at_another_size(family: str) -> None:
    """1 to 2 to 4 to 1, the states moved between the steps by segment."""
    sizes = [size for size in (1, 2, 4, 1) if size == 1 or size in sizes_of(family)]
    layer, whole = layer_of(family), alone(family)
    cuts = [0, 2, 3, 5, len(whole.outputs)]
    given: dict[int, SlotState] = {}
    for size, first, last in zip(sizes, cuts, cuts[1:], strict=False):
        ranks = run_threads(family, size, range(first, last), given)
        for turn, outs in enumerate(zip(*(ran.outputs for ran in ranks), strict=True), first):
            assert near(join(layer, outs), whole.outputs[turn])
        given = {slot: merge([ran.states[slot] for ran in ranks]) for slot in ranks[0].states}


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    """The same over gloo, the reduction of a cut norm among it."""
    families = dict.fromkeys((family for family in FAMILIES if 2 in sizes_of(family)), True)
    found = spawn(2, str(tmp_path), families)
    assert found.keys() == families.keys()
    for family, ranks in found.items():
        assert_equal(family, ranks)


@pytest.mark.slow
def test_neighbours_among_four_processes_share_a_group(tmp_path: Path) -> None:
    """Two groups on four ranks: the reduction is over blocks of two."""
    families = {"mamba2_two_groups": True}
    (ranks,) = spawn(4, str(tmp_path), families).values()
    assert_equal("mamba2_two_groups", ranks)


def round_robin(local: int, whole: int, shard: Shard) -> int:
    """Groups dealt to the ranks in turn, not to the ranks of their heads."""
    return shard.rank * local % whole


def first_for_all(local: int, whole: int, shard: Shard) -> int:
    """Every rank with the first part."""
    return 0


WRONG = {
    "mamba2_two_groups": round_robin,
    "zamba": first_for_all,
    "gated_delta_net": first_for_all,
    "short_conv": first_for_all,
}


@pytest.mark.parametrize("family", WRONG)
def test_a_rank_with_the_wrong_part_of_the_weights_is_found(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hal.runtime.cutting.offset", WRONG[family])
    with pytest.raises(AssertionError):
        assert_equal(family, run_threads(family, 4))


def test_a_convolution_that_is_cut_as_one_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P045: q, k and v of unequal widths in one flat half."""

    def flat(self: object, tensor: torch.Tensor, sizes: list[tuple[int, int]]) -> torch.Tensor:
        rank = self._shard.rank  # type: ignore[attr-defined]
        count = sum(own for own, _ in sizes)
        return tensor[rank * count : (rank + 1) * count]

    monkeypatch.setattr("hal.runtime.cutting._Cutter._parts", flat)
    with pytest.raises(AssertionError):
        assert_equal("gated_delta_net", run_threads("gated_delta_net", 2))


def test_threads_that_bind_at_once_register_the_operators_once() -> None:
    """Layouts of this name were never bound before, so every thread finds nothing registered."""
    selection = hal.select("cpu", CONFIGS["mamba1"])
    candidate = selection.choices["scan.prefill"].candidate
    provider = build(candidate, selection.device, selection.layouts)
    start, found = threading.Barrier(8), set()

    def bind() -> None:
        start.wait()
        found.add(id(operators("threads", "cpu", {"conv": "CW"}, provider)))

    threads = [threading.Thread(target=bind) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1


def test_a_norm_that_is_cut_without_its_reduction_would_be_wrong() -> None:
    """What the reduction is for: each rank's own mean square is another number."""
    family = "mamba2_one_group"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.parallel.ThreadRanks.mean_over", lambda self, span: lambda t: t)
        ranks = run_threads(family, 2)
    with pytest.raises(AssertionError):
        assert_equal(family, ranks)


def test_a_cut_norm_without_ranks_is_refused_at_bind_with_the_numbers() -> None:
    family = "mamba2_one_group"
    layer = layer_of(family)
    assert layer.dims is not None
    selection = hal.select("cpu", CONFIGS[family], tp=Shard(1, 4))
    params = cut_params(selection, layer.index, params_of(layer.dims))
    with pytest.raises(ValueError) as caught:
        selection.backend(2, 2, 8).layer(layer.index, params)
    assert str(caught.value) == (
        f"layer {layer.index}: on 4 ranks a group of the gated norm spans 4, and needs "
        f"the mean over them: build the backend with ranks=ProcessRanks(group)"
    )


@pytest.mark.parametrize(
    ("groups", "size", "span", "local"),
    [(1, 1, 1, 1), (1, 2, 2, 1), (1, 8, 8, 1), (2, 4, 2, 1), (8, 4, 1, 2), (4, 4, 1, 1)],
)
def test_a_group_of_the_norm_spans_as_many_ranks_as_share_it(
    groups: int, size: int, span: int, local: int
) -> None:
    dims = ScanDims(H=8, P=4, N=4, G=groups, W=4, norm_groups=groups)
    own = shard(dims, size)
    assert isinstance(own, ScanDims)
    assert norm_span(dims, size) == span
    assert own.norm_groups == local
    assert own.I * span == dims.I // groups * local
    without = replace(dims, norm_groups=None)
    assert norm_span(without, size) == 1
    assert mean_of_norm(0, without, size, None) is None


def test_norm_groups_that_ranks_would_tear_are_refused_with_both_numbers() -> None:
    model = hal.model.read(CONFIGS["mamba2_two_groups"])
    (layer, *_) = model.stateful_layers()
    dims = ScanDims(H=12, P=4, N=4, G=1, W=4, norm_groups=3)
    torn = replace(model, layers=(replace(layer, dims=dims),))
    (reason,) = shard_reasons(torn, 2)
    assert (reason.needed, reason.offered) == ("tensor parallel size 2", "3 norm groups")
    assert not shard_reasons(torn, 3) and not shard_reasons(torn, 6)


@pytest.mark.parametrize(
    ("local", "whole", "size", "starts"),
    [
        (8, 8, 4, [0, 0, 0, 0]),
        (2, 8, 4, [0, 2, 4, 6]),
        (4, 8, 4, [0, 0, 4, 4]),
        (3, 12, 8, [0, 0, 3, 3, 6, 6, 9, 9]),
    ],
)
def test_a_rank_begins_where_its_heads_do(
    local: int, whole: int, size: int, starts: list[int]
) -> None:
    assert [offset(local, whole, Shard(rank, size)) for rank in range(size)] == starts


def test_weights_that_are_not_the_whole_models_are_not_cut() -> None:
    layer = layer_of("mamba2_two_groups")
    assert layer.dims is not None
    selection = hal.select("cpu", CONFIGS["mamba2_two_groups"], tp=Shard(0, 2))
    params = params_of(layer.dims)
    local = cut_params(selection, layer.index, params)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"a weight is \[\d+, 4\], expected \d+ of the whole"):
        cut_params(selection, layer.index, local)
    with pytest.raises(ValueError, match=r"layer 99 keeps no state; layers \["):
        cut_params(selection, 99, params)  # type: ignore[type-var]


@pytest.mark.parametrize("family", ["gated_delta_net", "short_conv", "mamba2_one_group"])
def test_weights_of_another_kind_of_layer_are_not_cut(family: str) -> None:
    layer = layer_of(family)
    selection = hal.select("cpu", CONFIGS[family], tp=Shard(0, 2))
    given = CcaParams(*[torch.zeros(4, 4)] * 4)
    with pytest.raises(TypeError, match=rf"layer {layer.index}: got CcaParams, expected \w+Params"):
        cut_params(selection, layer.index, given)


@pytest.mark.parametrize("part", ["conv_weight", "norm_weight"])
def test_a_scan_alone_has_no_conv_or_norm_to_cut(part: str) -> None:
    layer = layer_of("lightning")
    assert isinstance(layer.dims, ScanDims)
    selection = hal.select("cpu", CONFIGS["lightning"], tp=Shard(0, 2))
    params = params_of(layer.dims)
    assert isinstance(params, ScanParams)
    given = replace(params, **{part: torch.zeros(layer.dims.I)})
    with pytest.raises(ValueError, match="got a conv or norm weight, the layer is a scan alone"):
        cut_params(selection, layer.index, given)


def test_a_norm_that_the_model_has_not_is_refused_at_bind() -> None:
    """Nobody knows the groups of such a norm, and a rank would norm its own channels alone."""
    layer = layer_of("lightning")
    assert isinstance(layer.dims, ScanDims)
    backend = hal.select("cpu", CONFIGS["lightning"]).backend(2, 2, 8)
    params = params_of(layer.dims)
    assert isinstance(params, ScanParams)
    with pytest.raises(ValueError, match="the model has no norm after the scan"):
        backend.layer(layer.index, replace(params, norm_weight=torch.ones(layer.dims.I)))
