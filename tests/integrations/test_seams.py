"""Each seam against the function of transformers that it stands for, over packed rows in pieces.

End to end a wrong scale or eps can hide behind a norm that is free of scale; here it cannot.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from hal.errors import HalError
from hal.integrations.transformers import Runner
from hal.integrations.transformers.binding import find_mixers
from hal.integrations.transformers.mixers import MIXERS, conv_weights
from hal.integrations.transformers.seams import CONV, DELTA, HEAD_SCAN, KDA, SCAN
from hal.model import read
from hal.model.spec import DeltaDims, LayerSpec, ScanDims
from hal.options import Options
from hal.runtime.batch import Batch, Mode
from hal.selection import choose
from support.models import CONFIGS, DRIVEN, make_model

DELTAS = {"olmo_hybrid": DELTA, "qwen3_5_text": DELTA, "kimi_linear": KDA, "bailing_hybrid": KDA}
SCANS = tuple(n for n in DRIVEN if n in {"bamba", "falcon_h1", "mamba2", "nemotron_h", "zamba2"})
HEAD_SCANS = tuple(n for n in DRIVEN if n in {"falcon_mamba", "jamba", "mamba", "zamba"})
WHOLE = tuple(n for n in DRIVEN if n in {"minimax", "zaya"})
CONVS = (*DELTAS, *SCANS, *HEAD_SCANS, "lfm2", "lfm3")
SLOTS = (3, 1, 2)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

steps = st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=6)
Row = list[Tensor]
"""What one sequence gives to a seam, each with its tokens in the same axis."""


@dataclass
class Bound:
    """A bound model's first mixer: its seams, and the functions that stood there before."""

    runner: Runner
    mixer: nn.Module
    layer: LayerSpec
    theirs: dict[str, Callable[..., object]]

    def seam(self, name: str) -> Callable[..., object]:
        return self.mixer.forward.__func__.__globals__[name]


_BOUND: dict[str, Bound] = {}


def bound(name: str) -> Bound:
    """One bound model a family; every test starts its rows fresh."""
    if name not in _BOUND:
        model, spec = make_model(name), read(CONFIGS / f"{name}.json")
        layer = next(spec.stateful_layers())
        mixer = dict(find_mixers(model.get_decoder(), spec))[layer.index]
        names = inspect.unwrap(type(mixer).forward).__globals__
        seams = MIXERS[layer.stateful].seams
        theirs = {n: inspect.unwrap(names[n]) for n in seams if n in names}
        theirs["forward"] = inspect.unwrap(type(mixer).forward)
        _BOUND[name] = Bound(runner(name, model), mixer, layer, theirs)
    return _BOUND[name]


def runner(name: str, model: PreTrainedModel) -> Runner:
    selection = choose("cpu", CONFIGS / f"{name}.json", Options(ready_gates=True))
    return Runner(model, selection.backend(slots=3, max_batch=3, max_tokens=12), max_len=64)


def pieces(case: Bound, plan: list[list[int]]) -> Iterator[list[tuple[int, slice]]]:
    """Begin each step; which tokens of which row it packs, one after the other."""
    done = [0, 0, 0]
    for lengths in plan:
        src = [slot if n else -1 for slot, n in zip(SLOTS, done, strict=True)]
        mode = Mode.DECODE if all(n == 1 for n in lengths) and all(done) else Mode.MIXED
        case.runner.backend.begin(Batch(mode, lengths, done, src, SLOTS))
        yield [(row, slice(done[row], done[row] + n)) for row, n in enumerate(lengths)]
        done = [n + m for n, m in zip(done, lengths, strict=True)]


def check(
    case: Bound,
    plan: list[list[int]],
    make: Callable[[int, int], Row],
    axis: int,
    ours: Callable[[Row], Tensor],
    theirs: Callable[[Row], Tensor],
) -> None:
    """Rows packed and cut as planned give what each gives whole, with tokens in `axis`."""
    totals = [sum(lengths[row] for lengths in plan) for row in range(3)]
    rows = [make(total, number) for number, total in enumerate(totals)]
    got: list[Row] = [[], [], []]
    for cuts in pieces(case, plan):
        packed = [
            torch.cat(
                [rows[row][i].narrow(axis, c.start, c.stop - c.start) for row, c in cuts], axis
            )
            for i in range(len(rows[0]))
        ]
        parts = ours(packed).split([c.stop - c.start for _, c in cuts], axis)
        for (row, _), part in zip(cuts, parts, strict=True):
            got[row].append(part)
    for mine, row, total in zip(got, rows, totals, strict=True):
        if total:
            torch.testing.assert_close(torch.cat(mine, axis), theirs(row), **TOLERANCE)


def noise(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("name", CONVS)
@settings(max_examples=8, deadline=None)
@given(plan=steps, seed=st.integers(0, 99))
def test_the_conv_seam_is_their_convolution_of_each_row(
    name: str, plan: list[list[int]], seed: int
) -> None:
    case, short = bound(name), name.startswith("lfm")
    weight, bias = conv_weights(case.mixer, "conv" if short else "conv1d")
    how = {"activation": None if short else "silu"}

    def ours(row: Row) -> Tensor:
        return case.seam(CONV)(row[0], weight, bias, **how, output_attentions=False)

    def theirs(row: Row) -> Tensor:
        return case.theirs[CONV](row[0], weight, bias, **how)

    def make(length: int, number: int) -> Row:
        return noise(seed + number, (1, weight.shape[0], length))

    check(case, plan, make, 2, ours, theirs)


@pytest.mark.parametrize("name", DELTAS)
@settings(max_examples=12, deadline=None)
@given(plan=steps, seed=st.integers(0, 99), beta_scale=st.sampled_from([1.0, 2.0]))
def test_the_delta_seam_is_their_recurrence_of_each_row(
    name: str, plan: list[list[int]], seed: int, beta_scale: float
) -> None:
    """g is one for each head, or one for each channel of Kimi Delta."""
    case, seam = bound(name), DELTAS[name]
    dims = case.layer.dims
    assert isinstance(dims, DeltaDims)

    def make(length: int, number: int) -> Row:
        keys, heads = (1, length, dims.H, dims.K), (1, length, dims.HV)
        gates = (*heads, dims.K) if seam == KDA else heads
        q, k, v, a, b = noise(seed + number, keys, keys, (*heads, dims.V), gates, heads)
        return [q, k, v, -a.exp(), beta_scale * b.sigmoid()]

    def ours(row: Row) -> Tensor:
        q, k, v, g, beta = row
        out, state = case.seam(seam)(
            q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False,
            use_qk_l2norm_in_kernel=True, cu_seqlens=None,
        )  # fmt: skip
        assert state is None
        return out

    def theirs(row: Row) -> Tensor:
        q, k, v, g, beta = row
        return case.theirs[seam](q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    check(case, plan, make, 1, ours, theirs)


@pytest.mark.parametrize("name", SCANS)
@settings(max_examples=12, deadline=None)
@given(plan=steps, seed=st.integers(0, 99))
def test_the_scan_seam_is_their_scan_of_each_row(
    name: str, plan: list[list[int]], seed: int
) -> None:
    case, mixer = bound(name), bound(name).mixer
    dims = case.layer.dims
    assert isinstance(dims, ScanDims)
    rates = {"D": mixer.D.detach(), "dt_bias": mixer.dt_bias.detach(), "dt_softplus": True}
    how = {**rates, "chunk_size": 8, "z": None, "dt_limit": mixer.time_step_limit}

    def make(length: int, number: int) -> Row:
        heads, groups = (1, length, dims.H), (1, length, dims.G, dims.N)
        return noise(seed + number, (*heads, dims.P), heads, groups, groups)

    def call(scan: Callable[..., object]) -> Callable[[Row], Tensor]:
        A = -mixer.A_log.detach().exp()
        return lambda row: scan(row[0], row[1], A, row[2], row[3], **how)

    check(case, plan, make, 1, call(case.seam(SCAN)), call(case.theirs[SCAN]))


@pytest.mark.parametrize("name", HEAD_SCANS)
@settings(max_examples=12, deadline=None)
@given(plan=steps, seed=st.integers(0, 99))
def test_the_head_scan_seam_is_their_scan_of_each_row_and_head(
    name: str, plan: list[list[int]], seed: int
) -> None:
    """The calls of a step are told apart by their order, and theirs by the weights of a head."""
    case, mixer = bound(name), bound(name).mixer
    dims = case.layer.dims
    assert isinstance(dims, ScanDims)
    weights = dict(mixer.named_parameters())
    bias = weights.get("dt_proj.bias", weights.get("dt_proj_bias"))
    A = -mixer.A_log.detach().exp().view(dims.H, dims.P, dims.N)
    D, bias = (t.detach().view(dims.H, dims.P) for t in (mixer.D, bias))

    def make(length: int, number: int) -> Row:
        wide, narrow = (dims.H, dims.P, length), (dims.H, dims.N, length)
        return noise(seed + number, wide, wide, narrow, narrow, wide)

    def call(scan: Callable[..., object]) -> Callable[[Row], Tensor]:
        def run(row: Row) -> Tensor:
            case.runner._witness.begin()
            return torch.cat(
                [
                    scan(
                        x[None], dt[None], A[i], B[None], C[None], D=D[i], z=z[None],
                        delta_bias=bias[i], delta_softplus=True,
                    )
                    for i, (x, dt, B, C, z) in enumerate(zip(*row, strict=True))
                ]
            )  # fmt: skip

        return run

    check(case, plan, make, 2, call(case.seam(HEAD_SCAN)), call(case.theirs[HEAD_SCAN]))


@pytest.mark.parametrize("name", WHOLE)
@settings(max_examples=12, deadline=None)
@given(plan=steps, seed=st.integers(0, 99))
def test_a_forward_in_place_of_theirs_gives_what_theirs_gives_each_row(
    name: str, plan: list[list[int]], seed: int
) -> None:
    case, mixer = bound(name), bound(name).mixer

    def flat(result: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([t.flatten(2) for t in result if isinstance(t, Tensor)], dim=-1)

    def theirs(row: Row) -> Tensor:
        rest = {"cache": None}
        if name == "minimax":
            out, _ = case.theirs["forward"](mixer, row[0], None, None, **rest)
            return out
        return flat(case.theirs["forward"](mixer, row[0], **rest))

    def ours(row: Row) -> Tensor:
        rest = {"position_embeddings": None} if name == "minimax" else {}
        return flat(mixer.forward(hidden_states=row[0], cache=None, **rest))

    with torch.no_grad():
        check(case, plan, lambda n, i: noise(seed + i, (1, n, 64)), 1, ours, theirs)


@pytest.mark.parametrize(
    ("name", "seam", "change", "text"),
    [
        ("bamba", SCAN, {"dt_limit": (0.0, 0.5)}, r"its dt limit is \(0\.0, 0\.5\), hal read"),
        ("bamba", SCAN, {"dt_softplus": False}, "a scan with softplus and without z"),
        ("bamba", SCAN, {"z": torch.zeros(1)}, "a scan with softplus and without z"),
        ("mamba", HEAD_SCAN, {"delta_softplus": False}, "expected 1 scans a step, all with"),
    ],
)
def test_a_scan_that_means_something_else_is_refused(
    name: str, seam: str, change: dict[str, object], text: str
) -> None:
    case, zeros = bound(name), [torch.zeros(1, 1, 1, 1)] * 5
    how = {"chunk_size": 8, "dt_softplus": True, "dt_limit": (0.0, inf)} if seam == SCAN else {}
    with pytest.raises(HalError, match=f"layer 0: .*{text}"):
        case.seam(seam)(*zeros, **{**how, **change})


def test_a_head_beyond_the_last_is_refused() -> None:
    case, zeros = bound("zamba"), [torch.zeros(1, 64, 1)] * 5
    case.runner._witness.begin()
    for _ in range(2):
        case.runner._witness.note(0, HEAD_SCAN)
    with pytest.raises(HalError, match="layer 0: expected 2 scans a step"):
        case.seam(HEAD_SCAN)(*zeros, delta_softplus=True)


@pytest.mark.parametrize(("name", "masked"), [("minimax", "attention_mask"), ("zaya", "conv_mask")])
def test_a_mask_that_a_forward_would_not_apply_is_refused(name: str, masked: str) -> None:
    mixer = bound(name).mixer
    with pytest.raises(HalError, match=r"layer 0: expected .* without a mask"):
        mixer.forward(torch.zeros(1, 1, 64), **{masked: torch.ones(1, 1)})
