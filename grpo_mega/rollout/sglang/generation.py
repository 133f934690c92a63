"""One replica's part of a generation phase: takes prompts while it has room, and collects their samples.

Prompts are numbered by a counter that all replicas share. A replica starts no more groups than its fair share of all at once,
so that the first to come does not take everything, and takes further ones as its own end.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping

from grpo_mega.rollout.engine import OnSample, Sampling
from grpo_mega.rollout.sglang.link import LOOK_S, ServerLink
from grpo_mega.types import Group, Prompt


def drive(
    link: ServerLink,
    prompts: Mapping[int, Prompt],
    sampling: Sampling,
    step: int,
    *,
    take: Callable[[], int],
    most_groups: int,
    on_sample: OnSample,
) -> dict[int, Group]:
    """The groups that this replica finished, by key. `take` gives the next number of the shared counter.

    If the server fails, `link.failure` is set and groups are missing: those under way, of which nothing is kept.
    """
    phase, keys = f"sampling in step {step}", list(prompts)
    under_way: dict[int, Group] = {}
    finished: dict[int, Group] = {}
    has_more = True
    began = heard = time.monotonic()
    while link.failure is None:
        while has_more and len(under_way) < most_groups:
            number = take()
            has_more = number < len(keys)
            if has_more:
                key = keys[number]
                under_way[key] = Group(prompts[key], [])
                link.client.sample(key, prompts[key], sampling, step)
        if not under_way:
            return finished
        try:
            event = link.client.events.get(timeout=LOOK_S)
        except queue.Empty:
            heard = link.check_alive(phase, heard, began)
            continue
        heard = time.monotonic()
        if event.sample is None:
            link.fail(f"{phase}: {event.error}")
            break
        group = under_way[event.key]
        group.samples.append(event.sample)
        on_sample(event.sample)
        if len(group.samples) == sampling.group_size:
            group.samples.sort(key=lambda s: s.index)
            finished[event.key] = group
            del under_way[event.key]
    return finished
