"""Train from Python, without the command line. Needs the model and data of examples/quickstart.sh, and a minute."""

from grpo_mega import Config, start

TASK = "runs/quickstart/task"
start(
    Config(
        run_dir="runs/from_python",
        steps=4,
        model={"path": f"{TASK}/sft/hf"},
        data={"train": f"{TASK}/train.jsonl", "max_prompt_length": 32},
        rollout={"max_response_length": 48},
        rewards={"functions": [{"name": "accuracy"}, {"name": "format", "weight": 0.5}]},
    )
)
