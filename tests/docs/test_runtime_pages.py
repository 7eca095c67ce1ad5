"""Pages about the runtime show code that runs, block after block as one reads it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["composition", "graphs", "prefix-cache", "speculation", "tensor-parallel"]


def run(page: str) -> subprocess.CompletedProcess[str]:
    """Run a page's blocks as one program, from the repository root."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_their_order_and_print_what_it_quotes(page: str) -> None:
    """A comment behind `print(error)` is the text, its dots apart."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    quoted = re.findall(r"print\(error\)  # (.+)", text)
    done = run(page)
    assert done.returncode == 0, done.stderr
    for line, quote in zip(done.stdout.splitlines(), quoted, strict=True):
        assert re.fullmatch(re.escape(quote).replace(r"\.\.\.", ".*"), line), line
