"""Tables that read alike on a terminal and in a pipe: a line a row, never wrapped."""

import re
import sys
from collections.abc import Iterator, Sequence

import typer


def aligned(rows: Sequence[Sequence[str]], indent: int = 0) -> Iterator[str]:
    """Rows as lines with columns two spaces apart; a row may be shorter than the others."""
    columns = max(map(len, rows), default=0)
    filled = [[*row, *[""] * (columns - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*filled, strict=True)]
    for row in filled:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield (" " * indent + "  ".join(cells)).rstrip()


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: by rich on a terminal, as aligned lines where something else reads it."""
    if not sys.stdout.isatty():
        for line in aligned([header, *rows]):
            typer.echo(line)
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown."""
    for row in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {f"{name}i": 1024**power for power, name in enumerate(("k", "m", "g", "t"), 1)}


def read_bytes(text: str, option: str) -> int:
    """A size such as "141GiB", "24 GB" or "4.8TB/s" in bytes (a second)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?(?:/s)?", text.strip().lower())
    if found is None:
        raise ValueError(f"{option}: got {text!r}, expected a size such as 141GiB or 24GB")
    return round(float(found[1]) * UNITS[found[2] or ""])


def read_tokens(text: str, option: str) -> int:
    """A count such as "4096", "32k" or "1m", in steps of 1024."""
    found = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if found is None or int(found[1]) < 1:
        raise ValueError(f"{option}: got {text!r}, expected a count such as 4096 or 32k")
    return int(found[1]) * UNITS[f"{found[2]}i" if found[2] else ""]


def show_bytes(size: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        unit = UNITS[name[0].lower() + "i"]
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"
