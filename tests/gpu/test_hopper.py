"""The Hopper provider on its device: parity, capture, streams, threads, long prompts, the kit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.interfaces import Gate
from hal.model.spec import GateKind
from hal.testing import ProviderSuite
from hal_cuda.hopper import nvrtc, probe
from hal_cuda.hopper.plugin import MANIFEST
from hal_cuda.hopper.provider import HopperProvider
from hal_cuda.hopper.variant import COMMON, Kernels
from hal_cuda.plugin import MANIFEST as TRITON
from hal_registry import Presence, Registry
from support import device_bound as bound
from support import device_checks as checks
from support import device_hopper as hopper
from support.kit import outcomes, suite_of
from support.ops import LIMITS

pytestmark = pytest.mark.cuda
H, HV, D = 2, 4, 128
CHANNELS = (2 * H + HV) * D
KIT = sorted(name for name in dir(ProviderSuite) if name.startswith("test_"))


@pytest.fixture(autouse=True)
def here(device: str) -> None:
    """Skip where the provider's own probe would refuse."""
    found = probe.presence(0)
    if not isinstance(found, Presence) or found.arch != probe.ARCH:
        pytest.skip(f"not for cuda.hopper: {found}")


@pytest.fixture
def ops(device: str) -> Iterator[HopperProvider]:
    made = HopperProvider(device, {})
    made.warmup()
    yield made
    torch.cuda.synchronize()


def test_every_check_equals_the_oracle() -> None:
    found = []
    for name, check in hopper.hopper_checks(torch.bfloat16):
        try:
            check()
        except AssertionError as fault:
            found.append(f"{name}: {fault}")
    assert found == []


@pytest.mark.parametrize("name", KIT)
def test_the_kit_passes(name: str) -> None:
    failed = [text for text in outcomes(suite_of(MANIFEST, ""), name) if text]
    assert failed == []


def inputs(tokens: int, seed: int = 0) -> dict[str, Any]:
    """A packed call of three rows, in place, in bfloat16."""
    gen = torch.Generator(checks.DEVICE).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=gen, device=checks.DEVICE, dtype=dtype)

    bounds = [0, tokens // 3, tokens // 2, tokens]
    ids = torch.tensor([3, 1, 5], device=checks.DEVICE, dtype=torch.int32)
    gate = Gate(GateKind.SCALAR, normal(HV, dtype=torch.float32) - 1,
                normal(HV, dtype=torch.float32) - 3)  # fmt: skip
    return {
        "mixed_qkv": normal(tokens, CHANNELS),
        "a": normal(tokens, HV),
        "b": normal(tokens, HV),
        "gate": gate,
        "state": normal(7, HV, D, D, dtype=torch.float32) * 0.3,
        "src": ids,
        "dst": ids.clone(),
        "query_start_loc": torch.tensor(bounds, device=checks.DEVICE, dtype=torch.int32),
        "max_len": tokens,
    }


def eager(ops: HopperProvider, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Result and states of a call on a copy of the pool."""
    assert ops.delta_rule is not None
    state = given["state"].clone()
    return ops.delta_rule.prefill_fused(**{**given, "state": state}), state


def same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("tokens", [300, 3000])
def test_a_captured_prefill_replays_what_eager_calls_give(ops: HopperProvider, tokens: int) -> None:
    assert ops.delta_rule is not None
    held = inputs(tokens)
    out = torch.empty(tokens, HV, D, device=checks.DEVICE, dtype=torch.bfloat16)
    eager(ops, {**held, "out": out})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.delta_rule.prefill_fused(**held, out=out)
    most = tokens - 10
    for seed, bounds in ((1, [0, 1, 1, tokens]), (2, [0, tokens // 3, tokens // 3 + 64, most])):
        fresh = inputs(tokens, seed)
        fresh["gate"] = held["gate"]
        fresh["query_start_loc"] = torch.tensor(bounds, device=checks.DEVICE, dtype=torch.int32)
        want = eager(ops, fresh)
        for name, value in fresh.items():
            if isinstance(value, Tensor):
                held[name].copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        assert same((out, held["state"]), want)


def test_what_is_not_loaded_is_not_loaded_under_capture() -> None:
    graph, something = torch.cuda.CUDAGraph(), torch.zeros(4, device=checks.DEVICE)
    with torch.cuda.graph(graph):
        something.add_(1)
        with pytest.raises(RuntimeError, match="call warmup"):
            Kernels().get(COMMON[0].walk(), 0)


def test_a_call_runs_on_the_current_stream(ops: HopperProvider) -> None:
    given = inputs(200)
    want = eager(ops, given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        given = {n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()}
        got = eager(ops, given)
    side.synchronize()
    assert same(got, want)


def test_a_new_thread_may_call_first(ops: HopperProvider) -> None:
    given, got = inputs(100), list[tuple[Tensor, Tensor]]()
    want = eager(ops, given)
    thread = Thread(target=lambda: got.append(eager(ops, given)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert same(got[0], want)


def test_equal_calls_give_equal_bits(ops: HopperProvider) -> None:
    given = inputs(2000)
    first = eager(ops, given)
    assert all(same(eager(ops, given), first) for _ in range(20))


def test_both_forms_of_the_kernel_agree() -> None:
    given = inputs(700)
    q, k, v = given.pop("mixed_qkv").split([H * D, H * D, HV * D], 1)
    tokens = {
        "q": q.unflatten(1, (H, D)),
        "k": k.unflatten(1, (H, D)),
        "v": v.unflatten(1, (HV, D)),
    }
    whole, half = (
        hopper.rule(n).prefill(**tokens, **{**given, "state": given["state"].clone()})
        for n in (2, 1)
    )
    error = (whole.double() - half.double()).norm() / whole.double().norm()
    assert error < 4e-3


TOKENS = 300_000


def in_pieces(ops: HopperProvider, piece: int) -> tuple[Tensor, Tensor]:
    """A prompt of 300,000 tokens, piece by piece in one slot: results and the last state."""
    assert ops.delta_rule is not None
    gen = torch.Generator(checks.DEVICE).manual_seed(1)
    shape = (TOKENS, 4 * D)
    mixed = torch.randn(shape, generator=gen, device=checks.DEVICE, dtype=torch.bfloat16)
    a, b = (torch.randn(2, TOKENS, 2, generator=gen, device=checks.DEVICE)).bfloat16()
    law = torch.randn(2, 2, generator=gen, device=checks.DEVICE)
    gate = Gate(GateKind.SCALAR, law[0] - 1.0, law[1] - 3.0)
    state = torch.full((2, 2, D, D), float("nan"), device=checks.DEVICE)
    out = torch.empty(TOKENS, 2, D, device=checks.DEVICE, dtype=torch.bfloat16)
    for at in range(0, TOKENS, piece):
        end = min(at + piece, TOKENS)
        src, dst, bounds = (
            torch.tensor(ids, device=checks.DEVICE, dtype=torch.int32)
            for ids in ([1 if at else -1], [1], [0, end - at])
        )
        part = slice(at, end)
        ops.delta_rule.prefill_fused(mixed[part], a[part], b[part], gate, state, src, dst, bounds,
                                     end - at, out=out[part])  # fmt: skip
    return out, state[1]


@pytest.mark.parametrize("piece", [8_000, 8_191])
def test_300_000_tokens_in_pieces_of_8k_equal_those_of_64k(ops: HopperProvider, piece: int) -> None:
    small, large = in_pieces(ops, piece), in_pieces(ops, 64_000)
    for got, want, axes, limit in zip(
        small, large, ((0, 2), (1, 2)), LIMITS["bfloat16", "chunked"], strict=True
    ):
        apart = (got.double() - want.double()).norm(dim=axes) / want.double().norm(dim=axes)
        assert float(torch.nan_to_num(apart, nan=float("inf")).max()) <= limit


def test_a_bound_layer_takes_it_for_prefill_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**bound.DELTA_CONFIG, "linear_key_head_dim": D, "linear_value_head_dim": D}
    monkeypatch.setattr(bound, "DELTA_CONFIG", config)
    place = replace(bound.Place(), registry=Registry.of(TRITON, MANIFEST))
    subject = bound.delta(place, torch.bfloat16)
    choices = subject.backend.selection.choices
    assert choices["delta_rule.prefill"].provider == "cuda.hopper"
    assert choices["delta_rule.decode"].provider == "cuda.triton"
    with hopper.launches() as found:
        subject.run()
    assert found


def test_a_cubin_is_found_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    form = COMMON[0].walk()
    first = nvrtc.compiled(form.source(), dict(form.defines))
    compiler = nvrtc.compiler()
    monkeypatch.setattr(nvrtc, "compiler", lambda: replace(compiler, library=None))
    assert nvrtc.compiled(form.source(), dict(form.defines)) == first
