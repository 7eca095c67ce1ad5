"""The oracle: every operation one token at a time, in float64, as its formula reads.

A function takes the arguments of the Protocol's method without `out`, and the state's `layout`.
It works on float64 copies of the inputs as they are (rounded before), changes none of them, and
returns `(result, state)`: the result and the whole pool after the call, both float64. It is total:
no rows, no tokens, rows without tokens and pads are all legal. Verify is the exception: it gives
the slot after every token in place of a pool, and `commit` picks from those.
"""

from hal.reference.cca import cca_decode, cca_prefill
from hal.reference.conv import conv_decode, conv_prefill, short_conv_decode, short_conv_prefill
from hal.reference.delta_rule import delta_rule_decode, delta_rule_prefill, gates
from hal.reference.norm import gated_rms_norm
from hal.reference.scan import scan_decode, scan_prefill
from hal.reference.verify import (
    commit,
    conv_verify,
    delta_rule_verify,
    path_to,
    scan_verify,
)

__all__ = [
    "cca_decode",
    "cca_prefill",
    "commit",
    "conv_decode",
    "conv_prefill",
    "conv_verify",
    "delta_rule_decode",
    "delta_rule_prefill",
    "delta_rule_verify",
    "gated_rms_norm",
    "gates",
    "path_to",
    "scan_decode",
    "scan_prefill",
    "scan_verify",
    "short_conv_decode",
    "short_conv_prefill",
]
