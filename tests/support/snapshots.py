"""Compare a text with a file of the repository, or write the file anew."""

import os
from pathlib import Path


def check_snapshot(path: Path, text: str) -> None:
    """Hold `text` against the file exactly; HAL_SNAPSHOTS=write makes the file instead."""
    if os.environ.get("HAL_SNAPSHOTS") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path.name} is missing: run with HAL_SNAPSHOTS=write"
    assert text == path.read_text(encoding="utf-8"), f"{path.name} differs: HAL_SNAPSHOTS=write"
