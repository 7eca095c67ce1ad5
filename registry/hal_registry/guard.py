"""Run a plugin's code so that whatever it raises stays with that plugin."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a plugin's code raised."""

    error: BaseException

    @property
    def text(self) -> str:
        """Type and message on one line."""
        import traceback

        last = traceback.format_exception_only(self.error)[-1]
        return " ".join(last.split())

    @property
    def traceback(self) -> str:
        """The whole traceback, causes included."""
        import traceback

        return "".join(traceback.format_exception(self.error))


def attempt(call: Callable[[], T]) -> T | Failure:
    """The result of a call, or its failure; only Ctrl-C passes.

    SystemExit is caught too: a plugin must not end its host.
    """
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Failure(error)
