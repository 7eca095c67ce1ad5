"""Tables of block sizes as files: `hal tune` writes one, `HAL_TRITON_TABLE` names one to use.

A file is for one arch, and what it leaves out is the shipped table's. Nothing reads one unasked.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from hal.errors import HalError
from hal_triton.tuning import UNBOUNDED, Config, Table

VARIABLE: Final = "HAL_TRITON_TABLE"
SCHEMA: Final = 1
MOST_REGISTERS: Final = 255
"""What a thread can have at most."""

LOGGER: Final = "hal.triton"
_FIELDS: Final = ("up_to", *(field.name for field in fields(Config)))
_LATER: Final = {"registers": 0}
"""Fields that files before them lack."""
_CHOICES: Final[Mapping[str, Sequence[int]]] = {"CONSUMERS": (1, 2), "PREPARED": (0, 1)}
"""Blocks that are no sizes of tiles, and what they can be."""

_FREE: Final = frozenset({"SEG"})
"""Blocks that are numbers of tokens."""


class TableError(HalError, ValueError):
    """A table file that cannot be used; the text names the file, the entry and the fix."""


def given(table: Table, arch: str) -> Table:
    """The shipped table of an arch, under the file that the environment names, if it names one."""
    path = os.environ.get(VARIABLE, "")
    if not path:
        return table
    found = read(Path(path), arch, table)
    logging.getLogger(LOGGER).info("%s: %d entries of %s for %s", VARIABLE, len(found), path, arch)
    return {**table, **found}


def notes() -> tuple[str, ...]:
    """What a probe tells of the table that the environment names, if it names one."""
    path = os.environ.get(VARIABLE, "")
    return (f"{VARIABLE} names {path}, whose block sizes replace shipped ones",) if path else ()


def document(table: Table, arch: str, made: Mapping[str, object]) -> dict[str, object]:
    """A table as plain data; `made` says where and with what."""
    return {
        "schema": SCHEMA,
        "arch": arch,
        "made": dict(made),
        "table": {name: [_plain(*entry) for entry in entries] for name, entries in table.items()},
    }


def read(path: Path, arch: str, shipped: Table) -> Table:
    """The entries of a file for an arch."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: {error}; give a file that `hal tune` wrote") from error
    return parse(str(path), found, arch, shipped)


def parse(path: str, found: Any, arch: str, shipped: Table) -> Table:
    """The entries of a document, each of a name that the shipped table has, with its blocks."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise TableError(f"{path}: expected a table of schema {SCHEMA}; make it with `hal tune`")
    if found.get("arch") != arch:
        raise TableError(
            f"{path} is of arch {found.get('arch')!r}, the device is {arch!r}; run `hal tune` "
            f"there, or unset {VARIABLE}"
        )
    entries = found.get("table")
    if not isinstance(entries, dict):
        raise TableError(f"{path}: table is {entries!r:.80}, expected entries by name")
    return {name: tuple(_entry(path, name, arch, each, shipped)) for name, each in entries.items()}


def code(table: Table) -> Iterator[str]:
    """A table as lines of Python, for the tables that a distribution ships."""
    for name, entries in table.items():
        yield f'    "{name}": ('
        yield from (f"        ({_limit(limit)}, {config!r})," for limit, config in entries)
        yield "    ),"


def _limit(limit: float) -> str:
    return "UNBOUNDED" if limit == UNBOUNDED else f"{limit:g}"


def _plain(limit: float, config: Config) -> dict[str, object]:
    up_to = None if limit == UNBOUNDED else int(limit)
    held = {field: getattr(config, field) for field in _FIELDS[1:]}
    return {"up_to": up_to, **held, "blocks": dict(config.blocks)}


def _entry(
    path: str, name: str, arch: str, entries: Any, shipped: Table
) -> Iterator[tuple[float, Config]]:
    """One name's configurations, in rising order of what they are for."""
    if name not in shipped:
        raise TableError(f"{path}: {name} is no name of a table; known are {', '.join(shipped)}")
    if not isinstance(entries, list) or not entries:
        raise TableError(f"{path}: {name} is {entries!r:.80}, expected a list of configurations")
    least: float = 0
    for number, each in enumerate(entries):
        limit, config = _config(path, name, arch, each, _known(name, shipped))
        last = number == len(entries) - 1
        if limit <= least or (limit == UNBOUNDED) is not last:
            raise TableError(f"{path}: up_to of {name} has to rise, and be null in the last alone")
        least = limit
        yield limit, config


def _known(name: str, shipped: Table) -> tuple[set[str], set[str]]:
    """The blocks that an entry has to have, and those that it may have."""
    from hal_triton.tune.candidates import CANDIDATES

    configs = [config for _, config in shipped[name]]
    needed = set.intersection(*(set(config.blocks) for config in configs))
    tried: Sequence[Config] = CANDIDATES.get(name, ())
    return needed, set().union(*(config.blocks for config in (*configs, *tried)))


def _fits(block: str, value: int) -> bool:
    """Whether a kernel can be made with this size."""
    if block in _CHOICES:
        return value in _CHOICES[block]
    return block in _FREE or value.bit_count() == 1


def _shown(block: str) -> str:
    choices = _CHOICES.get(block)
    return " or ".join(map(str, choices)) if choices else "a power of two"


def _config(
    path: str, name: str, arch: str, each: Any, known: tuple[set[str], set[str]]
) -> tuple[float, Config]:
    """One configuration, every number of which is a positive integer."""
    if not isinstance(each, dict) or {*_LATER, *each} != set(_FIELDS):
        raise TableError(f"{path}: an entry of {name} is {each!r:.80}, expected {_FIELDS}")
    given = {**_LATER, **each}
    up_to, blocks, warps, stages, evict, registers = (given[field] for field in _FIELDS)
    needed, may = known
    if not isinstance(blocks, dict) or not needed <= set(blocks) <= may:
        raise TableError(f"{path}: blocks of {name} are {blocks!r:.80}, expected {sorted(needed)}")
    counts = [*((value, 0) for value in blocks.values()), (warps, 1), (stages, 1), (registers, 0)]
    counts += [] if up_to is None else [(up_to, 1)]
    if not all(type(value) is int and value >= bound for value, bound in counts):
        raise TableError(f"{path}: {name} has {each!r:.200}, expected positive whole numbers")
    for block, value in (*blocks.items(), ("warps", warps)):
        if not _fits(block, value):
            raise TableError(f"{path}: {block} of {name} is {value}, expected {_shown(block)}")
    if evict not in ("", "evict_first"):
        raise TableError(f"{path}: evict of {name} is {evict!r}, expected '' or 'evict_first'")
    if registers > MOST_REGISTERS:
        most = f"at most {MOST_REGISTERS}, and 0 for no limit"
        raise TableError(f"{path}: registers of {name} is {registers}, expected {most}")
    if registers and not arch.startswith("sm_"):
        raise TableError(
            f"{path}: {name} has registers {registers}, which {arch} cannot limit; give 0"
        )
    config = Config(dict(blocks), warps, stages, evict, registers)
    return (UNBOUNDED if up_to is None else up_to), config
