"""Plans of the Hopper prefill hand the kernel what the call says, on a driver that computes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hal.model.spec import GateKind
from hal_cuda.hopper import prefill
from hal_cuda.hopper.prefill import DIM
from hal_cuda.hopper.provider import HopperDeltaRule
from hal_cuda.hopper.variant import CHANNEL, READY, SAFE, Variant
from hal_cuda.provider import tuning
from hal_triton.delta_rule.call import DeltaCall
from hal_triton.delta_rule.prefill import PrefillRunner
from hal_triton.tuning import Config
from hopper.emulator import Emulator, emulated
from support.ops import Case, Delta, Rows, clone_view, delta_case, i32, make_rows

HEAD = Delta(H=1, HV=2, K=128, V=128)
BF16 = torch.bfloat16
ROWS = make_rows(
    [(2, "continue"), (0, "fork"), (3, "fresh"), (1, "stateless"), (2, "fork"), (1, "score")],
    pads=3,
)


@pytest.fixture
def device() -> Iterator[Emulator]:
    with emulated() as made:
        yield made


def rule() -> HopperDeltaRule:
    return HopperDeltaRule(tuning("sm_90"))


def case(rows: Rows = ROWS, dims: Delta = HEAD, **options: Any) -> Case:
    return delta_case(rows, dims, dtype=BF16, **options)


def shifted(x: Tensor, by: int) -> Tensor:
    """The same values in a storage that starts `by` elements later, with NaN around."""
    room = torch.full((x.numel() + 2 * by,), float("nan"), dtype=x.dtype)
    view = room[by : by + x.numel()].view(x.shape)
    return view.copy_(x)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("gate", [GateKind.SCALAR, None])
def test_a_call_reaches_the_kernel_as_it_is(
    device: Emulator, gate: GateKind | None, norm: bool
) -> None:
    scale = 1.0 if norm else 0.2
    case(dims=replace(HEAD, gate=gate, qk_l2norm=norm, scale=scale)).check(rule().prefill)
    wide = gate is None
    assert device.variants == [Variant(1, ready=wide, wide_a=wide, wide_b=wide, l2=norm)]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize(
    ("gate", "kind"), [(GateKind.CHANNEL, CHANNEL), (GateKind.SAFE, SAFE), (None, READY)]
)
def test_decays_by_channel_are_prepared_by_a_kernel_of_their_own(
    device: Emulator, gate: GateKind | None, kind: int, gap: int, norm: bool
) -> None:
    dims = replace(HEAD, gate=gate, per_channel=gate is None, qk_l2norm=norm, scale=0.5)
    subject, wide = case(dims=dims), case(dims=dims, gap=gap)
    subject = subject.replace(**{n: wide.args[n] for n in ("q", "k", "v", "a", "b")})
    subject.check(rule().prefill)
    (variant,) = device.variants
    assert (variant.channel, variant.prepared, variant.consumers) == (kind, True, 1)
    assert device.launched == [("kda_prepare", 0), ("gdn_prefill", 1)]


def test_gates_of_channels_at_odd_strides_are_copied(device: Emulator) -> None:
    subject = case(dims=replace(HEAD, gate=GateKind.CHANNEL))
    a = subject.args["a"]
    odd = torch.full((*a.shape[:2], DIM + 1), float("nan"), dtype=a.dtype)[..., :DIM]
    subject.replace(a=odd.copy_(a)).check(rule().prefill)


def test_gates_of_channels_at_an_odd_address_are_copied(device: Emulator) -> None:
    subject = case(dims=replace(HEAD, gate=GateKind.CHANNEL))
    odd = shifted(subject.args["a"], 1)
    assert odd.data_ptr() % 4
    subject.replace(a=odd).check(rule().prefill)


@pytest.mark.parametrize("gate", [GateKind.SCALAR, GateKind.CHANNEL])
@pytest.mark.parametrize("pads", [5, 700])
def test_pads_alone_take_the_one_launch(device: Emulator, pads: int, gate: GateKind) -> None:
    case(make_rows([], pads=pads), replace(HEAD, gate=gate)).check(rule().prefill)
    assert device.launched == [("gdn_prefill", 0)]


def test_many_rows_of_channels_hold_whole_heads(device: Emulator) -> None:
    dims = replace(HEAD, HV=32, gate=GateKind.CHANNEL)
    case(make_rows([(1, "continue")] * 3), dims).check(rule().prefill)
    assert [v.consumers for v in device.variants] == [2]


@settings(max_examples=12, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
    gap=st.sampled_from([0, 8, 16, 24]),
    lengths=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["continue", "fork", "score"])),
                     max_size=4),
    pads=st.integers(0, 2),
    scale=st.sampled_from([1.0, 2.0]),
)  # fmt: skip
def test_any_packed_call_equals_the_oracle(
    heads: tuple[int, int],
    gap: int,
    lengths: list[tuple[int, str]],
    pads: int,
    scale: float,
) -> None:
    dims = replace(HEAD, H=heads[0], HV=heads[1], beta_scale=scale)
    subject = case(make_rows(lengths, pads=pads), dims, gap=0)
    wide = case(make_rows(lengths, pads=pads), dims, gap=gap)
    subject = subject.replace(**{name: wide.args[name] for name in ("q", "k", "v", "a", "b")})
    with emulated():
        subject.check(rule().prefill)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("by", [1, 4])
def test_tokens_that_bulk_copies_cannot_address_are_copied(
    device: Emulator, name: str, by: int
) -> None:
    subject = case()
    subject.replace(**{name: shifted(subject.args[name], by)}).check(rule().prefill)


@pytest.mark.parametrize("gap", [1, 3, 4])
def test_tokens_at_odd_strides_are_copied(device: Emulator, gap: int) -> None:
    subject, odd = case(), case(gap=gap)
    subject.replace(**{n: odd.args[n] for n in ("q", "k", "v")}).check(rule().prefill)


def test_an_expanded_key_is_copied(device: Emulator) -> None:
    subject = case(dims=replace(HEAD, H=2))
    key = subject.args["k"][:, :1].expand(-1, 2, -1)
    subject.replace(k=key).check(rule().prefill)


@pytest.mark.parametrize("pad", [0, 1, 8])
@pytest.mark.parametrize("by", [0, 1, 8])
def test_a_result_may_lie_anywhere(device: Emulator, pad: int, by: int) -> None:
    subject = case()
    v = subject.args["v"]
    room = torch.full((v.shape[0] + 1, 2, 128 + pad), float("nan"), dtype=BF16).flatten()
    out = room[by:].as_strided(v.shape, (2 * (128 + pad), 128 + pad, 1), by)
    result, _ = subject.run(rule().prefill, out=out)
    assert result.data_ptr() == out.data_ptr()
    want, _ = subject.expect()
    live = slice(0, subject.rows.bounds[-1])
    torch.testing.assert_close(out[live].double(), want[live], rtol=4e-3, atol=1e-6)
    assert (out[subject.rows.bounds[-1] :] == 0).all()


def test_indices_of_any_strides_and_track_points_are_taken(device: Emulator) -> None:
    rows = make_rows([(70, "fork"), (64, "fresh")], spare=6)
    free = [s for s in range(1, rows.slots) if s not in {*rows.src, *rows.dst}]
    track = i32(0, 64, free[0], 0, 70, free[1], 1, 64, free[2], 0, 5, -1).view(-1, 3)
    case(rows, strided=True, track=track).check(rule().prefill)
    assert device.variants[0].track


def test_gates_in_float16_are_widened(device: Emulator) -> None:
    subject = case()
    half = {n: subject.args[n].to(torch.float16) for n in ("a", "b")}
    subject.replace(**half).check(rule().prefill)
    assert (device.variants[0].wide_a, device.variants[0].wide_b) == (True, True)


def test_fused_prefill_splits_and_takes_the_same_kernel(device: Emulator) -> None:
    subject = case(dims=replace(HEAD, H=2, HV=4))
    mixed = torch.cat([subject.args[n].flatten(1) for n in "qkv"], 1)

    def call(**args: Any) -> Tensor:
        kept = {n: x for n, x in args.items() if n not in ("q", "k", "v", "qk_l2norm")}
        return rule().prefill_fused(mixed_qkv=mixed, **kept)

    subject.check(call)
    assert len(device.programs) == 1


def test_gates_of_a_lone_head_may_have_any_stride(device: Emulator) -> None:
    subject = case(dims=replace(HEAD, HV=1))
    turned = {n: subject.args[n].flatten().view(1, -1).t() for n in ("a", "b")}
    assert all(x.stride(-1) != 1 for x in turned.values())
    subject.replace(**turned).check(rule().prefill)


def test_no_tokens_launch_nothing(device: Emulator) -> None:
    case(make_rows([(0, "continue"), (0, "fork")])).check(rule().prefill)
    assert device.programs == []


def test_no_rows_clear_the_pads(device: Emulator) -> None:
    case(make_rows([], pads=5)).check(rule().prefill)
    assert len(device.programs) == 1


def test_a_signature_is_planned_once_and_follows_its_tensors(device: Emulator) -> None:
    ops = rule()
    for seed in (0, 1):
        case(seed=seed).replace(gate=GATE).check(ops.prefill)
    assert len(device.variants) == 1 and len(device.programs) == 2


GATE = case().args["gate"]


@pytest.mark.parametrize(
    ("rows", "heads", "cut"), [([2048], 2, True), ([600], 2, False), ([520, 600], 16, False)]
)
def test_few_long_rows_are_prepared_and_cut(
    device: Emulator, rows: list[int], heads: int, cut: bool
) -> None:
    subject = case(make_rows([(n, "fork") for n in rows], pads=3), replace(HEAD, HV=heads))
    subject.check(rule().prefill)
    between = [("gdn_prefill", 0), ("gdn_join", 0)] if cut else []
    assert device.launched == [("gdn_prepare", 0), *between, ("gdn_prefill", 1)]


def test_a_cut_call_is_planned_once_and_follows_its_tensors(device: Emulator) -> None:
    ops, rows = rule(), make_rows([(1024, "continue")])
    for seed in (0, 1):
        case(rows, seed=seed).replace(gate=GATE).check(ops.prefill)
    assert len(device.forms) == 3


@pytest.mark.parametrize(("rows", "consumers"), [(1, 1), (3, 2), (4, 2), (9, 2)])
def test_few_programs_split_their_heads(device: Emulator, rows: int, consumers: int) -> None:
    dims = replace(HEAD, HV=32)
    case(make_rows([(1, "continue")] * rows), dims).check(rule().prefill)
    assert [v.consumers for v in device.variants] == [consumers]
    assert device.programs == [(rows + 1) * 32 * (2 // consumers)]


def test_a_sweep_may_choose_the_consumers(device: Emulator) -> None:
    base = tuning("sm_90")
    forced = replace(base, overrides={prefill.TABLE: Config({"CONSUMERS": 2})})
    case().check(HopperDeltaRule(forced).prefill)
    assert device.variants[0].consumers == 2


def call_of(subject: Case, **changes: Any) -> DeltaCall:
    args = {n: x for n, x in subject.args.items() if n != "max_len"}
    return DeltaCall("delta_rule.prefill", **{**args, **changes})


def odd_state(state: Tensor) -> Tensor:
    slots = torch.zeros(state.shape[0], state[0].numel() + 1)
    return slots[:, 1:].unflatten(1, state.shape[1:])


REFUSED = {
    "float16": lambda: call_of(delta_case(ROWS, HEAD, dtype=torch.float16)),
    "float32": lambda: call_of(delta_case(ROWS, HEAD)),
    "K 64": lambda: call_of(case(dims=replace(HEAD, K=64))),
    "V 96": lambda: call_of(case(dims=replace(HEAD, V=96))),
    "bfloat16 state": lambda: call_of(case(state_dtype=BF16)),
    "gaps in the state": lambda: call_of(case(gap=8)),
    "odd slots": lambda: call_of(case(), state=odd_state(case().args["state"])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_does_not_take_goes_to_the_shared_kernels(
    name: str, device: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DeltaCall] = []

    def plan(self: PrefillRunner, call: DeltaCall) -> Any:
        asked.append(call)
        return lambda call, out: out.zero_()

    monkeypatch.setattr(PrefillRunner, "_plan", plan)
    call = REFUSED[name]()
    assert not prefill.takes(call)
    prefill.HopperPrefill(tuning("sm_90"), "VK")(call)
    assert len(asked) == 1 and device.programs == []


def test_a_state_at_an_odd_address_goes_to_the_shared_kernels(
    device: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, asked = call_of(case()), []

    def plan(self: PrefillRunner, call: DeltaCall) -> Any:
        return lambda call, out: asked.append(call)

    monkeypatch.setattr(PrefillRunner, "_plan", plan)
    odd = shifted(call.state, 1)
    assert odd.data_ptr() % 8 == 4 and prefill.takes(replace(call, state=odd))
    prefill.HopperPrefill(tuning("sm_90"), "VK")(replace(call, state=odd))
    assert len(asked) == 1 and device.programs == []


def test_a_wrong_call_is_refused_before_anything_is_launched(device: Emulator) -> None:
    subject = case()
    state = clone_view(subject.args["state"])
    wrong = {
        "b": subject.args["b"][:, :1],
        "src": subject.args["src"][:-1],
        "v": subject.args["v"].float(),
        "out": torch.empty(3, 2, 128, dtype=BF16),
    }
    for name, value in wrong.items():
        with pytest.raises((TypeError, ValueError), match=r"delta_rule\.prefill: "):
            rule().prefill(**{**subject.args, "state": state, name: value})
    assert device.programs == []
