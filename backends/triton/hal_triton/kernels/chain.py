"""A kernel that is launched while the one before it on the stream still runs, and waits for it."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def chain(CHAIN: tl.constexpr):
    """Wait for the end of the kernel before, where this one was launched while that still ran.

    First in a kernel: nothing may be read or written before. The wait covers everything that was
    launched before, since that kernel did not end before its own wait did. Nothing tells the next
    kernel to come early: its programs would take the places of this one's.
    """
    if CHAIN:
        gdc_wait()
