"""Which prompts a batch takes, and which engine which shard of them: pure functions. Knows no prompt's text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from stages.artifacts.errors import InputError
from stages.artifacts.seeds import seed_at


def batch_indices(
    available: int, *, count: int, window: int, batch: int, split: Literal["train", "held_out"], seed: int
) -> list[int]:
    """The `count` of `available` prompts (in canonical order) that one batch takes: their indices, ascending.

    Batch 0 is the window-th piece of an order shuffled anew each epoch; an epoch's remainder is skipped. The batches
    after it deal the other prompts out in an order of the window's own, so that no prompt comes twice in a window and
    no window depends on how many batches another needed. Raises InputError where no whole batch is left.
    """
    epoch, slot = divmod(window, available // count)
    order = list(range(available))
    random.Random(seed_at(seed, "prompt_order", split, epoch)).shuffle(order)
    first = order[slot * count : (slot + 1) * count]
    if batch == 0:
        return sorted(first)
    rest = sorted(set(order).difference(first))
    random.Random(seed_at(seed, "refill_order", split, window)).shuffle(rest)
    taken = rest[(batch - 1) * count : batch * count]
    if len(taken) < count:
        raise InputError(
            f"batch {batch} of a round: expected at most {available // count} batches of {count} prompts from the "
            f"{available} of the part {split}; lower rounds.dynamic_sampling.max_batches"
        )
    return sorted(taken)


def deal_shards(tokens: Sequence[int], *, engines: int) -> list[list[int]]:
    """Shards by the tokens that each is expected to take, dealt out so that engines have as equal shares as may be.

    The largest goes first, to whoever has least. Returns each engine's shards, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(engines)]
    loads = [0] * engines
    for index in sorted(range(len(tokens)), key=lambda index: (-tokens[index], index)):
        engine = loads.index(min(loads))
        shares[engine].append(index)
        loads[engine] += tokens[index]
    return [sorted(share) for share in shares]
