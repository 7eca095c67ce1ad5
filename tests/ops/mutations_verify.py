"""Wrong verify and commit operations, each a right pair with one mistake.

A mutation takes an interface that serves both and returns one that serves them wrongly.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch

from hal.testing.verify_cases import Served

Args = dict[str, Any]
Mutation = Callable[[Served], Served]


@dataclass(frozen=True)
class Pair:
    """Two operations, as an interface serves them."""

    verify: Callable[..., Any]
    commit: Callable[..., None]


def _verify(change: Callable[[Args], Args]) -> Mutation:
    """A mistake in what verify is shown."""

    def mutate(served: Served) -> Served:
        return Pair(lambda **args: served.verify(**{**args, **change(args)}), served.commit)

    return mutate


def _commit(change: Callable[[Args], Args]) -> Mutation:
    """A mistake in what commit is shown."""

    def mutate(served: Served) -> Served:
        return Pair(served.verify, lambda **args: served.commit(**{**args, **change(args)}))

    return mutate


def _writes_committed_state(served: Served) -> Served:
    """Verify commits the whole rows itself, as an engine does that cannot roll back."""

    def verify(**args: Any) -> Any:
        result = served.verify(**args)
        index = {n: args[n] for n in ("state", "scratch", "src", "start", "query_start_loc")
                 if n in args}  # fmt: skip
        lengths = args["query_start_loc"].diff()
        served.commit(**index, dst=args["src"], last=(lengths - 1).to(torch.int32))
        return result

    return Pair(verify, served.commit)


def _fork_commits_into_src(args: Args) -> Args:
    return {"dst": torch.where(args["src"] >= 0, args["src"], args["dst"])}


def _whole_row(args: Args) -> Args:
    lengths = args["query_start_loc"].diff().to(torch.int32)
    return {"last": torch.where(args["last"] >= 0, lengths - 1, args["last"])}


def _one_less(args: Args) -> Args:
    return {"last": torch.where(args["last"] > 0, args["last"] - 1, args["last"])}


def _nothing_accepted_commits_one(args: Args) -> Args:
    return {"last": args["last"].clamp(min=0)}


def _first_row_for_all(args: Args) -> Args:
    lengths = args["query_start_loc"].diff().to(torch.int32)
    return {"last": torch.minimum(args["last"][:1].expand_as(lengths), lengths - 1)}


def _parents_of_the_batch(args: Args) -> Args:
    """Row-relative parents read as places in the batch: every row but the first is wrong."""
    parents, starts = args["parents"].clone(), args["query_start_loc"].tolist()
    for begin, end in pairwise(starts):
        own = parents[begin:end]
        parents[begin:end] = torch.where(own >= begin, own - begin, own.clamp(max=-1))
    return {"parents": parents}


VERIFY: Final[dict[str, Mutation]] = {
    "verify writes the committed state": _writes_committed_state,
    "verify starts from zeros": _verify(lambda args: {"src": torch.full_like(args["src"], -1)}),
    "commit starts from zeros": _commit(lambda args: {"src": torch.full_like(args["src"], -1)}),
    "commit off by one": _commit(_one_less),
    "commit of the whole row": _commit(_whole_row),
    "nothing accepted commits one": _commit(_nothing_accepted_commits_one),
    "rows commit the first row's count": _commit(_first_row_for_all),
    "a fork commits into its source": _commit(_fork_commits_into_src),
    "commit does nothing": lambda served: replace(
        Pair(served.verify, served.commit), commit=lambda **args: None
    ),
}
"""Mistakes of chains and trees alike."""

TREE: Final[dict[str, Mutation]] = {
    "tree follows token order": _verify(lambda args: {"parents": None}),
    "every token is a root": _verify(
        lambda args: {"parents": torch.full_like(args["parents"], -1)}
    ),
    "parents of the batch": _verify(_parents_of_the_batch),
}
"""Mistakes that only a tree of several rows shows."""
