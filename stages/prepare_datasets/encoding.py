"""Texts -> token ids: one BOS at most, one EOS at the end, special-token strings in user text kept plain text."""

from __future__ import annotations

import unicodedata
from typing import Literal

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from stages.artifacts.errors import GateError, InputError
from stages.prepare_datasets.dialogues import BadRow, Prompt

_CHARACTERS_PER_TOKEN = 1000


class Encoder:
    """Encodes prompts and completions of one run.

    chat: "auto" (rows that came as messages get the chat template), "always" or "never".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: Literal["auto", "always", "never"]) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._plain = _backend(tokenizer, specials_are_text=True)
        self._template = _backend(tokenizer, specials_are_text=False)
        added = self._plain.get_added_tokens_decoder().values()
        self._specials = tuple(token.content for token in added if token.special)
        self.eos_id = int(tokenizer.eos_token_id)
        self._bos_id = tokenizer.bos_token_id
        self.adds_bos = self._bos_id is not None and tokenizer("a")["input_ids"][:1] == [self._bos_id]

    def encode_prompt(self, prompt: Prompt) -> tuple[str, list[int]]:
        """The prompt's final text, without BOS, and its ids. Raises BadRow or InputError."""
        wants_chat = self._chat == "always" or (self._chat == "auto" and prompt.as_messages)
        if not wants_chat:
            return prompt.text, self._with_bos(self._ids(prompt.text), template_has_it=False)
        rendered, contents = self._render(prompt)
        bos = str(self._tokenizer.bos_token or "")
        has_bos = bool(bos) and rendered.startswith(bos)
        text = rendered[len(bos) :] if has_bos else rendered
        if contents is None:
            return text, self._with_bos(
                self._template.encode(text, add_special_tokens=False).ids, template_has_it=has_bos
            )
        ids: list[int] = []
        final = ""
        for index, piece in enumerate(_cut_at_markers(text, len(contents))):
            if index:
                ids += self._ids(contents[index - 1])
                final += contents[index - 1]
            ids += self._template.encode(piece, add_special_tokens=False).ids
            final += piece
        return final, self._with_bos(ids, template_has_it=has_bos)

    def encode_completion(self, text: str) -> list[int]:
        """The ids of a completion, ending in exactly one EOS."""
        return [*self._ids(text), self.eos_id]

    def truncate_left(self, ids: list[int], *, max_tokens: int) -> tuple[str, list[int]]:
        """The last `max_tokens` ids, BOS kept, never starting inside a character; and their text, without BOS."""
        has_bos = self._bos_id is not None and ids[:1] == [self._bos_id]
        room = max_tokens - has_bos
        rest = ids[-room:] if room else []
        text = self._decode(rest)
        while text.startswith("\ufffd") and rest:
            rest = rest[1:]
            text = self._decode(rest)
        return text, [*ids[: int(has_bos)], *rest]

    def surely_longer(self, text: str, *, max_tokens: int) -> bool:
        """Whether a text is so long that it need not be encoded to know that it is over `max_tokens`."""
        return len(text) > max_tokens * _CHARACTERS_PER_TOKEN

    def check_round_trip(self, text: str, ids: list[int], *, place: str) -> None:
        """Raise GateError unless the ids say the text again (up to canonical Unicode equivalence)."""
        inner = ids[1:] if ids and ids[0] == self._bos_id else ids
        inner = inner[:-1] if inner and inner[-1] == self.eos_id else inner
        decoded = self._decode(inner)
        if unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", text):
            return
        at = next(
            (i for i, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), min(len(text), len(decoded))
        )
        around = slice(max(0, at - 20), at + 40)
        raise GateError(
            f"{place}: expected the tokenizer to give the text back, found it changed at character {at}: "
            f"{text[around]!a} became {decoded[around]!a}; use another tokenizer, or normalise the text"
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: list[int]) -> str:
        return self._plain.decode(ids, skip_special_tokens=False)

    def _with_bos(self, ids: list[int], *, template_has_it: bool) -> list[int]:
        return [int(self._bos_id), *ids] if template_has_it or self.adds_bos else list(ids)

    def _render(self, prompt: Prompt) -> tuple[str, list[str] | None]:
        """The rendered template; with markers in the place of contents if one holds a special-token string."""
        contents = [turn.content for turn in prompt.turns]
        risky = any(special in content for content in contents for special in self._specials)
        shown = [_marker(i) for i in range(len(contents))] if risky else contents
        messages = [{"role": t.role, "content": c} for t, c in zip(prompt.turns, shown, strict=True)]
        if not self._tokenizer.chat_template:
            raise InputError("data.chat: expected a tokenizer with a chat template, found none; set data.chat: never")
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise BadRow("the chat template refused the messages", str(error)[:80]) from None
        return str(text), contents if risky else None


def _backend(tokenizer: PreTrainedTokenizerBase, *, specials_are_text: bool) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    copy.encode_special_tokens = specials_are_text
    return copy


def _marker(index: int) -> str:
    return f"\ue000{index}\ue001"


def _cut_at_markers(text: str, count: int) -> list[str]:
    pieces = []
    for index in range(count):
        if text.count(_marker(index)) != 1:
            raise BadRow("the chat template changes a message that holds a special token's name")
        piece, _, text = text.partition(_marker(index))
        pieces.append(piece)
    return [*pieces, text]
