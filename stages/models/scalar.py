"""Models with one number per token: the reward model reads it at the last token, the critic at every one.

Kept as `<Architecture>ForSequenceClassification` with one label, so that reward models from elsewhere load as
they are and ours load elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from stages.artifacts.durable import digest_bytes
from stages.artifacts.errors import GateError, InputError
from stages.artifacts.model_directory import refuse_unsafe_model
from stages.models.batches import microbatches, pad_sequences
from stages.models.language import DTYPES

HEAD = "score.weight"


def load_scalar_model(directory: Path, *, dtype: str, head_from_seed: bool = False) -> PreTrainedModel:
    """A model with a scalar head. head_from_seed: `directory` holds a language model; its head is drawn anew.

    Raises InputError if a head is expected and the weights hold none: silently starting from a random one is
    how reward models are lost.
    """
    refuse_unsafe_model(directory)
    if not head_from_seed:
        read_head(directory)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=1, dtype=DTYPES[dtype], use_safetensors=True, trust_remote_code=False
    )
    if head_from_seed:
        head = model.score.weight
        nn.init.normal_(head, std=1.0 / (head.shape[1] + 1))
    return model


def read_head(directory: Path) -> torch.Tensor:
    """The head's weight, [1, hidden], straight from the safetensors files. Raises InputError if there is none."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                if HEAD in file.keys():
                    weight: torch.Tensor = file.get_tensor(HEAD)
                    return weight
        except SafetensorError as error:
            raise InputError(f"{path}: expected safetensors, found: {error}") from None
    raise InputError(f"{directory}: expected a scalar head named {HEAD}, found none; is it a reward model?")


def head_digest(directory: Path) -> str:
    """sha256 of the head's bytes."""
    return digest_bytes(read_head(directory).float().contiguous().numpy().tobytes())


def require_same_head(left: Path, right: Path) -> None:
    """Gate: two models have the same head, bit for bit."""
    if head_digest(left) != head_digest(right):
        raise GateError(f"head of {right} differs from that of {left}; expected the same bits")


class TokenScores(nn.Module):
    """A scalar model seen as a function from sequences to one number per position."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids_BL: torch.Tensor) -> torch.Tensor:
        """scores_BL, float32. Right-padded input; causal attention keeps real tokens from seeing padding."""
        hidden_BLD = self.model.base_model(input_ids=input_ids_BL, use_cache=False).last_hidden_state
        scores_BL: torch.Tensor = self.model.score(hidden_BLD).squeeze(-1).float()
        return scores_BL


@torch.no_grad()
def score_sequences(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    *,
    max_tokens_per_microbatch: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> torch.Tensor:
    """Reward of each sequence (prompt and completion token ids): scores_B, float32, read at its last token.

    on_progress(done, total) is called after each microbatch, with sequences.
    """
    module = TokenScores(model).eval()
    device = next(model.parameters()).device
    scores_B = torch.empty(len(sequences), dtype=torch.float32)
    lengths, done = [len(sequence) for sequence in sequences], 0
    for batch in microbatches(lengths, max_tokens=max_tokens_per_microbatch)[0]:
        input_ids, last = pad_sequences([sequences[row] for row in batch.rows], device=device)
        picked = module(input_ids).gather(1, last.unsqueeze(1)).squeeze(1)
        scores_B[list(batch.rows)] = picked.cpu()
        done += len(batch.rows)
        on_progress(done, len(sequences))
    return scores_B
