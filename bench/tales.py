"""The ragged task: tales whose lengths have a heavy tail because the model has learnt when to stop, not by force.

Every next word depends on the word before it alone, so a lightly trained model knows the task: two kinds of sentences
of 15 to 23 words, a mark at the end of each, and then the tale's end or another sentence, by chances that depend on the
mark. So completions have at least 16 tokens, a median near 35, a mean near 70 and a tail that is cut at 256. The reward
(which of two synonyms was taken) has nothing to do with the length, so training leaves the lengths as they are.

Imports the standard library alone: its code is part of the recipe of the rewards that it gives.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SENTENCE_WORDS = 15
MOST_SENTENCES = 16
_EXTRA_WORDS = 8
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
# by the mark that ends a sentence: the chance that the tale ends there, and that a plain sentence follows
_END, _PLAIN_NEXT = {".": 0.45, ";": 0.12}, {".": 0.73, ";": 0.0}
_FIRST_PLAIN = 0.8

# one word per syllable: a plain and a long sentence, two synonyms per place, and words that stretch a sentence
_WORDS = [c + v for c in _CONSONANTS for v in _VOWELS]
_PLAIN = [(_WORDS[2 * i], _WORDS[2 * i + 1]) for i in range(SENTENCE_WORDS)]
_LONG = [(_WORDS[30 + 2 * i], _WORDS[31 + 2 * i]) for i in range(SENTENCE_WORDS)]
_EXTRA = {".": "oh", ";": "ah"}
_FIRST_SYNONYMS = {first for first, _ in _PLAIN + _LONG}
_SYNONYMS = _FIRST_SYNONYMS | {second for _, second in _PLAIN + _LONG}


def first_synonyms(*, prompt: str, completion: str, answer: str) -> float:
    """The reward: the share of a completion's words that are the first of two synonyms; 0 where there are none."""
    words = [word for word in completion.split() if word in _SYNONYMS]
    return sum(word in _FIRST_SYNONYMS for word in words) / len(words) if words else 0.0


def tale(chance: random.Random) -> str:
    """One tale, at most MOST_SENTENCES sentences long."""
    words: list[str] = []
    mark = "." if chance.random() < _FIRST_PLAIN else ";"
    for _ in range(MOST_SENTENCES):
        words += [chance.choice(pair) for pair in (_PLAIN if mark == "." else _LONG)]
        extra = 0
        while extra < _EXTRA_WORDS and chance.random() < 0.4:
            words.append(_EXTRA[mark])
            extra += 1
        words.append(mark)
        if chance.random() < _END[mark]:
            break
        mark = "." if chance.random() < _PLAIN_NEXT[mark] else ";"
    return " " + " ".join(words)


def write_tales(directory: Path, *, prompts: int, demonstrations: int, seed: int = 0) -> None:
    """Write prompts.jsonl and demonstrations.jsonl, the same for the same numbers."""
    chance = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"Tell tale {index}."} for index in range(prompts)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = [{"prompt": f"Tell tale {prompts + i}.", "completion": tale(chance)} for i in range(demonstrations)]
    (directory / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
