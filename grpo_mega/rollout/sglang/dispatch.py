"""One replica's part of a generation phase: takes prompts while it has room, and collects their samples.

Prompts are numbered by a counter that all replicas share. A replica starts no more groups than its fair share of all at once,
so that the first to come does not take everything, and takes further ones as its own end.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping

from grpo_mega.rollout.engine import OnSample, Sampling, Until
from grpo_mega.rollout.sglang.client import Aborted
from grpo_mega.rollout.sglang.link import LOOK_S, ServerLink
from grpo_mega.types import Group, Prompt

ASK_S = 0.05  # between looks at whether other replicas have finished enough


def drive(
    link: ServerLink,
    prompts: Mapping[int, Prompt],
    sampling: Sampling,
    step: int,
    *,
    take: Callable[[], int],
    most_groups: int,
    on_sample: OnSample,
    until: Until | None = None,
) -> dict[int, Group]:
    """The groups that this replica finished, by key. `take` gives the next number of the shared counter.

    Once `until` is reached, what is under way is aborted, and the server is idle with an empty cache. If the server fails, also
    while it aborts, `link.failure` is set and groups are missing: those under way, of which nothing is kept.
    """
    phase, keys = f"sampling in step {step}", list(prompts)
    under_way: dict[int, Group] = {}
    finished: dict[int, Group] = {}
    has_more = True
    began = heard = time.monotonic()
    while link.failure is None:
        if until is not None and until.is_reached():
            _abort(link, f"aborting stragglers in step {step}", under_way, sampling.group_size, until)
            return finished
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
            event = link.client.events.get(timeout=LOOK_S if until is None else ASK_S)
        except queue.Empty:
            heard = link.check_alive(phase, heard, began)
            continue
        heard = time.monotonic()
        assert not isinstance(event, Aborted), "nothing is aborted yet"
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
            if until is not None:
                until.done(event.key)
    return finished


def _abort(link: ServerLink, phase: str, under_way: Mapping[int, Group], group_size: int, until: Until) -> None:
    """Ends the groups under way, and says what there was of them; nothing is said if the server fails meanwhile."""
    if not under_way:
        return
    lengths = {key: [sample.response_len for sample in group.samples] for key, group in under_way.items()}
    waiting = set(under_way)
    began, client = time.monotonic(), link.client
    client.is_ending = True
    while waiting and link.failure is None:
        # More than once: a request may reach the server after it has aborted all that it had.
        link.attempt(phase, lambda api: api.abort_all())
        pause_ends = time.monotonic() + LOOK_S
        while waiting and (seconds := pause_ends - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = client.events.get(timeout=seconds)
                if isinstance(event, Aborted):
                    lengths[event.key] += event.lengths
                    waiting.discard(event.key)
                elif event.sample is None:
                    link.fail(f"{phase}: {event.error}")
                    waiting.clear()
                else:
                    lengths[event.key].append(event.sample.response_len)
                    if len(lengths[event.key]) == group_size:
                        waiting.discard(event.key)
        if waiting and time.monotonic() - began > link.stall_deadline_s:
            link.fail(f"{phase}: {len(waiting)} groups do not end")
    link.attempt(phase, lambda api: api.flush_cache_when_idle())
    client.is_ending = False
    if link.failure is None:
        for key, found in lengths.items():
            until.aborted(key, found)
