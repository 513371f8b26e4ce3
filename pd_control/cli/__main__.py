"""The entry point: says what to install if the command line's libraries are missing."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from pd_control.cli.app import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "aiohttp"):
            raise
        print(f"pdctl needs {error.name}: pip install 'pd-control[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # in the second in which everything is imported
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
