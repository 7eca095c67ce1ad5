"""Each seam against the function of transformers that it stands for, over packed rows in pieces.

End to end a wrong scale or eps can hide behind a norm that is free of scale; here it cannot.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from hal.errors import HalError
from hal.integrations.transformers import Runner
from hal.integrations.transformers.seams import CONV, DELTA, conv_weights, rebind, uses
from hal.model import read
from hal.model.spec import DeltaDims
from hal.options import Options
from hal.runtime.batch import Batch, Mode
from hal.selection import choose
from support.models import CONFIGS, make_model

DELTA_FAMILIES = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
CONV_FAMILIES = (*DELTA_FAMILIES, "lfm2", "lfm2_moe")
SLOTS = (3, 1, 2)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

steps = st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=6)


@dataclass
class Bound:
    """A bound model's first mixer: its seams, and the functions that stood there before."""

    runner: Runner
    mixer: nn.Module
    theirs: dict[str, Callable[..., object]]

    def seam(self, name: str) -> Callable[..., object]:
        return self.mixer.forward.__func__.__globals__[name]


_BOUND: dict[str, Bound] = {}


def bound(name: str) -> Bound:
    """One bound model a family; every test starts its rows fresh."""
    if name not in _BOUND:
        model = make_model(name)
        mixer = next(m for m in model.modules() if uses(m, frozenset({CONV})))
        names = inspect.unwrap(type(mixer).forward).__globals__
        theirs = {n: inspect.unwrap(names[n]) for n in (CONV, DELTA) if n in names}
        _BOUND[name] = Bound(runner(name, model), mixer, theirs)
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


def packed(rows: list[Tensor], cuts: list[tuple[int, slice]], dim: int) -> Tensor:
    return torch.cat([rows[row].transpose(0, dim)[cut].transpose(0, dim) for row, cut in cuts], dim)


def deal(got: list[list[Tensor]], cuts: list[tuple[int, slice]], out: Tensor, dim: int) -> None:
    """Give each row its part of a packed result."""
    parts = out.split([cut.stop - cut.start for _, cut in cuts], dim)
    for (row, _), part in zip(cuts, parts, strict=True):
        got[row].append(part)


def check(got: list[list[Tensor]], wanted: list[Tensor], dim: int) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(torch.cat(mine, dim), theirs, **TOLERANCE)


def noise(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("name", CONV_FAMILIES)
@settings(max_examples=12, deadline=None)
@given(plan=steps, seed=st.integers(0, 99))
def test_the_conv_seam_is_their_convolution_of_each_row(
    name: str, plan: list[list[int]], seed: int
) -> None:
    case = bound(name)
    weight, bias = conv_weights(case.mixer, "conv1d" if DELTA in case.theirs else "conv")
    activation = "silu" if DELTA in case.theirs else None
    totals = [sum(lengths[row] for lengths in plan) for row in range(3)]
    rows = noise(seed, *((1, weight.shape[0], n) for n in totals))
    got: list[list[Tensor]] = [[torch.empty(1, weight.shape[0], 0)] for _ in rows]
    for cuts in pieces(case, plan):
        x = packed(rows, cuts, 2)
        out = case.seam(CONV)(x, weight, bias, activation=activation, output_attentions=False)
        assert out.shape == x.shape
        for (row, _), part in zip(
            cuts, out.split([c.stop - c.start for _, c in cuts], 2), strict=True
        ):
            got[row].append(part)
    wanted = [
        case.theirs[CONV](x, weight, bias, activation=activation) if x.shape[2] else x for x in rows
    ]
    check(got, wanted, 2)


@pytest.mark.parametrize("name", DELTA_FAMILIES)
@settings(max_examples=12, deadline=None)
@given(plan=steps, seed=st.integers(0, 99), beta_scale=st.sampled_from([1.0, 2.0]))
def test_the_delta_seam_is_their_recurrence_of_each_row(
    name: str, plan: list[list[int]], seed: int, beta_scale: float
) -> None:
    case = bound(name)
    totals = [sum(lengths[row] for lengths in plan) for row in range(3)]
    rows = [delta_inputs(dims_of(name), n, seed + i, beta_scale) for i, n in enumerate(totals)]
    got: list[list[Tensor]] = [[torch.empty_like(row[2][:, :0])] for row in rows]
    for cuts in pieces(case, plan):
        q, k, v, g, beta = (packed([row[i] for row in rows], cuts, 1) for i in range(5))
        out, state = case.seam(DELTA)(
            q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False,
            use_qk_l2norm_in_kernel=True, cu_seqlens=None,
        )  # fmt: skip
        assert state is None
        for (row, _), part in zip(
            cuts, out.split([c.stop - c.start for _, c in cuts], 1), strict=True
        ):
            got[row].append(part)
    check(got, [theirs_of(case, row) for row in rows], 1)


def dims_of(name: str) -> DeltaDims:
    spec = read(CONFIGS / f"{name}.json")
    dims = next(spec.stateful_layers()).dims
    assert isinstance(dims, DeltaDims)
    return dims


def delta_inputs(dims: DeltaDims, length: int, seed: int, beta_scale: float) -> list[Tensor]:
    """q, k, v, log decay and beta of one row, as a mixer hands them over."""
    heads, wide = (1, length, dims.H, dims.K), (1, length, dims.HV)
    q, k, v, a, b = noise(seed, heads, heads, (*wide, dims.V), wide, wide)
    return [q, k, v, -a.exp(), beta_scale * b.sigmoid()]


def theirs_of(case: Bound, row: list[Tensor]) -> Tensor:
    q, k, v, g, beta = row
    if not q.shape[1]:
        return v
    out, _ = case.theirs[DELTA](q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    return out


def test_uses_sees_through_decorators_and_names_no_more_than_there_is() -> None:
    mixer = bound("qwen3_5_text").mixer
    assert uses(mixer, frozenset({CONV, DELTA, "mamba2_chunk_scan"})) == {CONV, DELTA}
    assert uses(nn.Linear(1, 1), frozenset({CONV})) == set()


def test_rebinding_keeps_defaults_and_leaves_the_class_alone() -> None:
    class Mixer(nn.Module):
        def forward(self, x: int, y: int = 2, *, z: int = 3) -> tuple[object, ...]:
            return helper(x), y, z, self

    one, other = Mixer(), Mixer()
    rebind(one, {"helper": lambda x: -x})
    assert one.forward(1) == (-1, 2, 3, one)
    assert one(5, z=9) == (-5, 2, 9, one)
    assert other(1) == (10, 2, 3, other)


def helper(x: int) -> int:
    return 10 * x


def test_a_forward_that_is_no_function_cannot_be_bound() -> None:
    class Odd(nn.Module):
        forward = staticmethod(len).__func__

    with pytest.raises(HalError, match=r"Odd\.forward is no function"):
        rebind(Odd(), {})
    assert uses(Odd(), frozenset({CONV})) == set()


def test_conv_weights_are_those_of_a_depthwise_conv() -> None:
    holder = nn.Module()
    holder.conv = nn.Conv1d(6, 6, 3, groups=6)
    weight, bias = conv_weights(holder, "conv")
    assert weight.shape == (6, 3) and bias.shape == (6,)
    assert not weight.requires_grad and not bias.requires_grad
    holder.conv = nn.Linear(2, 2)
    with pytest.raises(HalError, match=r"Module\.conv is Linear, expected Conv1d"):
        conv_weights(holder, "conv")
