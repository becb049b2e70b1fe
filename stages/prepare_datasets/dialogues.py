"""Turns of a conversation, from message lists and from transcripts, and as plain text. Knows no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_SPEAKERS = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatbot": "assistant",
    "system": "system",
}
_KEYS = (("role", "content"), ("from", "value"), ("speaker", "text"))


class BadRow(ValueError):
    """One row that cannot be used. reason: the same words for all rows with this fault, so that they are counted."""

    def __init__(self, reason: str, found: str = "") -> None:
        super().__init__(f"{reason}; found {found}" if found else reason)
        self.reason = reason


@dataclass(frozen=True)
class Turn:
    """One message. role: user, assistant or system."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """What a completion answers: plain text, and the same as turns. as_messages: the row came as messages."""

    text: str
    turns: tuple[Turn, ...]
    as_messages: bool = False

    @staticmethod
    def of_text(text: str) -> Prompt:
        """A plain string; a transcript is also understood as turns."""
        return Prompt(text=text, turns=_transcript_turns(text) or (Turn("user", text),))

    @staticmethod
    def of_turns(turns: tuple[Turn, ...]) -> Prompt:
        """Messages; as plain text a lone user turn is its content, anything longer is a transcript."""
        return Prompt(text=plain_text(turns), turns=turns, as_messages=True)

    @property
    def is_empty(self) -> bool:
        """Whether nobody says anything in it."""
        return not any(turn.content.strip() for turn in self.turns)


def plain_text(turns: tuple[Turn, ...]) -> str:
    """Turns without a chat template: `\\n\\nHuman: …\\n\\nAssistant:`; a lone user turn stays as it is."""
    if not turns or (len(turns) == 1 and turns[0].role == "user"):
        return turns[0].content if turns else ""
    names = {"user": HUMAN, "assistant": ASSISTANT, "system": "\n\nSystem:"}
    return "".join(f"{names[turn.role]} {turn.content}" for turn in turns) + ASSISTANT


def read_turns(
    value: Any, *, role_key: str = "", content_key: str = "", system_answers: bool = False
) -> tuple[Turn, ...]:
    """A message list as turns. system_answers: the speaker SYSTEM is the assistant. Raises BadRow."""
    if not isinstance(value, list) or not value:
        raise BadRow("expected a list of messages", ascii(value)[:60])
    turns = []
    for item in value:
        keys = [(role_key, content_key)] if role_key else _KEYS
        pair = next(((r, c) for r, c in keys if isinstance(item, dict) and r in item and c in item), None)
        if pair is None:
            raise BadRow("expected messages with role and content", ascii(item)[:60])
        speaker, content = str(item[pair[0]]).lower(), _content(item[pair[1]])
        if speaker == "system" and system_answers:
            speaker = "assistant"
        if speaker not in _SPEAKERS:
            raise BadRow("expected the roles user, assistant or system", ascii(speaker)[:40])
        turns.append(Turn(_SPEAKERS[speaker], content))
    return tuple(turns)


def split_last_reply(turns: tuple[Turn, ...]) -> tuple[tuple[Turn, ...], str | None]:
    """Everything before the last assistant turn, and that turn's content (None if there is none)."""
    for index in range(len(turns) - 1, -1, -1):
        if turns[index].role == "assistant":
            return turns[:index], turns[index].content
    return turns, None


def split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """HH-RLHF: (prompt, chosen reply, rejected reply), the prompt being the common prefix up to `Assistant:`.

    Raises BadRow where the dialogues part before their last replies: their prompts would differ.
    """
    if not chosen.strip() or not rejected.strip():
        raise BadRow("expected a dialogue in chosen and in rejected", "an empty one")
    prefix = _common_prefix(chosen, rejected)
    cut = prefix.rfind(ASSISTANT)
    if cut < 0:
        raise BadRow("chosen and rejected have different prompts", ascii(prefix[-40:]) + " in common")
    cut += len(ASSISTANT)
    replies = chosen[cut:], rejected[cut:]
    if any(HUMAN in reply or ASSISTANT in reply for reply in replies):
        raise BadRow("chosen and rejected differ before their last replies")
    return chosen[:cut], *replies


def _common_prefix(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    raise BadRow("expected a string as content of every message", ascii(value)[:60])


def _transcript_turns(text: str) -> tuple[Turn, ...]:
    if not text.startswith(HUMAN) or not text.rstrip().endswith(ASSISTANT.strip()):
        return ()
    turns, rest = [], text.rstrip()[: -len(ASSISTANT)]
    for piece in rest.replace(HUMAN, "\0u").replace(ASSISTANT, "\0a").split("\0")[1:]:
        turns.append(Turn("user" if piece[:1] == "u" else "assistant", piece[1:].strip()))
    return tuple(turns)
