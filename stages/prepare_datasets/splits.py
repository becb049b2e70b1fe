"""Which prompts are held out: decided by a hash of the prompt's text alone, so no prompt is ever in both parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stages.artifacts.durable import digest_bytes

Numbers = npt.NDArray[np.uint64]


def prompt_id_of(text: str) -> str:
    """The first 16 hex digits of the sha256 of a prompt's text."""
    return digest_bytes(text.encode())[:16]


def is_held_out(text: str, *, fraction: float) -> bool:
    """Whether the prompt with this text is in the held-out `fraction`. Blind to leading and trailing space."""
    digest = digest_bytes(b"held_out:" + text.strip().encode())
    return int(digest[:16], 16) < fraction * 2**64


def settled(assigned: Sequence[tuple[Numbers, npt.NDArray[np.bool_]]]) -> Numbers:
    """The prompt_ids, as numbers, that are held out.

    assigned: prompt_ids and whether each is held out, of every row, by role. Two prompts can become one text, by
    truncation or in a chat template; if their hashes disagree, all of it is training data.
    """
    training = [prompt_ids[~held_out] for prompt_ids, held_out in assigned]
    held = [prompt_ids[held_out] for prompt_ids, held_out in assigned]
    return np.setdiff1d(np.concatenate(held), np.concatenate(training))
