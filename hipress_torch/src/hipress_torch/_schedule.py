"""The makespan of a backward pass with its exchanges, and the choices that make it short.

One link carries one message at a time, in the order in which messages become ready. The thread of
the backward pass encodes; two workers merge and decode. What workers and the network stack compute
takes cores from the backward pass in the measured proportion (``Profile.contention``).
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hipress_torch._codec import Codec

if TYPE_CHECKING:
    from hipress_torch._plan import Choice, Plan

# A choice that promises less than this share of the whole is not worth a change.
WORTH = 0.01
# Nor is compression that promises less than this share of a step: what threads wait for a core,
# which no term holds, may take as much.
WORTH_OF_STEP = 0.05


def makespan(
    plan: "Plan",
    backward: Sequence[tuple[int, float]],
    choices: Sequence["Choice"],
    codecs: Mapping[str, Codec],
) -> float:
    """Returns the seconds from the first bucket to the last mean.

    Args:
        plan: what was measured.
        backward: elements of each bucket, and the seconds of backward pass before it.
        choices: what is done with each.
        codecs: the codecs by name.
    """
    profile = plan.profile
    n, collectives = profile.ranks, profile.collectives
    now = owed = 0.0
    # (ready, order, hop seconds, merge seconds, gather seconds, decode seconds)
    jobs: list[tuple[float, int, float, float, float, float]] = []
    for (elements, gap), choice in zip(backward, choices, strict=True):
        now += gap + profile.contention * owed
        owed = 0.0
        if choice.codec == "none":
            size = 4.0 * elements
            jobs.append((now, len(jobs), collectives["all_reduce"](size), 0.0, 0.0, 0.0))
            owed += profile.busy_s("all_reduce", size)
            continue
        parts = max(1, round(elements / choice.part_elements))
        m = elements / parts
        wire = codecs[choice.codec].wire_bytes(max(1, int(m / n)))
        s = plan.stages(m, codecs[choice.codec], choice.ring)
        network = profile.busy_s("all_gather", wire)
        if choice.ring and "hop" in collectives:
            network += (n - 1) * profile.busy_s("hop", wire)
        else:
            network += profile.busy_s("all_to_all", wire * (n - 1))
        for _ in range(parts):
            now += s.encode
            jobs.append((now, len(jobs), s.scatter, s.merge, s.gather, s.decode))
            owed += s.merge + s.decode + network
    return max(now, _last(jobs))


def _last(jobs: list[tuple[float, int, float, float, float, float]]) -> float:
    """Returns when the last message is decoded."""
    heapq.heapify(jobs)
    link = merging = decoding = end = 0.0
    while jobs:
        ready, order, hop, merge, gather, decode = heapq.heappop(jobs)
        link = max(link, ready) + hop
        if gather:
            merging = max(merging, link) + merge
            heapq.heappush(jobs, (merging, order, gather, 0.0, 0.0, decode))
        else:
            decoding = max(decoding, link) + decode
            end = max(end, decoding)
    return end


def schedule(
    plan: "Plan", backward: Sequence[tuple[int, float]], codecs: Mapping[str, Codec]
) -> "tuple[Choice, ...]":
    """Returns a choice for each bucket: better than any change of one of them, and of all alike.

    Plain all-reduce for all, if what is better would not be worth it.

    Args:
        plan: what was measured.
        backward: elements of each bucket, and the seconds of backward pass before it.
        codecs: the codecs by name.
    """
    options = [plan.options(elements, codecs) for elements, _ in backward]
    names = list(dict.fromkeys(c.codec for some in options for c in some))
    # Start from what is best for each bucket alone, and from every codec for all.
    starts = [[min(some, key=lambda c: c.seconds) for some in options]]
    for name in names:
        of_name = [[c for c in some if c.codec == name] for some in options]
        starts.append([min(some, key=lambda c: c.seconds) for some in of_name])
    best = min(starts, key=lambda s: makespan(plan, backward, s, codecs))
    shortest = makespan(plan, backward, best, codecs)
    improved = True
    while improved:
        improved = False
        for i, some in enumerate(options):
            for option in some:
                tried = [*best[:i], option, *best[i + 1 :]]
                took = makespan(plan, backward, tried, codecs)
                if took < shortest * (1 - WORTH):
                    best, shortest, improved = tried, took, True
    plain = [next(c for c in some if c.codec == "none") for some in options]
    if makespan(plan, backward, plain, codecs) - shortest < WORTH_OF_STEP * plan.step_s:
        best = plain
    return tuple(best)
