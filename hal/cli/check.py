"""`hal check`: does a model run on a device? Manifests alone answer, no torch and no device."""

import typer

from hal.cli.errors import reporting
from hal.cli.options import (
    Arch,
    AsJson,
    Config,
    Debug,
    Dtype,
    Graphs,
    PrefixCache,
    Providers,
    StateDtype,
    Tp,
    Tree,
    Where,
    Width,
)
from hal.cli.question import question
from hal.cli.quick import show


def check(
    config: Config,
    device: Where,
    arch: Arch = "",
    dtype: Dtype = None,
    state_dtype: StateDtype = None,
    tp: Tp = 1,
    speculative: Width = None,
    tree: Tree = False,
    prefix_cache: PrefixCache = False,
    graphs: Graphs = False,
    provider: Providers = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say whether a model runs on a device: exit status 0 yes, 1 no, 2 bad input.

    The first line alone says it; no torch, no device and no weights are needed.
    """
    with reporting("check", debug):
        asked = question(
            config,
            device,
            arch,
            dtype=dtype,
            state_dtype=state_dtype,
            tp=tp,
            speculative=speculative,
            tree=tree,
            prefix_cache=prefix_cache,
            graphs=graphs,
            providers=provider,
        )
        raise typer.Exit(show(asked, as_json))
