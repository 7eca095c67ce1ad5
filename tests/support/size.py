"""Print lines of source by part beside their budgets; a table to look at, not a gate."""

import ast
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
BUDGETS = {
    "hal (core)": 4000,
    "hal/bench": 1500,
    "hal/model": 1500,
    "hal/integrations": 1500,
    "hal/testing": 1500,
    "registry": 700,
    "backends/cpu": 1500,
    "backends/triton": 1500,
    "backends/cuda": 1500,
    "backends/rocm": 1500,
    "backends/npu": 1500,
}
PARTS = ("hal/bench", "hal/model", "hal/integrations", "hal/testing")


def files(part: str) -> list[Path]:
    """The Python files of a part; the core is what is left of `hal`."""
    if part == "hal (core)":
        inside = {path for name in PARTS for path in (ROOT / name).rglob("*.py")}
        return [path for path in (ROOT / "hal").rglob("*.py") if path not in inside]
    return [path for path in (ROOT / part).rglob("*.py") if "build" not in path.parts]


def code_lines(source: str) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(
        1
        for number, line in lines
        if line.strip() and line.strip()[0] != "#" and number not in skipped
    )


def functions(source: str) -> list[int]:
    """Lengths of all functions, in lines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes]


def main() -> None:
    """One row a part."""
    print(f"{'part':18} {'files':>5} {'lines':>6} {'code':>6} {'budget':>6}  function median / p90")
    for part, budget in BUDGETS.items():
        sources = [path.read_text() for path in files(part)]
        raw = sum(source.count("\n") for source in sources)
        code = sum(map(code_lines, sources))
        sizes = sorted(size for source in sources for size in functions(source)) or [0]
        p90 = sizes[int(len(sizes) * 0.9)] if len(sizes) > 1 else sizes[0]
        print(
            f"{part:18} {len(sources):5} {raw:6} {code:6} {budget:6}  {median(sizes):.0f} / {p90}"
        )


if __name__ == "__main__":
    main()
