"""The run's tokenizer: a byte-level BPE trained on the run's own text, or that of a pretrained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from configs.models import FromScratch, Pretrained
from stages.artifacts.errors import InputError
from stages.artifacts.model_directory import refuse_code, safe_model

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
SPECIALS = (BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


def make_tokenizer(base: FromScratch | Pretrained, *, texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """The tokenizer for a base model; `texts` train it if there is none yet. Raises InputError."""
    if isinstance(base, FromScratch):
        return train_tokenizer(texts, vocabulary=base.vocabulary, max_tokens=base.max_positions)
    return load_tokenizer(base)


def train_tokenizer(texts: Sequence[str], *, vocabulary: int, max_tokens: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `vocabulary` entries: a pure function of the texts and their order.

    Digits are split one by one. Where the texts allow too few merges, unused special tokens fill up the rest.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=_alphabet(),
        limit_alphabet=256,
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocabulary - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<unused_{i}>", special=True, normalized=False) for i in range(missing)])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
        padding_side="left",
    )
    wrapped.chat_template = CHAT_TEMPLATE
    if len(wrapped) != vocabulary:
        raise InputError(f"model.base.vocabulary: expected at least {len(wrapped)}, found {vocabulary}")
    return wrapped


def load_tokenizer(base: Pretrained) -> PreTrainedTokenizerBase:
    """The tokenizer of a pretrained model; never runs code from it. Pad falls back to EOS. Raises InputError."""
    directory = Path(base.path).expanduser()
    if directory.is_dir():
        refuse_code(directory)
    else:
        directory = safe_model(base.path, revision=base.revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"model.base.path: {base.path}: expected a model with a tokenizer, found none: {reason}"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        raise InputError(f"model.base.path: {base.path}: expected a tokenizer.json (a fast tokenizer), found none")
    if tokenizer.eos_token_id is None:
        raise InputError(f"model.base.path: {base.path}: expected a tokenizer with an EOS token, found none")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _alphabet() -> list[str]:
    """The byte-level characters of all bytes that can occur in UTF-8 (243 of 256), in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [character[byte] for byte in range(256) if byte not in _NEVER_IN_UTF8]
