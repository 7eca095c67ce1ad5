"""Whether torch can be imported here, asked so that a failed import is never repeated.

A torch whose import failed half-way has registered its operators. A second import registers them
again, which hides the cause and can end the process.
"""

import importlib
import sys
from functools import cache, partial

from hal_registry import Code, Failure, Reason, attempt


@cache
def torch_failure() -> Failure | None:
    """What importing torch raises in this process, or None; it is imported once."""
    if _is_torn():
        return Failure(ImportError("torch could not be imported before in this process"))
    found = attempt(partial(importlib.import_module, "torch"))
    return found if isinstance(found, Failure) else None


def torn_torch() -> Reason | None:
    """Why nothing that needs torch can be looked at any more, where its import has failed."""
    if not _is_torn():
        return None
    cause = torch_failure()
    return Reason(
        Code.LIBRARY_MISSING,
        "torch",
        "torch",
        "not importable here",
        "" if cause is None else cause.text[:200],
        "repair the installation of torch, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 where another "
        "package extends it, and start the process anew",
    )


def _is_torn() -> bool:
    """Whether an import of torch began here and failed."""
    return "torch" not in sys.modules and "torch._C" in sys.modules
