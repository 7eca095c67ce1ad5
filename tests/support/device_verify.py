"""Checks of verify and commit on a CUDA device, as named checks.

Every delta-rule check is held to the limits of one rounding, which are stricter than those of a
verify by chunk: outputs round once, committed states keep float32's digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal.model.spec import GateKind
from hal.testing.verify_cases import VerifyCase, accept, tree
from hal_cuda.provider import TritonProvider
from support import device_checks as checks
from support.ops import Case, Delta, conv_case, delta_case, make_rows

DRAFTS = make_rows(
    [(4, "continue"), (1, "fork"), (0, "continue"), (16, "fresh"), (7, "continue"),
     (3, "stateless"), (8, "fork"), (1, "score"), (2, "fresh"), (0, "fork"), (12, "continue")],
    seed=3, pads=37,
)  # fmt: skip
SHORT = make_rows([(4, "continue"), (3, "fork"), (0, "fork"), (8, "fresh"), (1, "continue")],
                  seed=7, pads=5)  # fmt: skip
DIMS = (
    Delta(H=2, HV=4, K=128, V=128),
    Delta(H=2, HV=2, K=64, V=96),
    Delta(H=1, HV=3, K=16, V=24),
    Delta(H=1, HV=2, K=256, V=256),
    Delta(H=1, HV=8, K=64, V=64),
    Delta(H=1, HV=4, K=64, V=128),
    Delta(H=1, HV=1, K=96, V=192),
    Delta(H=1, HV=2, K=128, V=64),
)
FORMS = (("chain", False), ("tree", True))
SIZES = {"short": SHORT, "long": DRAFTS}
SHAPES = (("tree", "short"), ("chain", "short"), ("tree", "long"), ("chain", "long"))


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Verify and commit of an interface on device copies; what they write comes back."""

    ops: Any

    def verify(self, *, scratch: Sequence[Tensor], **args: Any) -> Tensor:
        """The result on the host; `scratch` is filled there."""
        return self._lent(self.ops.verify, scratch, args)

    def commit(self, *, scratch: Sequence[Tensor], **args: Any) -> None:
        """Write the accepted paths into the host's `state`."""

        def call(**given: Any) -> Tensor:
            self.ops.commit(**given)
            state: Tensor = given["state"]
            return state

        self._lent(call, scratch, args)

    def _lent(
        self, call: Callable[..., Tensor], scratch: Sequence[Tensor], args: dict[str, Any]
    ) -> Tensor:
        named = {f"scratch{i}": tensor for i, tensor in enumerate(scratch)}

        def run(**given: Any) -> Tensor:
            return call(scratch=[given.pop(name) for name in named], **given)

        return checks.on_device(run)(**args, **named)


def drafts(case: Case, *, branches: bool, seed: int = 1) -> VerifyCase:
    """A prefill case as drafts, in trees or in chains without parents."""
    parents = tree(case.rows, seed=seed) if branches else None
    return VerifyCase.of(case, parents, accept(case.rows, seed=seed))


def _check(
    make: Callable[[], Case], ours: TritonProvider, *, branches: bool, spec: Any = None
) -> checks.Check:
    """The check of a case that is made when it is run: most workers run few of them."""

    def check() -> None:
        case = drafts(make(), branches=branches)
        case.check(OnDevice(getattr(ours, case.interface)), spec or ours.scratch_spec)

    return check


def verify_checks(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    """Convolution and delta rule over layouts, dims, gates, trees, strides and hard inputs."""
    yield from _conv(dtype)
    yield from _delta(dtype)
    yield from _odd(dtype)
    yield "delta.verify far slots", lambda: far_drafts(dtype)
    yield "delta.verify graph", lambda: graph_drafts(dtype)


def _conv(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    for layout in ("ring", "CW", "WC"):
        ours = checks.provider(conv=layout)
        for width in range(2, 9):
            make = partial(
                conv_case, DRAFTS, layout=layout, width=width, dtype=dtype, bias=width != 4,
                channels=512 if width == 4 else 40, activation="silu" if width != 7 else None,
                gap=8 if width % 2 else 0, strided=width == 5,
            )  # fmt: skip
            for form, branches in FORMS:
                name = f"conv.verify {form} {layout} W{width}"
                yield name, _check(make, ours, branches=branches)
        if dtype != torch.float32:
            make = partial(conv_case, DRAFTS, layout=layout, dtype=dtype, state_dtype=torch.float32)
            yield f"conv.verify {layout} wide state", _check(make, ours, branches=True)


def _delta(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    ours = checks.provider()
    for dims in DIMS:
        for gate in checks.GATES if dims.K in (64, 128) else (GateKind.SCALAR, GateKind.CHANNEL):
            named = replace(dims, gate=gate)
            label = f"K{dims.K} V{dims.V} R{dims.HV // dims.H} {gate and gate.value}"
            for form, size in SHAPES if dims in DIMS[:4] else SHAPES[:1]:
                make = partial(delta_case, SIZES[size], named, dtype=dtype)
                check = _check(make, ours, branches=form == "tree")
                yield f"delta.verify {form} {size} {label}", check
    turned = checks.provider(recurrent="KV")
    make = partial(delta_case, DRAFTS, DIMS[1], dtype=dtype, layout="KV", gap=3, strided=True)
    yield "delta.verify KV strided", _check(make, turned, branches=True)


def _odd(dtype: torch.dtype) -> Iterator[tuple[str, checks.Check]]:
    ours = checks.provider()
    for log_g in (-1e-3, -1e-4):
        hard = Delta(H=1, HV=2, K=128, V=128, gate=None, hard=True, beta_scale=2, log_g=log_g)
        rows = make_rows([(16, "fork"), (8, "fresh"), (4, "continue")])
        make = partial(delta_case, rows, hard, dtype=dtype)
        yield f"delta.verify hard g={log_g}", _check(make, ours, branches=False)
    for scale, norm in ((1e-4, True), (0.2, False)):
        dims = replace(DIMS[0], scale=scale, qk_l2norm=norm)
        make = partial(delta_case, SHORT, dims, dtype=dtype)
        yield f"delta.verify scale={scale} norm={norm}", _check(make, ours, branches=True)
    make = partial(delta_case, SHORT, replace(DIMS[1], gate=None, per_channel=True), dtype=dtype)
    yield "delta.verify ready channels", _check(make, ours, branches=True)
    for held in (torch.bfloat16, torch.float16):
        make = partial(delta_case, SHORT, DIMS[0], dtype=dtype, state_dtype=held)
        name = f"delta.verify state {str(held).removeprefix('torch.')}"
        yield name, _check(make, ours, branches=True)
    make = partial(delta_case, SHORT, DIMS[0], dtype=dtype)
    shared = _check(make, ours, branches=True, spec=_with_conv(DIMS[0]))
    yield "delta.verify keys by key head", shared


def _with_conv(dims: Delta) -> Any:
    """The scratch of a layer whose conv tells the number of key heads."""
    ours, channels = checks.provider(), 2 * dims.H * dims.K + dims.HV * dims.V

    def spec(interface: str, shapes: dict[str, Any], batch: int, width: int) -> Any:
        return ours.scratch_spec(interface, {**shapes, "conv": (4, channels)}, batch, width)

    return spec


def far_drafts(dtype: torch.dtype, slots: int = 4500) -> None:
    """Verify and commit in a pool whose slots lie beyond 2^31 elements."""
    ours, dims = checks.provider(), Delta(H=16, HV=32, K=128, V=128)
    near = make_rows([(2, "fork"), (3, "continue")], seed=2)
    shift = slots - near.slots
    pool = torch.empty(slots, 32, 128, 128, device=checks.DEVICE)
    case = drafts(delta_case(near, dims, dtype=dtype), branches=False)
    want, wanted = case.expect()
    state = case.case.args["state"]
    pool[shift:] = state.to(checks.DEVICE)
    scratch = [t.to(checks.DEVICE) for t in case.scratch(ours.scratch_spec)]
    got = ours.delta_rule.verify(**_moved(case.verify_args(pool), shift), scratch=scratch)
    assert torch.equal(pool[shift:].cpu().nan_to_num(), state.nan_to_num())
    ours.delta_rule.commit(**_moved(case.commit_args(pool), shift), scratch=scratch)
    assert_committed(case, got.cpu(), pool[shift:].clone().cpu(), want, wanted)


def assert_committed(
    case: VerifyCase, got: Tensor, state: Tensor, want: Tensor, wanted: Tensor
) -> None:
    """Refuse a result or a pool after commit that is not the oracle's."""
    of_result = case.case.compare(got, {"state": state}, want, {"state": wanted})
    committed = replace(case.case, rows=case.committed())
    of_state = committed.compare(got, {"state": state}, want, {"state": wanted})
    errors = replace(of_result, state=of_state.state, stray=of_state.stray)
    assert errors.within(case.case.limits("one rounding")), errors


def _moved(args: dict[str, Any], shift: int) -> dict[str, Any]:
    """The arguments on the device, with slots further up."""
    there = {name: checks.to_device(value) for name, value in args.items() if name != "state"}
    for name in ("src", "dst"):
        if name in there:
            there[name] = torch.where(there[name] >= 0, there[name] + shift, there[name])
    return {**there, "state": args["state"]}


def graph_drafts(dtype: torch.dtype) -> None:
    """Verify and commit, captured together, give on replay what other inputs give eagerly."""
    ours = checks.provider()
    first, second = (
        drafts(delta_case(SHORT, DIMS[0], dtype=dtype, seed=seed), branches=True, seed=seed)
        for seed in (1, 2)
    )
    held = _moved(first.verify_args(first.case.args["state"].to(checks.DEVICE)), 0)
    held["gate"] = checks.to_device(second.case.args["gate"])
    ends = _moved(first.commit_args(held["state"]), 0)
    ends = {name: held.get(name, value) for name, value in ends.items()}
    scratch = [t.to(checks.DEVICE) for t in first.scratch(ours.scratch_spec)]

    def step() -> Tensor:
        result = ours.delta_rule.verify(**held, scratch=scratch)
        ours.delta_rule.commit(**ends, scratch=scratch)
        return result

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    pool = second.case.args["state"]
    given = {**second.verify_args(pool), **second.commit_args(pool)}
    for name, value in {**held, **ends}.items():
        if isinstance(value, Tensor):
            value.copy_(given[name])
    graph.replay()
    want, wanted = second.expect()
    assert_committed(second, got.cpu(), held["state"].cpu(), want, wanted)
