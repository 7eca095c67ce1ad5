"""The CPU provider keeps the Protocols' signatures, its layouts and its sidecar's promises."""

import inspect
from math import prod
from typing import Any

import pytest
import torch

from hal import interfaces, reference
from hal.errors import StepOrderError
from hal_cpu.plugin import MANIFEST
from hal_cpu.provider import CONV_LAYOUTS, RECURRENT_LAYOUTS, TorchProvider
from support.ops import i32

PROVIDER = TorchProvider("cpu", {})


def shape_of(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = list(inspect.signature(function).parameters.values())
    return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]


@pytest.mark.parametrize(
    ("operation", "protocol"),
    [
        *(
            (f"{interface}.{verb}", getattr(protocol, verb))
            for interface, protocol in (
                ("conv", interfaces.Conv),
                ("delta_rule", interfaces.DeltaRule),
                ("scan", interfaces.Scan),
            )
            for verb in ("prefill", "decode", "verify", "commit")
        ),
        ("conv_state.attach", interfaces.ConvState.attach),
        ("conv_state.begin", interfaces.ConvState.begin),
        ("conv_state.step", interfaces.ConvState.step),
    ],
)
def test_signatures_are_the_protocols(operation: str, protocol: Any) -> None:
    interface, method = operation.split(".")
    assert shape_of(getattr(getattr(PROVIDER, interface), method)) == shape_of(protocol)


@pytest.mark.parametrize("method", ["prepare", "scratch_spec", "warmup"])
def test_the_provider_has_the_protocols_methods(method: str) -> None:
    assert shape_of(getattr(PROVIDER, method)) == shape_of(getattr(interfaces.Provider, method))


@pytest.mark.parametrize(
    ("interface", "protocol"),
    [("conv", interfaces.Conv), ("delta_rule", interfaces.DeltaRule), ("scan", interfaces.Scan)],
)
@pytest.mark.parametrize("method", ["prefill", "decode"])
def test_the_oracle_takes_the_protocols_arguments(
    interface: str, protocol: Any, method: str
) -> None:
    ours = shape_of(getattr(reference, f"{interface}_{method}"))
    theirs = shape_of(getattr(protocol, method))
    extra = [p for p in ours if p not in theirs]
    assert [p for p in theirs if p not in ours] == [p for p in theirs if p[0] == "out"]
    assert [name for name, _, _ in extra] == ([] if interface == "scan" else ["layout"])


@pytest.mark.parametrize("interface", ["conv", "delta_rule", "scan"])
def test_the_oracle_verifies_without_scratch(interface: str) -> None:
    protocol = {"conv": "Conv", "delta_rule": "DeltaRule", "scan": "Scan"}[interface]
    ours = shape_of(getattr(reference, f"{interface}_verify"))
    theirs = shape_of(getattr(interfaces, protocol).verify)
    left = [name for name, _, _ in theirs if name not in [n for n, _, _ in ours]]
    assert left == ["scratch", "out"]


@pytest.mark.parametrize("method", ["decode_fused", "prefill_fused"])
def test_what_is_not_offered_is_not_there(method: str) -> None:
    assert method not in dir(PROVIDER.delta_rule)
    assert f"delta_rule.{method}" not in MANIFEST.offers


def test_every_offered_operation_is_there() -> None:
    for operation in MANIFEST.offers:
        interface, _, verb = operation.partition(".")
        if interface != "conv_state" or verb == "step":
            assert callable(getattr(getattr(PROVIDER, interface), verb))


def test_layouts_are_told_by_state_name() -> None:
    for conv in CONV_LAYOUTS:
        for recurrent in RECURRENT_LAYOUTS:
            TorchProvider("cpu", {"layouts": {"conv": conv, "recurrent": recurrent}})


@pytest.mark.parametrize(
    ("layouts", "text"),
    [
        ({"conv": "ring"}, "cpu.torch: layout of conv is 'ring', expected CW or WC"),
        ({"recurrent": "KK"}, "cpu.torch: layout of recurrent is 'KK', expected VK or KV"),
    ],
)
def test_an_unknown_layout_is_refused(layouts: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match="layout") as caught:
        TorchProvider("cpu", {"layouts": layouts})
    assert str(caught.value) == text


def test_another_device_and_odd_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cpu\.torch: device is 'meta', expected 'cpu'"):
        TorchProvider("meta", {})
    with pytest.raises(TypeError, match=r"cpu\.torch: layouts is str, expected a mapping"):
        TorchProvider("cpu", {"layouts": "CW"})


def test_prepare_keeps_names_shapes_and_values() -> None:
    params = {
        "conv_weight": torch.randn(6, 4).bfloat16(),
        "weight": torch.randn(6, 3),
        "A_log": torch.randn(2),
        "conv_bias": None,
    }
    ready = PROVIDER.prepare(params)
    assert list(ready) == list(params)
    assert ready["A_log"] is params["A_log"]
    assert ready["conv_bias"] is None
    for name in ("conv_weight", "weight"):
        held, given = ready[name], params[name]
        assert held is not None
        assert given is not None
        assert held.t().is_contiguous()
        assert torch.equal(held, given.float())


@pytest.mark.parametrize(
    ("interface", "shapes", "kept"),
    [
        ("conv", {"conv": (24, 3)}, {"inputs": (24,)}),
        (
            "delta_rule",
            {"recurrent": (4, 8, 6)},
            {"keys": (4, 6), "updates": (4, 8), "decays": (4, 6)},
        ),
        ("scan", {"scan": (4, 8, 6)}, {"keys": (4, 6), "updates": (4, 8), "decays": (4,)}),
        ("scan", {"scan": (32, 6)}, {"states": (32, 6)}),
    ],
)
def test_scratch_has_room_for_every_draft_token(
    interface: str, shapes: dict[str, tuple[int, ...]], kept: dict[str, tuple[int, ...]]
) -> None:
    asked = PROVIDER.scratch_spec(interface, shapes, 4, 3)
    named = {s.name: s for s in asked}
    assert {n: s.shape for n, s in named.items()} == {
        **{n: (12, *shape) for n, shape in kept.items()},
        "parents": (12,),
    }
    assert {s.dtype for n, s in named.items() if n != "parents"} == {"float32"}


@pytest.mark.parametrize("interface", ["conv_state", "short_conv", "cca"])
def test_interfaces_without_verify_keep_no_scratch(interface: str) -> None:
    assert PROVIDER.scratch_spec(interface, {"conv": (24, 3)}, 4, 3) == ()


def test_the_scratch_of_a_replay_is_far_smaller_than_a_state_a_token() -> None:
    asked = PROVIDER.scratch_spec("delta_rule", {"recurrent": (32, 128, 128)}, 1, 4)
    assert sum(4 * prod(s.shape) for s in asked) < 4 * 4 * 32 * 128 * 128 / 40


def test_nothing_compiles() -> None:
    PROVIDER.warmup()


def test_the_sidecar_gives_every_layer_the_same_indices_and_its_own_tensors() -> None:
    sidecar = TorchProvider("cpu", {}).conv_state
    pools = {3: (torch.zeros(4, 8, 2),), 7: (torch.zeros(4, 8, 3), torch.zeros(4, 16))}
    sidecar.attach(pools)
    src, dst, start, bounds = i32(2, -1), i32(3, 1), i32(9, 0), i32(0, 1, 4)
    sidecar.begin(src, dst, start, bounds, 3)
    for layer, tensors in pools.items():
        step = sidecar.step(layer)
        assert step is sidecar.step(layer)
        assert all(ours is theirs for ours, theirs in zip(step.tensors, tensors, strict=True))
        assert step.src is src
        assert step.dst is dst
        assert step.start is start
        assert step.query_start_loc is bounds
        assert step.max_len == 3


def test_a_step_of_the_sidecar_before_begin_or_of_another_layer_is_refused() -> None:
    sidecar = TorchProvider("cpu", {}).conv_state
    sidecar.attach({3: (torch.zeros(4, 8, 2),)})
    with pytest.raises(StepOrderError, match=r"conv_state\.step: layer 3 asked before begin"):
        sidecar.step(3)
    sidecar.begin(i32(), i32(), i32(), i32(0), 0)
    with pytest.raises(ValueError, match=r"conv_state\.step: layer 5 has no state, attached: 3"):
        sidecar.step(5)


def test_the_short_convolution_composes_from_the_sidecar_and_the_convolution() -> None:
    gen = torch.Generator().manual_seed(4)
    b, c, x = (torch.randn(6, 5, generator=gen).bfloat16() for _ in range(3))
    weight, pool = torch.randn(5, 3, generator=gen).bfloat16(), torch.randn(4, 5, 2).bfloat16()
    args = (i32(1, -1), i32(2, 3), i32(4, 0), i32(0, 2, 6), 4)
    want, end = reference.short_conv_prefill(b, c, x, weight, None, pool, *args)
    sidecar = PROVIDER.conv_state
    sidecar.attach({0: (pool,)})
    sidecar.begin(*args)
    step = sidecar.step(0)
    indices = (step.src, step.dst, step.start, step.query_start_loc, step.max_len)
    y = PROVIDER.conv.prefill(b * x, weight, None, step.tensors[0], *indices)
    torch.testing.assert_close((c * y).double(), want, rtol=1e-2, atol=1e-2)
    assert torch.equal(pool.double()[[2, 3]], end[[2, 3]])
