"""The calculator example through the unmodified `openai` package: an agent function with its own tool.

    examples/calculator.yaml with --set rollout.tools=[] --set rollout.agent=openai_agent.run

Any client or harness for OpenAI's API works in the same way. It only needs the base URL and the key of the sample.
"""

from __future__ import annotations

import json
from typing import Any

from calculator import calculate
from openai import AsyncOpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Two numbers with * between them."}},
            "required": ["expression"],
        },
    },
}


async def run(chat: Any, prompt: Any) -> float:
    """Answer calls until a turn has none. Return 1 if the answer is right, else 0."""
    messages = list(prompt.messages)
    async with AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0) as client:
        for _ in range(3):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            message = completion.choices[0].message
            if not message.tool_calls:
                return float(f"<answer>{prompt.answer}</answer>" in (message.content or ""))
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": _result(call)} for call in message.tool_calls
            ]
    return 0.0


def _result(call: Any) -> str:
    try:
        return str(calculate(**json.loads(call.function.arguments)))
    except (TypeError, ValueError) as error:
        return f"Error: {error}"
