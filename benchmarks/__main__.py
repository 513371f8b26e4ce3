"""Every benchmark, one after the other: ``python -m benchmarks [NAME …] [--out build/bench]``.

Each prints JSON, which goes to ``OUT/NAME.json``; one that fails or misses its goal does not stop the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

NAMES = (
    "rpc",
    "rpc_scale",
    "kvt_plan",
    "kvt",
    "kvt_interference",
    "kvt_overlap",
    "control",
    "handoff",
    "rapid_transfer",
)


def main() -> int:
    folder = Path(__file__).parent
    there = [n for n in NAMES if (folder / f"{n}.py").is_file()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(there)}; default: all"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), help="folder of the results"
    )
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(there))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(there)}")
    args.out.mkdir(parents=True, exist_ok=True)
    worst = 0
    for name in args.names or there:
        print(f"{name:18}", end="", flush=True)
        began = time.monotonic()
        result = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", "--json"], capture_output=True, text=True
        )
        took_s = time.monotonic() - began
        (args.out / f"{name}.json").write_text(result.stdout)
        verdict = "goals met" if result.returncode == 0 else f"exit status {result.returncode}"
        print(f"{verdict:18} {took_s:6.0f} s  {args.out / f'{name}.json'}")
        if result.returncode:
            worst = 1
            print("".join(f"    {line}\n" for line in result.stderr.splitlines()[-5:]), end="")
    return worst


if __name__ == "__main__":
    sys.exit(main())
