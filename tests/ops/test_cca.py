"""CCA: the oracle equals ZAYA's module, and the composition from `Conv` equals the oracle."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.zaya import modeling_zaya as zaya
from transformers.models.zaya.configuration_zaya import ZayaConfig

from hal import reference
from hal.runtime.cca import Cca, CcaWeights
from hal.testing.metric import LIMITS, worst
from hal.testing.rows import (
    NAN,
    ROW_KINDS,
    Rows,
    changed_outside,
    clone_view,
    i32,
    make_rows,
    packed,
    poisoned_pool,
)
from hal.testing.verify_cases import accept, chain, tree
from hal_cpu.provider import TorchProvider

GROUPS, D, HIDDEN = 3, 4, 10
CHANNELS = GROUPS * D
MIXED = make_rows(
    [(5, "continue"), (1, "fork"), (0, "continue"), (1, "fresh"), (2, "fresh"), (1, "continue"),
     (2, "fork"), (3, "stateless"), (1, "score"), (0, "fork"), (4, "fresh")],
    seed=3, pads=3,
)  # fmt: skip
TOKENS = make_rows(
    [(1, "continue"), (1, "fresh"), (1, "pad"), (1, "fork"), (1, "stateless"), (1, "pad")], seed=4
)
search = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


class Inputs:
    """A batch with poisoned pools, and the weights of both stages."""

    def __init__(
        self,
        rows: Rows,
        *,
        widths: tuple[int, int] = (2, 2),
        dtype: torch.dtype = torch.float32,
        layout: str = "CW",
        bias: bool = True,
        seed: int = 0,
        gap: int = 0,
    ) -> None:
        gen = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=gen).to(dtype)

        carry = sum(widths) - 2
        shape = (CHANNELS, carry) if layout == "CW" else (carry, CHANNELS)
        self.rows, self.layout, self.dtype = rows, layout, dtype
        self.r = packed(rand(rows.tokens, CHANNELS), rows, gap)
        self.h = packed(rand(rows.tokens, HIDDEN), rows, gap)
        self.stages = (
            rand(CHANNELS, widths[0]),
            rand(CHANNELS) if bias else None,
            rand(CHANNELS, D, widths[1]),
            rand(CHANNELS) if bias else None,
        )
        self.window = poisoned_pool(rows, shape, dtype, gen, pad=gap)
        self.hidden = poisoned_pool(rows, (HIDDEN,), dtype, gen, pad=gap)
        self.slots = {"src": i32(*rows.src), "dst": i32(*rows.dst), "start": i32(*rows.start)}
        self.bounds = {"query_start_loc": i32(*rows.bounds), "max_len": max((1, *rows.lengths))}

    def bind(self) -> Cca:
        """The composition over copies of the pools."""
        provider = TorchProvider("cpu", {"layouts": {"conv": self.layout}})
        pools = clone_view(self.window), clone_view(self.hidden)
        return Cca(provider.conv, CcaWeights.of(*self.stages, HIDDEN), *pools, self.layout)

    def expect(self, *, decode: bool = False, **options: Any) -> tuple[torch.Tensor, ...]:
        """What the oracle says."""
        args = (self.r, self.h, *self.stages, self.window, self.hidden)
        if decode:
            return reference.cca_decode(*args, **self.slots, layout=self.layout)
        return reference.cca_prefill(
            *args, **self.slots, **self.bounds, layout=self.layout, **options
        )

    def scratch(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Poisoned scratch of the window and of the hidden state."""
        rows, provider = self.rows, TorchProvider("cpu", {"layouts": {"conv": self.layout}})
        one = (HIDDEN, 1) if self.layout == "CW" else (1, HIDDEN)
        found = []
        for shape in (tuple(self.window.shape[1:]), one):
            asked = provider.scratch_spec(
                "conv", {"conv": shape}, len(rows.lengths) + 1, max((1, *rows.lengths))
            )
            found.append([torch.full(s.shape, 7, dtype=getattr(torch, s.dtype)) for s in asked])
        return found[0], found[1]

    def check(
        self, bound: Cca, got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, ...],
        written: set[int], pads: list[int],
    ) -> None:  # fmt: skip
        """Assert parity of results and states, exact delays and windows, and the write set."""
        q_k, delayed = got
        limit = LIMITS["float32" if self.dtype is torch.float32 else "bfloat16", "one rounding"][0]
        for span in self.rows.spans():
            assert worst(q_k[span], want[0][span], 0) <= limit
        assert torch.equal(delayed.double(), want[1])
        assert not q_k[pads].any()
        assert not delayed[pads].any()
        live = sorted(written - {0})
        assert torch.equal(bound.window[live].double(), want[2][live])
        assert torch.equal(bound.hidden[live].double(), want[3][live])
        assert changed_outside(self.window, bound.window, written) == 0
        assert changed_outside(self.hidden, bound.hidden, written) == 0


def prefill(inputs: Inputs, **options: Any) -> None:
    bound, rows = inputs.bind(), inputs.rows
    got = bound.prefill(inputs.r, inputs.h, **inputs.slots, **inputs.bounds, **options)
    pads = list(range(rows.bounds[-1], rows.tokens))
    written = rows.written(options.get("track"))
    inputs.check(bound, got, inputs.expect(**options), written, pads)


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_the_oracle_equals_zayas_module(length: int, cut: int) -> None:
    config = ZayaConfig(
        hidden_size=HIDDEN, num_attention_heads=2, num_key_value_heads=1, head_dim=D,
        num_hidden_layers=1, cca_time0=2, cca_time1=2, attention_bias=True,
    )  # fmt: skip
    module = zaya.ZayaCCAProjection(config, 0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    h = torch.randn(length, HIDDEN)
    with torch.no_grad():
        q, k, v = module(h[None], None)
        raw_q, raw_k = module.q_proj(h), module.k_proj(h)
        half = (raw_q.view(-1, 2, D) + raw_k.view(-1, 1, D)) * 0.5
        convolved = torch.cat((q[0] - half, k[0] - half.mean(1, keepdim=True)), 1).flatten(1)
    first, second = module.conv_qk_depthwise, module.conv_qk_grouped
    stages = (first.weight[:, 0].detach(), first.bias.detach(),
              second.weight.detach(), second.bias.detach())  # fmt: skip
    pools = torch.full((3, CHANNELS, 2), NAN), torch.full((3, HIDDEN), NAN)
    r, parts = torch.cat((raw_q, raw_k), 1), []
    src = i32(-1)
    for begin, end in ((0, min(cut, length)), (min(cut, length), length)):
        if begin == end:
            continue
        q_k, before, *pools = reference.cca_prefill(
            r[begin:end], h[begin:end], *stages, *pools, src, i32(1), i32(begin),
            i32(0, end - begin), length,
        )  # fmt: skip
        parts.append((q_k, before))
        src = i32(1)
    got, delayed = (torch.cat(part) for part in zip(*parts, strict=True))
    assert worst(got[:1], convolved[:1].double(), 0) < 1e-5
    assert worst(got, convolved.double(), 0) < 1e-5
    with torch.no_grad():
        values = torch.cat((module.v_proj_current(h), module.v_proj_delayed(delayed.float())), -1)
    torch.testing.assert_close(values.view(v[0].shape), v[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["CW", "WC"])
@pytest.mark.parametrize("widths", [(2, 2), (3, 2), (2, 3)])
def test_mixed_rows_equal_the_oracle(
    widths: tuple[int, int], layout: str, dtype: torch.dtype
) -> None:
    if dtype is torch.bfloat16:
        # Two stages round twice, the limit is for one; the oracle's inputs are rounded alike.
        inputs = Inputs(MIXED, widths=widths, layout=layout, dtype=dtype)
        bound = inputs.bind()
        got, _ = bound.prefill(inputs.r, inputs.h, **inputs.slots, **inputs.bounds)
        assert worst(got, inputs.expect()[0], 0) < 6e-3
        return
    prefill(Inputs(MIXED, widths=widths, layout=layout))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gap", [0, 3])
def test_biases_and_views_are_taken(bias: bool, gap: int) -> None:
    prefill(Inputs(MIXED, bias=bias, gap=gap))


def test_a_fresh_row_reads_the_first_stages_bias() -> None:
    inputs = Inputs(make_rows([(1, "fresh")]))
    weight, bias, grouped, last = inputs.stages
    assert bias is not None
    assert last is not None
    now = bias + inputs.r[0] * weight[:, 1]
    pair = torch.stack((bias, now), 1).view(GROUPS, D, 2)
    want = torch.einsum("gdt,godt->go", pair, grouped.view(GROUPS, D, D, 2)).flatten() + last
    got, delayed = inputs.bind().prefill(inputs.r, inputs.h, **inputs.slots, **inputs.bounds)
    torch.testing.assert_close(got[0], want)
    assert not delayed.any()


@pytest.mark.parametrize("layout", ["CW", "WC"])
def test_decode_equals_the_oracle(layout: str) -> None:
    inputs = Inputs(TOKENS, layout=layout)
    inputs.r[2], inputs.h[2], inputs.r[5], inputs.h[5] = NAN, NAN, NAN, NAN
    bound = inputs.bind()
    got = bound.decode(inputs.r, inputs.h, **inputs.slots)
    inputs.check(bound, got, inputs.expect(decode=True), TOKENS.written(None), [2, 5])


def test_track_stores_both_states_at_any_count() -> None:
    rows = make_rows([(7, "fork"), (3, "fresh"), (2, "stateless")], spare=8)
    free = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    points = [(0, 1), (0, 6), (1, 2), (2, 2)]
    track = [[row, count, free[i]] for i, (row, count) in enumerate(points)]
    prefill(Inputs(rows), track=torch.tensor([*track, [0, 5, -1]], dtype=torch.int32))


@search
@given(
    batch=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(ROW_KINDS)), min_size=1, max_size=5
    ),
    widths=st.sampled_from([(2, 2), (3, 3), (2, 4)]),
    layout=st.sampled_from(["CW", "WC"]),
    seed=st.integers(0, 99),
)
def test_any_batch_equals_the_oracle(
    batch: list, widths: tuple[int, int], layout: str, seed: int
) -> None:
    rows = make_rows(batch, seed=seed, pads=seed % 3)
    prefill(Inputs(rows, widths=widths, layout=layout, seed=seed))


@search
@given(
    batch=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(ROW_KINDS)), min_size=1, max_size=4
    ),
    kind=st.sampled_from(["none", "chain", "tree"]),
    layout=st.sampled_from(["CW", "WC"]),
    seed=st.integers(0, 99),
)
def test_verify_and_commit_equal_the_prefill_of_every_path(
    batch: list, kind: str, layout: str, seed: int
) -> None:
    rows = make_rows(batch, seed=seed, pads=seed % 3)
    inputs, last = Inputs(rows, layout=layout, seed=seed), accept(rows, seed=seed)
    parents = {"none": None, "chain": chain(rows), "tree": tree(rows, seed=seed)}[kind]
    bound, scratch = inputs.bind(), inputs.scratch()
    index = {n: inputs.slots[n] for n in ("src", "start")} | inputs.bounds
    q_k, delayed = bound.verify(inputs.r, inputs.h, **index, scratch=scratch, parents=parents)
    assert changed_outside(inputs.window, bound.window, set()) == 0
    assert changed_outside(inputs.hidden, bound.hidden, set()) == 0
    assert not q_k[rows.bounds[-1] :].any()
    bound.commit(scratch, **inputs.slots, query_start_loc=index["query_start_loc"], last=last)
    written = {0}
    for row, span in enumerate(rows.spans()):
        own = None if parents is None else parents[span].tolist()
        for token in range(span.stop - span.start):
            path = [span.start + t for t in reference.path_to(own, token)]
            slots = [t[row : row + 1] for t in inputs.slots.values()]
            want = reference.cca_prefill(
                inputs.r[path], inputs.h[path], *inputs.stages, inputs.window, inputs.hidden,
                *slots, i32(0, len(path)), len(path), layout=layout,
            )  # fmt: skip
            assert worst(q_k[span][token], want[0][-1], 0) <= 1e-5
            assert torch.equal(delayed[span][token].double(), want[1][-1])
            if token == int(last[row]) and rows.dst[row] >= 0:
                written.add(rows.dst[row])
                assert torch.equal(bound.window[rows.dst[row]].double(), want[2][rows.dst[row]])
                assert torch.equal(bound.hidden[rows.dst[row]].double(), want[3][rows.dst[row]])
    assert changed_outside(inputs.window, bound.window, written) == 0
    assert changed_outside(inputs.hidden, bound.hidden, written) == 0


def test_stages_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="cca: depthwise") as caught:
        CcaWeights.of(torch.zeros(12, 2), None, torch.zeros(10, 4, 2), None, 6)
    text = "cca: depthwise has 12 channels, grouped has 10 in groups of 4"
    assert str(caught.value) == text


def test_a_ring_is_refused() -> None:
    inputs = Inputs(TOKENS)
    with pytest.raises(ValueError, match="cca: the window's layout is 'ring', expected CW or WC"):
        replace(inputs.bind(), layout="ring")


class Watched:
    """A convolution that notes which of its operations was called."""

    def __init__(self, conv: Any) -> None:
        self._conv, self.seen = conv, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.seen.add(name)
        return getattr(self._conv, name)


def test_decode_takes_the_providers_decode_alone() -> None:
    """That is the operation whose offer says that it may be captured."""
    inputs = Inputs(TOKENS)
    bound = inputs.bind()
    watched = Watched(bound.conv)
    replace(bound, conv=watched).decode(inputs.r, inputs.h, **inputs.slots)
    assert watched.seen == {"decode"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [(2, 2), (3, 4)])
def test_decode_of_fresh_rows_equals_their_prefill(widths: tuple[int, int], bias: bool) -> None:
    """A stage that leaves no window may not take them for padding."""
    rows = make_rows([(1, "fresh"), (1, "continue"), (1, "fresh"), (1, "fork")], seed=5)
    inputs = Inputs(rows, widths=widths, bias=bias)
    decoded, prefilled = inputs.bind(), inputs.bind()
    got = decoded.decode(inputs.r, inputs.h, **inputs.slots)
    want = prefilled.prefill(inputs.r, inputs.h, **inputs.slots, **inputs.bounds)
    assert worst(got[0], want[0].double(), 0) <= 1e-6
    assert torch.equal(got[1], want[1])
    assert changed_outside(prefilled.window, decoded.window, set()) == 0
