"""The kit's cases, under one name for the tests of operators."""

from hal.testing.case import Call, Case, Errors
from hal.testing.conv_cases import conv_case
from hal.testing.delta_cases import Delta, delta_case, make_gate
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

__all__ = [
    "LIMITS",
    "NAN",
    "ROW_KINDS",
    "Call",
    "Case",
    "Delta",
    "Errors",
    "Rows",
    "changed_outside",
    "clone_view",
    "conv_case",
    "delta_case",
    "i32",
    "make_gate",
    "make_rows",
    "packed",
    "poisoned_pool",
    "worst",
]
