"""The families that this runner drives, and why it leaves others alone; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from hal.errors import HalError
from hal.model.spec import Kind, ScanDims

if TYPE_CHECKING:
    from hal.model.spec import ModelSpec

DRIVEN: Final = frozenset(
    (
        "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 "
        "lfm2_moe lfm2_vl lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe "
        "qwen3_5_moe_text qwen3_5_text qwen3_next zamba zamba2 zaya"
    ).split()
)
"""model_type of a config.json, wrappers by their own name; wrappers are driven with text only."""

_SPARSE: Final = "its sparse attention picks tokens from a cache that packed rows do not have"
_BIASED: Final = "its attention takes a position bias, which the slot attention does not apply"

LEFT_ALONE: Final[Mapping[str, str]] = {
    "glm5_next": _SPARSE,
    "glm5_next_text": _SPARSE,
    "inkling2": _BIASED,
    "inkling2_text": _BIASED,
    "inkling_mm_model": _BIASED,
    "inkling_text": _BIASED,
    "qwen4_exp": _SPARSE,
    "qwen4_exp_text": _SPARSE,
    "recurrent_gemma": "its modules keep the states themselves, one request at a time",
}
"""Families that no seam of transformers lets this runner drive, with the reason."""


class Undriven(HalError, NotImplementedError):
    """A model that `hal` may serve in an engine, but that this runner does not drive."""


def check_driven(model_type: str) -> None:
    """Refuse a family that the runner would run wrongly, by name and with the reason."""
    if model_type in DRIVEN:
        return
    why = LEFT_ALONE.get(model_type, "no seam of its modules is mapped")
    raise Undriven(
        f"the transformers runner does not drive {model_type}: {why}; serve it in an engine; "
        f"this runner drives {', '.join(sorted(DRIVEN))}"
    )


def left_alone(model_type: str) -> str:
    """What a refusal by the device leaves out: that this runner does not drive the family."""
    if model_type not in LEFT_ALONE:
        return ""
    return (
        f"  With such a provider an engine may serve it; the transformers runner does not drive "
        f"{model_type}: {LEFT_ALONE[model_type]}."
    )


def check_verified(model: ModelSpec) -> None:
    """Refuse speculation where the mixers scan head by head, which leaves nothing to commit."""
    heads = {
        layer.dims.G
        for layer in model.stateful_layers()
        if layer.stateful is Kind.MAMBA1 and isinstance(layer.dims, ScanDims)
    }
    if max(heads, default=1) > 1:
        raise Undriven(
            f"the transformers runner does not verify drafts of {model.model_type}: its mixers "
            f"scan {max(heads)} heads one by one, and such a scan has no verify; "
            f"run it without speculation"
        )
