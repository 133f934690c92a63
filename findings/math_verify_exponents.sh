#!/usr/bin/env bash
# math-verify 0.9.0 reads the plain numbers 1e-3 and 10^{-3} as 1 and 10, so a wrong answer is verified.
#
# `parse` extracts LaTeX and plain expressions by default. Expected: 1e-3 is 0.001 or nothing. The exponent is cut off, and `verify` then
# says that 1e-3 equals 1 and differs from 0.001. A model that is trained with this verdict learns to avoid such answers.
#
# Seen on 2026-11-28:
#   1e-3        parsed as 1  equals 0.001: False, equals 1: True
#   2.5e-4      parsed as 2.50000000000000  equals 0.00025: False, equals 2.5: True
#   10^{-3}     parsed as 10  equals 0.001: False, equals 10: True
#   $10^{-3}$   parsed as 10**(-3)  equals 0.001: True, equals 10: False
set -euo pipefail

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.11}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check math-verify==0.9.0

"$work/venv/bin/python" - 2> "$work/log" <<'PYTHON'
import sys

from math_verify import parse, verify

CASES = [  # answer, its value, what is left without the exponent, is it read right
    ("1e-3", "0.001", "1", False),
    ("2.5e-4", "0.00025", "2.5", False),
    ("10^{-3}", "0.001", "10", False),
    ("$10^{-3}$", "0.001", "10", True),
]
is_as_seen = True
for answer, value, cut, is_right in CASES:
    parsed = parse(answer)
    verdicts = [verify(parse(f"${gold}$"), parsed) for gold in (value, cut)]
    print(f"{answer:11} parsed as {parsed[0]}  equals {value}: {verdicts[0]}, equals {cut}: {verdicts[1]}")
    is_as_seen &= verdicts == [is_right, not is_right]
if not is_as_seen:
    sys.exit("changed: math-verify reads these numbers in another way")
PYTHON
