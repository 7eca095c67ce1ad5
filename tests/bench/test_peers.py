"""Adapters against the oracle: transformers itself, and the others over stand-ins.

A stand-in does what its library documents, by `hal`'s float64 oracle: it shows that the adapter
asks for the same thing, and nothing about the library.
"""

from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from hal.bench import peers
from hal.bench.entrant import NotComparable
from hal.bench.judge import judge
from hal.bench.peers import BUILT_IN, Peer, Way
from hal.bench.shapes import (
    CARD,
    HOST,
    SHAPES,
    Shape,
    conv,
    default_dtype,
    drafts,
    gdn,
    kda,
    mamba1,
    ssd,
)
from hal.testing.plan import Trial
from hal_cpu.plugin import MANIFEST as CPU
from hal_cuda.plugin import MANIFEST as CUDA
from hal_registry import load
from support import fake_peers

HERE = torch.device("cpu")


def trial_of(shape: Shape, dtype: str = "") -> Trial:
    offers = CPU.offers if shape.on == HOST else CUDA.offers
    offer = offers[shape.operation]
    settings = shape.settings(offer, dtype or default_dtype(shape))
    return Trial(shape.operation, shape.name, settings, offer)


def shrunk(shape: Shape) -> Shape:
    """The same gate, kind and row kinds over little dims, with a ratio and groups above one."""
    small: dict[str, Any]
    if shape.operation.startswith("conv"):
        small = {"channels": 12}
    elif shape.operation.startswith("scan"):
        small = {"G": 2, "ratio": 2, "P": 8, "N": 16} | (
            {"G": 1} if shape.dims["kind"] == "mamba1" else {}
        )
    else:
        small = {"H": 2, "K": 16, "V": 16}
    lengths = tuple(min(length, 70) for length in shape.lengths[:3])
    return replace(shape, dims={**shape.dims, **small}, lengths=lengths)


def outcomes(peer: Peer, shape: Shape) -> list[str]:
    """What each way of a peer is: right, wrong, or why it cannot be compared."""
    trial = trial_of(shape)
    case = trial.case(shape.batch(shape.lengths), pads=0)
    want, found = case.expect_all(), []
    for entrant in peer.entrants(shape.operation):
        try:
            made = entrant.make(trial, case, HERE)
            verdict = judge(case, made.kind or trial.kind, want, made.outcome())
        except NotComparable as lack:
            found.append(str(lack))
        else:
            found.append("right" if verdict.right else f"wrong: {verdict}")
    return found


TRANSFORMERS: Peer = load(BUILT_IN["transformers"])
HOST_SHAPES = [s for s in SHAPES if s.on == HOST and not s.operation.endswith("verify")]


@pytest.mark.parametrize("shape", HOST_SHAPES, ids=lambda s: f"{s.operation}-{s.name}")
def test_transformers_is_right_on_every_shape_of_a_host(shape: Shape) -> None:
    found = outcomes(TRANSFORMERS, shrunk(shape))
    assert found[0] == "right"
    assert all(text == "right" or "chunk" in text for text in found)


def test_transformers_says_what_it_cannot_do() -> None:
    ready = gdn(2, 16, gate="ready_scalar")
    for shape, text in (
        (Shape("delta_rule.decode", "", gdn(2, 16), (1, 1), HOST), "gates that are ready"),
        (Shape("delta_rule.prefill", "", ready, (5, 3), HOST), "rows of one length"),
        (Shape("conv.prefill", "", conv(8), (5,), HOST), "starts from nothing"),
        (Shape("scan.prefill", "", mamba1(64), (5,), HOST), "starts from nothing"),
        (Shape("scan.decode", "", mamba1(64), (1,), HOST), "Mamba-2's without z"),
    ):
        assert text in outcomes(TRANSFORMERS, shape)[0]


FUSED = {**gdn(2, 16), "width": 4, "bias": True, "activation": "silu"}
CARDS = {
    "fla": [
        Shape("delta_rule.decode", "", gdn(2, 16), (1, 1, 1), CARD),
        Shape("delta_rule.prefill", "", gdn(2, 16), (5, 70, 1), CARD),
        Shape("delta_rule.prefill", "", gdn(2, 16), (5, 3), CARD, fresh=True),
        Shape("delta_rule.decode", "", kda(2), (1, 1, 1), CARD),
        Shape("delta_rule.prefill", "", kda(2), (5, 70, 1), CARD),
        Shape("delta_rule.decode", "", kda(2, "safe"), (1, 1, 1), CARD),
        Shape("delta_rule.prefill", "", kda(2, "safe"), (5, 70, 1), CARD),
        Shape("conv.decode", "", conv(12), (1, 1, 1), CARD),
    ],
    "mamba_ssm": [
        Shape("scan.decode", "", ssd(4, 2), (1, 1, 1), CARD),
        Shape("scan.prefill", "", ssd(4, 2), (9, 9), CARD),
    ],
    "flashinfer": [
        Shape("delta_rule.prefill", "", gdn(2, 16), (5, 70, 1), CARD),
        Shape("delta_rule.decode", "", gdn(2, 16), (1, 1, 1), CARD),
        Shape("scan.decode", "", ssd(4, 2), (1, 1, 1), CARD),
    ],
    "sglang": [
        Shape("delta_rule.decode", "", kda(2), (1, 1, 1), CARD),
        Shape("delta_rule.prefill", "", gdn(2, 16), (5, 70, 1), CARD),
        Shape("delta_rule.prefill", "", kda(2), (5, 70, 1), CARD),
        Shape("delta_rule.decode", "", kda(2, "safe"), (1, 1, 1), CARD),
        Shape("delta_rule.prefill", "", kda(2, "safe"), (5, 70, 1), CARD),
        Shape("delta_rule.decode_fused", "", FUSED, (1, 1, 1), CARD),
        Shape("delta_rule.verify", "", drafts(gdn(2, 16), 4), (4, 4, 4), CARD),
        Shape("scan.prefill", "", ssd(4, 2), (300, 5, 1), CARD),
        Shape("delta_rule.decode", "", gdn(2, 16), (1, 1, 1), CARD),
        Shape("conv.decode", "", conv(12), (1, 1, 1), CARD),
        Shape("conv.prefill", "", conv(12), (5, 70, 1), CARD),
        Shape("short_conv.decode", "", {"channels": 12, "width": 3, "bias": False}, (1, 1), CARD),
        Shape("short_conv.prefill", "", {"channels": 12, "width": 3, "bias": False}, (5, 2), CARD),
        Shape("scan.decode", "", ssd(4, 2), (1, 1, 1), CARD),
    ],
    "flash_kda": [Shape("delta_rule.prefill", "", kda(2, "safe"), (5, 70, 1), CARD)],
}


@pytest.mark.parametrize("name", CARDS)
def test_an_adapter_asks_for_what_the_operation_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_peers.install(monkeypatch)
    peer: Peer = load(BUILT_IN[name])
    for shape in CARDS[name]:
        assert outcomes(peer, shape) == ["right"], shape
    asked = {shape.operation for shape in CARDS[name]}
    assert asked == {way.operation for way in peer.ways}


@pytest.mark.parametrize(
    ("name", "dims", "kind"),
    [("flashinfer", kda(2), "scalar"), ("fla", kda(2, "ready_channel"), "channel or safe"),
     ("sglang", kda(2, "ready_channel"), "channel or safe"), ("flash_kda", kda(2), "safe")],
)  # fmt: skip
def test_gates_of_another_kind_are_not_comparable(
    name: str, dims: dict[str, Any], kind: str
) -> None:
    peer: Peer = load(BUILT_IN[name])
    operation = "delta_rule.prefill" if name == "flash_kda" else "delta_rule.decode"
    shape = Shape(operation, "", dims, (1, 1), CARD)
    assert outcomes(peer, shape) == [f"it takes raw gates of kind {kind} here"]


def test_only_installed_peers_of_the_device_are_found() -> None:
    found, notes = peers.found("cpu")
    assert [peer.name for peer in found] == ["transformers"]
    assert notes == []
    found, notes = peers.found("cuda", ["fla"])
    assert found == []
    assert notes == ["fla: fla-core is not installed"]
    assert peers.found("cpu", ["fla"])[1] == ["fla: it runs on cuda alone"]
    assert peers.found("cpu", ["none"]) == ([], [])
    with pytest.raises(ValueError, match="--peer flaa: expected one of transformers, fla, "):
        peers.found("cpu", ["flaa"])


OUTSIDE = Peer("acme", "pytest", ("cpu",), (Way("conv.decode", partial(lambda: None)),))


def test_an_adapter_from_outside_is_an_entry_point_and_a_broken_one_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"acme": "OUTSIDE", "odd": "HERE", "gone": "MISSING"}
    points = [EntryPoint(name, f"{__name__}:{at}", peers.GROUP) for name, at in names.items()]
    monkeypatch.setattr(peers, "entry_points", lambda group: points)
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("sys").modules[__name__])
    found, notes = peers.found("cpu", list(names))
    assert [peer.name for peer in found] == ["acme"]
    assert [note.partition(":")[0] for note in notes] == ["odd", "gone"]
    assert all("the adapter is broken" in note for note in notes)
