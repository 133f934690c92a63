"""Mistakes with teachers: name, words of the error, --set arguments, and the Spoil of a working run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.models import make_model, save_checkpoint
from tests.helpers.spoil import Spoil, all_of, model, remove, rows


def teacher(**fields: Any) -> Spoil:
    """Create a teacher with three layers next to the model."""

    def make(folder: Path) -> None:
        save_checkpoint(make_model("llama", num_hidden_layers=3, **fields), folder / "other")

    return make


def retokenize(name: str, **ids: int) -> Spoil:
    """Change token ids in a tokenizer.json."""

    def edit(folder: Path) -> None:
        tokenizer = json.loads((folder / name).read_text())
        tokenizer["model"]["vocab"] |= ids
        (folder / name).write_text(json.dumps(tokenizer))

    return edit


OPD = "algorithm={recipe: opd, group_size: 2}"
OTHER = (OPD, "teachers={a: {path: other}}")
NO_TOKENS = remove("other/tokenizer.json", "other/tokenizer_config.json")

TEACHER_CASES: list[tuple[Any, ...]] = [
    ("teacher alone", ("distill_beta=1.0 needs teachers", "set for example"), ("algorithm.recipe=opd",)),
    ("teacher unused", ("teachers=a needs", "distill_beta > 0"), ("teachers={a: {path: model}}",)),
    ("teacher missing", ("teachers.a.path=/none", "name the folder"), (OPD, "teachers={a: {path: /none}}")),
    (
        "teacher of another tokenizer",
        (
            "teachers.a.path=other: must have the tokenizer of model.path=model, but 'Ċ' is 7 there and 101 here",
            "name a",
        ),
        OTHER,
        all_of(teacher(), retokenize("other/tokenizer.json", Ċ=7)),
    ),
    (
        "teacher of a larger tokenizer",
        ("teachers.a.path=other", "'zz' is 102 there and missing here", "name a"),
        OTHER,
        all_of(teacher(vocab_size=105), retokenize("other/tokenizer.json", zz=102)),
    ),
    (
        "teacher of fewer rows",
        ("teachers.a.path=other: must have the vocabulary", "102 there and 110 here", "name a larger"),
        (*OTHER, "model.init=random"),
        all_of(teacher(), model(vocab_size=110)),
    ),
    (
        "teacher without tokenizer",
        ("teachers.a.path=other holds no tokenizer", "copy"),
        OTHER,
        all_of(teacher(), NO_TOKENS),
    ),
    ("teacher layout", ("teachers.a.path=other: layout.pp=4", "has 3 layers"), (*OTHER, "layout.pp=4"), teacher()),
    (
        "teachers without a column",
        ("teachers=a, b needs data.teacher_column", "set it"),
        (OPD, "teachers={a: {path: model}, b: {path: model}}"),
    ),
    (
        "teacher with dynamic sampling",
        ("dynamic_sampling_tries=2 conflicts with algorithm.distill_beta=1.0", "leave"),
        (*OTHER, "algorithm.dynamic_sampling_tries=2"),
    ),
    (
        "teacher with whitening",
        ("algorithm.normalize_advantages=true conflicts with algorithm.adv_type=none", "leave"),
        (*OTHER, "algorithm.normalize_advantages=true"),
    ),
    (
        "teacher with covariance",
        ("conflicts with algorithm.loss_type=clip_cov", "use actor"),
        (*OTHER, "algorithm.loss_type=clip_cov"),
    ),
    (
        "teacher on a server at another temperature",
        ("rollout.temperature=0.8 conflicts with a teacher's url of http://127.0.0.1:9", "leave temperature out"),
        (OPD, "teachers={a: {path: model, url: 'http://127.0.0.1:9'}}", "rollout.temperature=0.8"),
    ),
    (
        "teacher on a server for the whole vocabulary",
        ("algorithm.distill_kl=forward conflicts with a teacher's url", "leave distill_kl out"),
        (OPD, "teachers={a: {path: model, url: 'http://127.0.0.1:9'}}", "algorithm.distill_kl=forward"),
    ),
    (
        "teacher on no server",
        ("teachers.a.url=http://127.0.0.1:9: no SGLang server answers", "start it"),
        (OPD, "teachers={a: {path: model, url: 'http://127.0.0.1:9'}}"),
        None,
        True,
    ),
    (
        "a row of another teacher",
        ("train.jsonl", "teacher='c' names no teacher", "use one of a, b"),
        (OPD, "teachers={a: {path: model}, b: {path: model}}", "data.teacher_column=teacher"),
        rows(*({"prompt": "1+1=?", "answer": "2", "teacher": name} for name in "abc")),
    ),
    (
        "a row of another teacher in a nested column",
        ("train.jsonl:3", "info.teacher='c' names no teacher", "use one of a, b"),
        (OPD, "teachers={a: {path: model}, b: {path: model}}", "data.teacher_column=info.teacher"),
        rows(*({"prompt": "1+1=?", "answer": "2", "info": {"teacher": name}} for name in "abc")),
    ),
    (
        "a row without the teachers' nested column",
        ("train.jsonl:2", "info.teacher=None names no teacher", "use one of a, b"),
        (OPD, "teachers={a: {path: model}, b: {path: model}}", "data.teacher_column=info.teacher"),
        rows(*({"prompt": "1+1=?", "answer": "2", "info": info} for info in ({"teacher": "b"}, {"name": "b"}))),
    ),
    (
        "no advantages",
        ("algorithm.adv_type=none", "distill_beta; set it"),
        ("algorithm={adv_type: none, group_size: 2}",),
    ),
]
