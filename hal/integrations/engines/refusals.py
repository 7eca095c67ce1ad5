"""Refusals of an engine's plugin, in the form of those that selection gives."""

from hal.refusal import Refusal, Unsupported
from hal_registry import Code, Reason


def refuse(who: str, where: str, *reasons: Reason) -> Unsupported:
    """The error that says why `who` cannot run on `where`."""
    return Unsupported(Refusal(who, where, reasons))


def mode(subject: str, needed: str, offered: str, fix: str) -> Reason:
    """A way of running that is not served."""
    return Reason(Code.MODE_UNSUPPORTED, subject, needed, offered, fix=fix)


def library(subject: str, needed: str, offered: str, fix: str) -> Reason:
    """An engine of another version, or without a seam that its version should have."""
    return Reason(Code.LIBRARY_VERSION, subject, needed, offered, fix=fix)
