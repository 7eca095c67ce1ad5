"""The command-line options of commands that ask about a config and a device, each once."""

from typing import Annotated

import typer

Config = Annotated[str, typer.Argument(help="A config.json or its folder.", show_default=False)]
Where = Annotated[str, typer.Option("--device", "-d", help='As "cuda", "npu" or "cuda:sm_90".')]
Arch = Annotated[str, typer.Option(help='The architecture, as "sm_90"; without it left open.')]
Dtype = Annotated[str | None, typer.Option(help="Of activations; the config's by default.")]
StateDtype = Annotated[
    str | None, typer.Option(help="Of recurrent states; the config's, else float32, by default.")
]
Tp = Annotated[int, typer.Option(help="Tensor-parallel size.")]
Width = Annotated[
    int | None, typer.Option("--speculative", help="Verify steps of so many tokens a row.")
]
Tree = Annotated[bool, typer.Option("--tree", help="Verify trees, not only chains.")]
PrefixCache = Annotated[bool, typer.Option("--prefix-cache", help="Track states of prefixes.")]
Graphs = Annotated[bool, typer.Option("--graphs", help="Capture decode and verify in graphs.")]
Providers = Annotated[
    list[str] | None,
    typer.Option("--provider", help="INTERFACE=NAME or OPERATION=NAME; repeat for more."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
