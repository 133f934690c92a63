"""Packages of other projects, with which benchmarks compare."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def require(*packages: str) -> None:
    """Exit with code 2 and one line if one of the packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        print(f"{', '.join(missing)} must be installed; run .venv/bin/pip install -e '.[peers]'", file=sys.stderr)
        raise SystemExit(2)
