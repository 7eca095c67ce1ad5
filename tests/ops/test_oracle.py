"""The float64 oracle equals transformers' own float32 functions, and is total."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from hal import reference
from hal.model.spec import GateKind
from hal.runtime.gates import ready
from hal.testing.fused_cases import prefill_fused_case
from hal.testing.scan_cases import Scan, scan_case
from support.ops import NAN, Delta, conv_case, delta_case, i32, make_rows, worst

LIMIT = 1e-5


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return inspect.unwrap(function)


def delta_inputs(per_channel: bool) -> dict[str, Any]:
    dims = Delta(H=2, HV=2 if per_channel else 4, K=64, V=96, gate=None, per_channel=per_channel)
    case = delta_case(make_rows([(130, "fork")]), dims)
    return {**case.args, "rows": case.rows}


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("torch_chunk_gated_delta_rule", qwen),
        ("torch_recurrent_gated_delta_rule", qwen),
        ("chunk_kimi_delta_attention", kimi),
        ("recurrent_kimi_delta_attention", kimi),
    ],
)
def test_the_delta_rule_equals_transformers(name: str, module: Any) -> None:
    args = delta_inputs(module is kimi)
    rows = args.pop("rows")
    want, end = reference.delta_rule_prefill(**args)
    start = args["state"][rows.src[0] : rows.src[0] + 1].transpose(-1, -2)
    got, state = plain(getattr(module, name))(
        args["q"][None], args["k"][None], args["v"][None], args["a"][None], args["b"][None],
        initial_state=start, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert worst(got[0].transpose(0, 1), want.transpose(0, 1), 1) < LIMIT
    assert worst(state[0].transpose(-1, -2), end[rows.dst[0]], 1) < LIMIT


@pytest.mark.parametrize("kind", ["fresh", "fork"])
def test_the_convolution_equals_transformers(kind: str) -> None:
    case = conv_case(make_rows([(130, kind)]))
    args, rows = case.args, case.rows
    want, end = case.expect()
    head = torch.zeros(24, 3) if kind == "fresh" else args["state"][rows.src[0]]
    inputs = torch.cat((head, args["x"].T), 1)[None]
    got = plain(qwen.causal_conv1d_fn)(inputs, args["weight"], args["bias"], "silu")
    assert worst(got[:, :, 3:], want.T[None], 1) < LIMIT
    assert torch.equal(inputs[0, :, -3:].double(), end[rows.dst[0]])


def test_one_token_of_the_convolution_equals_transformers() -> None:
    case = conv_case(make_rows([(1, "fork")]), decode=True)
    args, rows = case.args, case.rows
    want, end = case.expect()
    wide = torch.cat((torch.randn(24, 1), args["state"][rows.src[0]]), 1)[None]
    update = plain(qwen.causal_conv1d_update)
    got = update(args["x"].T[None], wide, args["weight"], args["bias"], "silu")
    assert worst(got[0].T, want, 1) < LIMIT
    assert torch.equal(wide[0, :, 1:].double(), end[rows.dst[0]])


def scan_inputs(heads: int = 4, groups: int = 2) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(5)
    return {
        "x": torch.randn(70, heads, 8, generator=gen),
        "dt": torch.randn(70, heads, generator=gen),
        "A": -1 - 15 * torch.rand(heads, generator=gen),
        "B": torch.randn(70, groups, 16, generator=gen),
        "C": torch.randn(70, groups, 16, generator=gen),
        "D": torch.randn(heads, generator=gen),
        "dt_bias": torch.randn(heads, generator=gen) - 2,
    }


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.0, 0.1), (0.5, float("inf"))])
def test_the_mamba2_scan_equals_transformers(limit: tuple[float, float]) -> None:
    ins = scan_inputs()
    state = torch.randn(3, 4, 8, 16)
    want, end = reference.scan_prefill(
        **ins, z=None, state=state, src=i32(2), dst=i32(1), query_start_loc=i32(0, 70),
        max_len=70, dt_limit=limit,
    )  # fmt: skip
    x, dt, B, C = (ins[n][None] for n in ("x", "dt", "B", "C"))
    got, last = plain(bamba.mamba2_chunk_scan)(
        x, dt, ins["A"], B, C, chunk_size=16, D=ins["D"], dt_bias=ins["dt_bias"],
        initial_states=state[2:3], dt_softplus=True, dt_limit=limit, return_final_states=True,
    )  # fmt: skip
    assert worst(got[0].transpose(0, 1), want.transpose(0, 1), 1) < LIMIT
    assert worst(last[0], end[1], 1) < LIMIT


def test_one_token_of_the_mamba2_scan_equals_transformers() -> None:
    ins = {n: t[:2] if t.shape[0] == 70 else t for n, t in scan_inputs().items()}
    state, z = torch.randn(5, 4, 8, 16), torch.randn(2, 4, 8)
    want, end = reference.scan_decode(**ins, z=z, state=state, src=i32(4, 2), dst=i32(1, 2))
    held = state[[4, 2]].clone()
    wide = {n: ins[n].view(1, 4, 1, 1).expand(2, 4, 8, 16)[0] for n in ("A",)}
    got = plain(bamba.mamba2_selective_state_update)(
        held, ins["x"], ins["dt"][..., None].expand(2, 4, 8), wide["A"], ins["B"], ins["C"],
        ins["D"][:, None].expand(4, 8), ins["dt_bias"][:, None].expand(4, 8), True, z,
    )  # fmt: skip
    assert worst(got, want, 2) < LIMIT
    assert worst(held, end[[1, 2]], 2) < LIMIT


def test_the_mamba1_scan_equals_transformers() -> None:
    gen = torch.Generator().manual_seed(6)
    inner, size, length = 12, 8, 40
    x, dt, z = (torch.randn(length, inner, generator=gen) for _ in range(3))
    A = -torch.rand(inner, size, generator=gen) * 8
    B, C = (torch.randn(length, 1, size, generator=gen) for _ in range(2))
    D, bias = torch.randn(inner, generator=gen), torch.randn(inner, generator=gen)
    want, end = reference.scan_prefill(
        x, dt, A, B, C, D, bias, z, torch.full((3, inner, size), NAN), i32(-1), i32(2),
        i32(0, length), length,
    )  # fmt: skip
    got, last = plain(mamba.mamba_selective_scan)(
        x.T[None], dt.T[None], A, B[:, 0].T[None], C[:, 0].T[None], D, z=z.T[None],
        delta_bias=bias, delta_softplus=True, return_last_state=True,
    )  # fmt: skip
    assert worst(got, want.T[None], 1) < LIMIT
    assert worst(last, end[2:3], 1) < LIMIT


def test_mamba1_gates_stay_zero_on_pads() -> None:
    none = i32()
    x = torch.full((3, 4), NAN)
    out, _ = reference.scan_prefill(
        x, x, torch.zeros(4, 2), torch.ones(3, 1, 2), torch.ones(3, 1, 2), None, None, x,
        torch.zeros(2, 4, 2), none, none, i32(0), 0,
    )  # fmt: skip
    assert torch.equal(out, torch.zeros(3, 4, dtype=torch.float64))


def test_the_gated_norm_equals_transformers() -> None:
    norm = qwen.Qwen3NextRMSNormGated(32, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    o, z = torch.randn(5, 32), torch.randn(5, 32)
    want = reference.gated_rms_norm(o, z, norm.weight.detach(), 1e-6)
    assert worst(norm(o, z).detach(), want, 1) < LIMIT
    other = kimi.KimiLinearRMSNormGated(32, eps=1e-5)
    want = reference.gated_rms_norm(o, z, other.weight.detach(), 1e-5, activation="sigmoid")
    assert worst(other(o, z).detach(), want, 1) < LIMIT


@pytest.mark.parametrize("kind", GateKind)
def test_gates_made_beforehand_are_followed_by_the_norm_of_their_kind(kind: GateKind) -> None:
    rows, dims = make_rows([(3, "continue"), (2, "fresh")]), Delta(gate=kind)
    raw = prefill_fused_case(rows, dims, norm=True)
    made = replace(dims, gate=None, per_channel=kind is not GateKind.SCALAR)
    g, beta = ready(raw.args["gate"], raw.args["a"], raw.args["b"])
    case = prefill_fused_case(rows, made, norm=True).replace(**{**raw.args, "gate": None})
    got, _ = case.replace(a=g, b=beta).expect()
    assert torch.allclose(got, raw.expect()[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["CW", "WC", "ring"])
def test_the_short_convolution_is_the_same_in_every_layout(layout: str) -> None:
    gen = torch.Generator().manual_seed(1)
    b, c, x = (torch.randn(9, 5, generator=gen) for _ in range(3))
    weight, start = torch.randn(5, 3, generator=gen), i32(7)
    shape = {"CW": (3, 5, 2), "WC": (3, 2, 5), "ring": (3, 3, 5)}[layout]
    state = torch.zeros(shape)
    out, end = reference.short_conv_prefill(
        b, c, x, weight, None, state, i32(1), i32(2), start, i32(0, 8), 8, layout=layout
    )
    more, _ = reference.short_conv_decode(
        b[8:], c[8:], x[8:], weight, None, end, i32(2), i32(2), i32(15), layout=layout
    )
    whole = torch.nn.functional.conv1d((b * x).T[None], weight[:, None], padding=2, groups=5)
    want = c * whole[0, :, :9].T
    torch.testing.assert_close(torch.cat((out[:8], more)), want.double(), rtol=1e-5, atol=1e-6)
    assert not out[8:].any()


@pytest.mark.parametrize("kinds", [[], [(0, "continue")], [(0, "fresh"), (0, "fork")]])
@pytest.mark.parametrize("pads", [0, 3])
def test_the_oracle_takes_empty_batches(kinds: list, pads: int) -> None:
    rows = make_rows(kinds, pads=pads)
    for case in (conv_case(rows), delta_case(rows)):
        out, state = case.expect()
        assert out.dtype == state.dtype == torch.float64
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(state.nan_to_num(), case.args["state"].double().nan_to_num())


def test_the_oracle_leaves_its_inputs_alone() -> None:
    case = delta_case(make_rows([(5, "continue"), (3, "fresh")]))
    before = case.args["state"].clone()
    case.expect()
    assert torch.equal(case.args["state"].nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("kind", ["mamba2", "mamba1", "lightning"])
def test_the_scan_oracle_takes_empty_batches(kind: str) -> None:
    for rows, decode in ((make_rows([], pads=2), False), (make_rows([]), True)):
        case = scan_case(rows, Scan(kind=kind), decode=decode)
        out, _ = case.expect()
        assert out.shape == case.args["x"].shape
        assert not out.any()


@pytest.mark.parametrize("parents", [None, (-1, 0, 0, 1, -1)])
def test_verifying_a_path_is_a_prefill_of_that_path(parents: tuple[int, ...] | None) -> None:
    case = delta_case(make_rows([(5, "fork")]))
    tree = None if parents is None else i32(*parents)
    args = {n: v for n, v in case.args.items() if n != "dst"}
    result, ends = reference.delta_rule_verify(**args, parents=tree)
    branches = [[0], [0, 1], [0, 2], [0, 1, 3], [4]]
    chains = [list(range(n)) for n in range(1, 6)]
    for last, path in enumerate(chains if parents is None else branches):
        cut = {name: tensor[path] for name, tensor in case.tokens.items()}
        want, pool = reference.delta_rule_prefill(
            **{**case.args, **cut, "query_start_loc": i32(0, len(path))}
        )
        assert torch.equal(result[last], want[-1])
        dst = case.args["dst"]
        got = reference.commit(case.args["state"], ends, dst, i32(0, 5), i32(last))
        assert torch.equal(got.nan_to_num(), pool.nan_to_num())


def test_the_oracles_commit_writes_nothing_for_minus_one_no_tokens_and_no_slot() -> None:
    case = conv_case(make_rows([(2, "fork"), (0, "fork"), (2, "stateless")]))
    args = {n: v for n, v in case.args.items() if n != "dst"}
    _, ends = reference.conv_verify(**args, **case.options)
    bounds, state = case.args["query_start_loc"], case.args["state"]
    after = reference.commit(state, ends, case.args["dst"], bounds, i32(-1, 0, 1))
    assert torch.equal(after.nan_to_num(), state.double().nan_to_num())
