"""A program that renders the chat template from stdin within limits of CPU time and memory. Imports nothing of the
package.

The exit code is 0 if it ends, also if the template refuses the messages. Otherwise it is OUT_OF_MEMORY, or the signal
of the limit.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

CPU_SECONDS = 3
MEMORY_BYTES = 1 << 30
OUT_OF_MEMORY = 3
_QUESTION = {"role": "user", "content": "question"}
_CONVERSATIONS = [[_QUESTION], [_QUESTION, {"role": "assistant", "content": "answer"}]]


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = json.load(sys.stdin)
    try:
        render(template, ImmutableSandboxedEnvironment)
    except (MemoryError, RecursionError):
        return OUT_OF_MEMORY
    except Exception:  # the ranks report it, with the row
        return 0
    return 0


def render(template: str, environment_type: Any) -> None:
    """Render like transformers."""
    environment = environment_type(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: form}
    compiled = environment.from_string(template)
    for messages in _CONVERSATIONS:
        compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=len(messages) == 1)


def _raise(message: str) -> None:
    raise ValueError(message)


if __name__ == "__main__":
    sys.exit(main())
