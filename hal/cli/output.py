"""Tables that read alike on a terminal and in a pipe: a line a row, never wrapped."""

import re
from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], indent: int = 0) -> Iterator[str]:
    """Rows as lines with columns two spaces apart; a row may be shorter than the others."""
    columns = max(map(len, rows), default=0)
    filled = [[*row, *[""] * (columns - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*filled, strict=True)]
    for row in filled:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield (" " * indent + "  ".join(cells)).rstrip()


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown."""
    for row in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {f"{name}i": 1024**power for power, name in enumerate(("k", "m", "g", "t"), 1)}


def read_bytes(text: str, option: str) -> int:
    """A size such as "141GiB", "24 GB" or "4.8TB/s" in bytes (a second); it has to have a unit."""
    form = r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([kmgt]i?)b?|b)(?:/s)?"
    found = re.fullmatch(form, text.strip().lower(), flags=re.ASCII)
    if found is None:
        raise ValueError(
            f"{option}: got {text[:80]!r}, expected a size with its unit, such as 141GiB or 24GB"
        )
    return round(float(found[1]) * UNITS[found[2] or ""])


def read_tokens(text: str, option: str) -> int:
    """A count such as "4096", "32k" or "1m", in steps of 1024."""
    found = re.fullmatch(r"(\d{1,9})([km]?)", text.strip().lower(), flags=re.ASCII)
    if found is None or int(found[1]) < 1:
        raise ValueError(f"{option}: got {text[:80]!r}, expected a count such as 4096 or 32k")
    return int(found[1]) * UNITS[f"{found[2]}i" if found[2] else ""]


def show_bytes(size: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        unit = UNITS[name[0].lower() + "i"]
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"
