"""What a model and the options of a run need from one operation."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Requirement:
    """One need of one operation; a field left empty is not named and so refuses nothing.

    `why` says who needs it in words ("10 short-conv layers"). `state_dtypes`, `gates` and `layouts`
    (of the operation's own state) are alternatives, any of them will do. `head_dims` is (K, V), or
    (P, P) of a scan. `track` is the granularity of prefix tracking that the caller needs, 0 for
    whatever is offered. An `optional` operation is taken where it fits and never refuses.
    """

    operation: str
    why: str
    dtype: str = ""
    state_dtypes: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    kind: str = ""
    activation: str = ""
    head_dims: tuple[int, int] | None = None
    ratio: int | None = None
    width: int | None = None
    state_size: int | None = None
    verify: str = ""
    verify_width: int | None = None
    track: int | None = None
    features: tuple[str, ...] = ()
    arch: str = ""
    layouts: tuple[str, ...] = ()
    optional: bool = False
