"""Why nothing can be measured, with the reasons that judging knows."""

from collections.abc import Sequence

from hal.errors import HalError
from hal_registry import Reason


class NotMeasured(HalError):
    """Nothing can be measured as asked; `.reasons` hold what is needed, offered, and the fix."""

    def __init__(self, headline: str, reasons: Sequence[Reason]) -> None:
        fixes = dict.fromkeys(reason.fix for reason in reasons if reason.fix)
        lines = [headline, *(f"  {reason}" for reason in dict.fromkeys(reasons))]
        super().__init__("\n".join([*lines, *(f"  Fix: {fix}." for fix in list(fixes)[:1])]))
        self.reasons = tuple(reasons)
