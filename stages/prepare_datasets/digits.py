"""The embedded task, `Sort the digits 5291.` -> `1259`: prompts, and demonstrations by a crowd that is partly lazy."""

from __future__ import annotations

import random
from collections.abc import Iterator

from configs.sources import SortDigitsSource
from stages.artifacts.errors import InputError
from stages.artifacts.seeds import seed_at
from stages.prepare_datasets.dialogues import Prompt
from stages.prepare_datasets.shapes import Record

_ENUMERABLE = 10_000


def sort_digits(source: SortDigitsSource, *, run_seed: int, role: str) -> Iterator[Record]:
    """`source.rows` records with distinct prompts; answer: the digits sorted.

    Of the completions a `lazy_fraction` stops one digit early (one-digit answers are never shortened).
    Raises InputError if there are not that many distinct prompts.
    """
    generator = random.Random(seed_at(run_seed, "prepare_datasets", "sort_digits", role))
    for digits in _distinct(source, generator):
        answer = "".join(sorted(digits))
        lazy = generator.random() < source.lazy_fraction and len(answer) > 1
        completion = answer[:-1] if lazy else answer
        prompt = Prompt.of_text(f"Sort the digits {digits}.")
        yield Record(prompt, completion=completion, answer=answer)


def _distinct(source: SortDigitsSource, generator: random.Random) -> list[str]:
    lengths = range(source.min_digits, source.max_digits + 1)
    possible = sum(10**length for length in lengths)
    if source.rows > possible:
        raise InputError(
            f"sort_digits: expected at most {possible} rows with {source.min_digits} to {source.max_digits} digits, "
            f"found rows: {source.rows}; ask for fewer rows or more digits"
        )
    if possible <= max(_ENUMERABLE, 2 * source.rows):
        everything = [f"{number:0{length}d}" for length in lengths for number in range(10**length)]
        return generator.sample(everything, source.rows)
    found: dict[str, None] = {}
    while len(found) < source.rows:
        found["".join(generator.choices("0123456789", k=generator.choice(lengths)))] = None
    return list(found)
