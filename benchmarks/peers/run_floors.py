"""The floors as a runner like the others: ``run_floors.py BINARY {tcp|cma|memcpy}``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common


def main() -> None:
    binary, mode = sys.argv.pop(1), sys.argv.pop(1)
    options = common.arguments()
    for piece, num in options.pieces:
        command = [binary, mode, str(piece), str(num), str(options.min_s)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:  # it compares the bytes itself
            common.report_failure(piece, num, done.stderr.strip())
        else:
            common.report(piece, num, json.loads(done.stdout)["seconds"], True)


if __name__ == "__main__":
    main()
