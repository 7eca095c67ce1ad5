"""Time `hal check` and `hal --help` as whole processes, beside the bare interpreter.

Run: python benchmarks/check_cli.py [runs] [config]. The aim is a median under 250 ms for both.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path
from statistics import median
from time import perf_counter

LIMIT_MS = 250
CONFIG = Path(__file__).parents[1] / "tests" / "data" / "configs" / "real" / "lfm2-350m.json"


def elapsed_ms(command: list[str]) -> float:
    began = perf_counter()
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return (perf_counter() - began) * 1000


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    config = sys.argv[2] if len(sys.argv) > 2 else str(CONFIG)
    hal = str(Path(sysconfig.get_path("scripts")) / "hal")
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import hal'": [sys.executable, "-c", "import hal"],
        "hal check (refused)": [hal, "check", config, "--device", "npu"],
        "hal check (fits)": [hal, "check", config, "--device", "cpu"],
        "hal --help": [hal, "--help"],
    }
    late = False
    print(f"{'':24}{'median':>8}{'best':>8}  ms, {runs} runs")
    for name, command in commands.items():
        times = [elapsed_ms(command) for _ in range(runs)]
        late |= median(times) > LIMIT_MS
        print(f"{name:24}{median(times):8.0f}{min(times):8.0f}")
    print(f"{'over' if late else 'under'} the limit of {LIMIT_MS} ms")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
