"""Agents and tools that are refused before a run starts, and the schemas that the model sees."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.cli.checks.tokenizer import check_tokenizer_files, takes_tools
from grpo_mega.config.rollout import RolloutConfig
from grpo_mega.data.chat import Renderer
from grpo_mega.errors import with_error
from grpo_mega.rollout.sessions.tool_schemas import agent_problems, tool_schemas

HERE = Path(__file__).resolve().parents[1] / "rollout" / "sessions"
HERMES = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


def problems(**keys: Any) -> list[str]:
    return list(with_error(agent_problems(RolloutConfig.model_validate(keys), HERE)))


def test_good_agents_and_tools_have_no_problems() -> None:
    assert problems() == []
    assert problems(agent="agent_functions.run") == []
    assert problems(tools=["agent_functions.add", "agent_functions.py:add_later"]) == []


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"agent": "run"}, "rollout.agent='run': must be the name of a function; write it like "),
        ({"tools": ["lookup"]}, "rollout.tools='lookup': must be the name of a function, or of python; write it like "),
        ({"agent": "no_module.run"}, "rollout.agent='no_module.run': there is no module no_module to import; "),
        ({"agent": "agent_functions.no"}, "rollout.agent='agent_functions.no': agent_functions has no function no; "),
        ({"agent": "agent_functions.not_async"}, "rollout.agent='agent_functions.not_async': must be a coroutine fu"),
        ({"agent": "agent_functions.never"}, "rollout.agent='agent_functions.never': must take chat and prompt ("),
        ({"tools": ["agent_functions.undocumented"]}, "rollout.tools='agent_functions.undocumented': has no JSON sch"),
        (
            {"tools": ["agent_functions.add", "agent_functions.py:add"]},
            "rollout.tools: two functions are called add; rename one",
        ),
        ({"agent": "broken_agent.run"}, "rollout.agent='broken_agent.run': importing broken_agent failed with ZeroDiv"),
    ],
)
def test_bad_agents_and_tools_are_refused_in_one_line(keys: dict[str, Any], problem: str) -> None:
    (found,) = problems(**keys)
    assert found.startswith(problem)
    assert "\n" not in found


def test_schemas_have_types_and_descriptions_in_the_order_of_the_tools() -> None:
    rollout = RolloutConfig.model_validate({"tools": ["agent_functions.add", "agent_functions.misbehave", "python"]})
    added, misbehave, python = (schema["function"] for schema in tool_schemas(rollout, HERE))
    assert added["name"] == "add" and added["description"] == "Add two numbers."
    assert added["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first number."}
    assert "return" not in added
    assert (misbehave["name"], python["name"]) == ("misbehave", "python")
    assert list(python["parameters"]["properties"]) == ["code"]


def test_a_template_that_does_not_write_tools_is_refused(tmp_path: Path) -> None:
    assert takes_tools(HERMES) and not takes_tools(HERMES.replace("tools", "documents"))
    assert not takes_tools("{{ raise_exception('no') }}")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    check_tokenizer_files(tmp_path, 1)
    with pytest.raises(Exception, match=r"rollout.tools: the chat template of model.path=.* does not write tools"):
        check_tokenizer_files(tmp_path, 1, has_tools=True)


def test_prompts_are_rendered_with_the_tools() -> None:
    class Tokenizer:
        chat_template = "t"

        def apply_chat_template(self, messages: Any, tools: Any, **_: Any) -> str:
            return json.dumps(tools) + "".join(message["content"] for message in messages)

    tools = [{"function": {"name": "f"}}]
    assert Renderer(Tokenizer(), tools).render([{"role": "user", "content": "q"}], "x").startswith(json.dumps(tools))
    assert Renderer(Tokenizer()).render([{"role": "user", "content": "q"}], "x") == "nullq"
