"""`hal new-provider`: write a provider's distribution, which installs and passes at once."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Final

import typer

from hal.cli.errors import reporting
from hal.cli.options import Debug
from hal.cli.skeleton import FILES
from hal_registry import default_registry
from hal_registry.vocabulary import NAME as DEVICE

NAME: Final = re.compile(rf"({DEVICE.pattern})\.([a-z][a-z0-9_]*)")

Name = Annotated[str, typer.Argument(help="<device>.<flavour>, as acme.torch.", show_default=False)]
Folder = Annotated[
    str, typer.Option("--path", help="Where to write; hal-<device>-<flavour> by default.")
]


def new_provider(name: Name, path: Folder = "", debug: Debug = False) -> None:
    """Write a distribution for a new provider: a manifest, a provider, a test of five lines.

    It offers nothing yet. Nothing that exists is overwritten, and no installed name is taken.
    """
    with reporting("new-provider", debug):
        written = write(name, path)
        for file in written:
            typer.echo(str(file))


def write(name: str, path: str = "") -> list[Path]:
    """Write the files and return their paths."""
    found = NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"name: got {name!r}, expected <device>.<flavour>, as 'acme.torch'")
    device, flavour = found.groups()
    package = f"hal_{device}_{flavour}"
    words = {
        "name": name,
        "device": device,
        "flavour": flavour,
        "Device": "".join(part.capitalize() for part in device.split("_")),
        "project": package.replace("_", "-"),
        "package": package,
    }
    _free(name, words["project"])
    root = Path(path or words["project"])
    files = {root / file.format(**words): text for file, text in FILES.items()}
    if taken := [str(file) for file in files if file.exists()]:
        raise ValueError(f"{taken[0]} exists; choose another --path, nothing was written")
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(**words), encoding="utf-8")
    return list(files)


def _free(name: str, project: str) -> None:
    """Refuse what an installed distribution has: the provider's name, or the project's."""
    registry = default_registry()
    taken = {fault.name: fault.distribution for fault in registry.faults}
    taken |= {candidate.name: candidate.distribution for candidate in registry.candidates}
    if name in taken:
        raise ValueError(
            f"name: {name} is a provider of {taken[name]}, which is installed; choose another "
            f"flavour, nothing was written"
        )
    try:
        found = distribution(project)
    except PackageNotFoundError:
        return
    raise ValueError(
        f"name: the project of {name} would be {project}, and {project} {found.version} is "
        f"installed; choose another flavour, nothing was written"
    )
