"""Manifest of the AMD provider: compiled, never run on an AMD device.

By the rule for what its hardware never ran, it offers what a stock engine serves on ROCm: every
kind of layer but compressed convolutional attention.
"""

from collections.abc import Iterator
from dataclasses import replace

from hal_registry import API, Code, Manifest, Offer, Proof, Reason, Requirement, hookimpl
from hal_rocm.arches import ARCHES

FLOATS = ("bfloat16", "float16", "float32")
FEATURES = ("negative_slots", "strided")
RATIOS = (1, 2, 3, 4, 8)
HEAD_DIMS = ((16, 24), (64, 64), (64, 96), (64, 128), (96, 192), (128, 64), (128, 128))
FUSED_DIMS = ((16, 24), (64, 96), (128, 128))
CHANNEL = frozenset({"channel", "safe", "ready_channel"})
SHAPES = ("chain", "tree")
DRAFTS = range(1, 17)
SHORT = 8
"""Drafts of a row that RDNA has the registers for."""

CONV = Offer(
    dtypes=FLOATS,
    layouts=("ring", "CW", "WC"),
    activations=("silu", "none"),
    widths=range(2, 9),
    features=(*FEATURES, "bias"),
)
SHORT_CONV = replace(CONV, layouts=("ring",), activations=("none",), widths=range(3, 8))
DELTA = Offer(
    dtypes=FLOATS,
    state_dtypes=("float32",),
    layouts=("VK", "KV"),
    gates=("scalar", "channel", "safe", "ready_scalar"),
    head_dims=HEAD_DIMS,
    ratios=RATIOS,
    features=FEATURES,
)
DECODE_FUSED = replace(
    DELTA,
    layouts=("ring", "VK"),
    gates=("scalar", "channel", "ready_scalar"),
    activations=("silu",),
    head_dims=FUSED_DIMS,
    ratios=(1, 2, 3),
    widths=(4,),
    features=(*FEATURES, "bias"),
)
SCAN = Offer(
    dtypes=FLOATS,
    state_dtypes=("float32",),
    layouts=("PN",),
    kinds=("mamba2", "mamba1", "lightning"),
    head_dims=(24, 32, 64, 80, 96, 128),
    ratios=range(1, 129),
    state_sizes=(8, 16, 48, 64, 128, 256),
    features=FEATURES,
)


def _with_drafts(offer: Offer) -> Offer:
    return replace(offer, verify=SHAPES, verify_widths=DRAFTS)


OFFERS = {
    "conv.prefill": replace(CONV, track=(1,)),
    "conv.decode": CONV,
    "conv.verify": _with_drafts(CONV),
    "conv.commit": _with_drafts(CONV),
    "conv_state.step": Offer(
        dtypes=FLOATS,
        layouts=("ring",),
        kinds=("short_conv",),
        features=("negative_slots",),
    ),
    "short_conv.prefill": SHORT_CONV,
    "short_conv.decode": SHORT_CONV,
    "delta_rule.prefill": replace(DELTA, track=(64,)),
    "delta_rule.decode": DELTA,
    "delta_rule.decode_fused": DECODE_FUSED,
    "delta_rule.verify": _with_drafts(DELTA),
    "delta_rule.commit": _with_drafts(DELTA),
    "scan.prefill": replace(SCAN, track=(64,)),
    "scan.decode": SCAN,
    "scan.verify": _with_drafts(SCAN),
    "scan.commit": _with_drafts(SCAN),
}

DATE = "2026-11-30"
COMPILED = {
    "date": DATE,
    "versions": "triton 3.6.0 and 3.9.0",
    "report": "docs/rocm.md",
}
"""Of `tests/compiled/test_rocm.py`: hsaco within the arch's limits, without spills."""

INTERPRETED = {
    "date": DATE,
    "versions": "triton 3.9.0 interpreter, torch 2.13.0+cpu",
    "report": "docs/rocm.md",
}
"""Of `tests/interpreted/test_rocm.py`, as `tests/support/rocm_kit.py` chooses from the kit."""

HOST_ONLY = ("conv_state.step",)
"""Operations that launch nothing: there is nothing to compile."""


def check(need: Requirement) -> Iterator[Reason]:
    """Refuse on RDNA what does not fit its 256 vector registers."""
    arch = ARCHES.get(need.arch)
    if arch is None or arch.unit == "mfma":
        return
    for code, needed, offered in _lacks(need):
        able = ", ".join(name for name, arch in ARCHES.items() if arch.unit == "mfma")
        yield Reason(
            code,
            need.operation,
            f"{needed} on {need.arch} ({need.why})",
            f"{offered}, or {able}",
            "its kernels do not fit the registers of this arch",
            f"use a provider that offers {need.operation} with {needed} on {need.arch}",
        )


def _lacks(need: Requirement) -> Iterator[tuple[Code, str, str]]:
    """What a need asks of RDNA too much, in words, and what there is."""
    gates = set(need.gates)
    if need.operation == "delta_rule.prefill" and gates and gates <= CHANNEL:
        if need.dtype != "float32":
            yield Code.SHAPE_UNSUPPORTED, f"gate {' or '.join(sorted(gates))}", "float32"
    if need.operation == "scan.prefill" and need.kind != "mamba1":
        if need.dtype not in ("", "bfloat16"):
            yield Code.DTYPE_UNSUPPORTED, f"dtype {need.dtype}", "bfloat16"
    if need.operation in ("delta_rule.verify", "delta_rule.commit"):
        if (need.verify_width or 0) > SHORT:
            yield Code.MODE_UNSUPPORTED, f"verify width {need.verify_width}", f"1..{SHORT}"


def _proofs() -> tuple[Proof, ...]:
    pairs = [(operation, dtype) for operation in OFFERS for dtype in FLOATS]
    return (
        *(Proof(operation, dtype, "interpreter", **INTERPRETED) for operation, dtype in pairs),
        *(
            Proof(operation, dtype, "compiled", arch, **COMPILED)
            for operation, dtype in pairs
            if operation not in HOST_ONLY
            for arch in ARCHES
        ),
    )


MANIFEST = Manifest(
    name="rocm.triton",
    device="rocm",
    api=API,
    load="hal_rocm.provider:TritonProvider",
    probe="hal_rocm.probe:presence",
    needs=("torch>=2.11",),  # Triton is looked for by the probe
    hints={},
    arches=tuple(ARCHES),
    check=check,
    offers=OFFERS,
    proofs=_proofs(),
)


@hookimpl
def hal_providers() -> list[Manifest]:
    """The one provider of this distribution."""
    return [MANIFEST]
