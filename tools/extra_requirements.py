"""Print the requirements of one extra of pyproject.toml, one a line.

The Makefile installs an extra by its requirements rather than by ``pip install -e .[extra]``, which
would rebuild the native core each time.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # the project's own tomli is not installed yet when this runs
    from pip._vendor import tomli as tomllib


def main() -> int:
    extra = sys.argv[1]
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())[
        "project"
    ]
    extras = project["optional-dependencies"]
    if extra not in extras:
        print(f"no extra {extra!r}; there are: {', '.join(sorted(extras))}", file=sys.stderr)
        return 1
    print("\n".join(extras[extra]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
