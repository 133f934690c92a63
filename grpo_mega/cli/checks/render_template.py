"""A program that renders the chat template from stdin within limits of CPU time and memory. Imports nothing of the
package.

The exit code is 0 if it ends, also if the template refuses the messages. Otherwise it is OUT_OF_MEMORY, or the signal
of the limit. With the argument "tools" it is WITHOUT_TOOLS if the template does not write the tools of a request.
"""

import json
import resource
import sys
from typing import Any

CPU_SECONDS = 3
MEMORY_BYTES = 1 << 30
OUT_OF_MEMORY, WITHOUT_TOOLS = 3, 4
_QUESTION = {"role": "user", "content": "question"}
_TOOL = {"name": "qzxvtool", "description": "Do it.", "parameters": {"type": "object", "properties": {}}}
_CONVERSATIONS = [[_QUESTION], [_QUESTION, {"role": "assistant", "content": "answer"}]]


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = json.load(sys.stdin)
    tools = [{"type": "function", "function": _TOOL}] if sys.argv[1:] == ["tools"] else None
    try:
        text = render(template, ImmutableSandboxedEnvironment, tools)
    except (MemoryError, RecursionError):
        return OUT_OF_MEMORY
    except Exception:  # the ranks report it, with the row
        return 0 if tools is None else WITHOUT_TOOLS
    return WITHOUT_TOOLS if tools and str(_TOOL["name"]) not in text else 0


def render(template: str, environment_type: Any, tools: Any) -> str:
    """Render all conversations like transformers. Return the texts."""
    environment = environment_type(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: form}
    compiled = environment.from_string(template)
    texts = [
        compiled.render(messages=messages, tools=tools, documents=None, add_generation_prompt=len(messages) == 1)
        for messages in _CONVERSATIONS
    ]
    return "".join(texts)


def _raise(message: str) -> None:
    raise ValueError(message)


if __name__ == "__main__":
    sys.exit(main())
