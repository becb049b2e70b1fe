"""Models with one number per token: the reward model reads it at the last token, the critic at every one.

Kept as `<Architecture>ForSequenceClassification` with one label, so that reward models from elsewhere load as
they are and ours load elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from stages.artifacts.durable import digest_bytes
from stages.artifacts.errors import GateError, InputError
from stages.artifacts.model_directory import SCALAR_HEAD, refuse_unsafe_model
from stages.models.attention import hidden_states, use_packing
from stages.models.batches import Cost
from stages.models.language import DTYPES
from stages.models.packing import Packed, pack
from stages.models.work import FORWARD, Count, deal

_HEADS = (SCALAR_HEAD, "lm_head.weight")


def load_scalar_model(
    directory: Path, *, dtype: str, head: Literal["keep", "zero", "seeded"] = "keep"
) -> PreTrainedModel:
    """A model with a scalar head: the directory's own, zeros, or drawn from the current torch seed.

    Raises InputError if a head is to be kept and the weights hold none: silently starting from a random one is
    how reward models are lost.
    """
    refuse_unsafe_model(directory)
    if head == "keep":
        read_head(directory)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        directory,
        num_labels=1,
        dtype=DTYPES[dtype],
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=head != "keep",
    )
    weight = model.score.weight
    if head == "zero":
        nn.init.zeros_(weight)
    elif head == "seeded":
        nn.init.normal_(weight, std=1.0 / (weight.shape[1] + 1))
    return model


def read_head(directory: Path) -> torch.Tensor:
    """The head's weight, [1, hidden], straight from the safetensors files. Raises InputError if there is none."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                if SCALAR_HEAD in file.keys():
                    weight: torch.Tensor = file.get_tensor(SCALAR_HEAD)
                    return weight
        except SafetensorError as error:
            raise InputError(f"{path}: expected safetensors, found: {error}") from None
    raise InputError(f"{directory}: expected a scalar head named {SCALAR_HEAD}, found none; is it a reward model?")


def head_digest(directory: Path, *, dtype: str = "float32") -> str:
    """sha256 of the head's bytes, once in `dtype`."""
    return digest_bytes(read_head(directory).to(DTYPES[dtype]).float().contiguous().numpy().tobytes())


def require_same_head(left: Path, right: Path, *, dtype: str = "float32") -> None:
    """Gate: two models have the same head, bit for bit once in `dtype`."""
    if head_digest(left, dtype=dtype) != head_digest(right, dtype=dtype):
        raise GateError(f"head of {right} differs from that of {left}; expected the same bits")


def require_same_body(left: Path, right: Path, *, dtype: str) -> None:
    """Gate: everything of `left` but its head and output embedding is in `right`, bit for bit once in `dtype`."""
    expected, found = (_body_digests(path, DTYPES[dtype]) for path in (left, right))
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            what = "differs" if name in expected and name in found else "is in one of them alone"
            raise GateError(f"body of {right} is not that of {left}: {name} {what}; expected the same bits")


def _body_digests(directory: Path, dtype: torch.dtype) -> dict[str, str]:
    """sha256 of the bytes of each tensor in `dtype`, by name, from the safetensors files."""
    digests: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name not in _HEADS:
                    flat = file.get_tensor(name).to(dtype).contiguous().reshape(-1)
                    digests[name] = digest_bytes(flat.view(torch.uint8).numpy().tobytes())
    return digests


class TokenScores(nn.Module):
    """A scalar model seen as a function from sequences to one number per token."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        use_packing(model)
        self.model = model

    def forward(self, packed: Packed, select_M: torch.Tensor) -> torch.Tensor:
        """scores_M of the selected places, float32."""
        hidden_MD = hidden_states(self.model.base_model, packed).index_select(0, select_M)
        scores_M: torch.Tensor = self.model.score(hidden_MD).squeeze(-1).float()
        return scores_M


def last_tokens(rows: Sequence[tuple[Sequence[int], Sequence[int]]], *, device: torch.device) -> tuple[Packed, Tensor]:
    """Rows of (prompt, completion) token ids, packed whole, and the place of each one's last token: [B], long."""
    packed = pack(rows, device=device)
    return packed, torch.tensor([place.last for place in packed.places], dtype=torch.long, device=device)


@torch.no_grad()
def score_sequences(
    model: PreTrainedModel,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_tokens_per_microbatch: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    count: Count = lambda tokens, wasted, flops: None,
) -> torch.Tensor:
    """Reward of each (prompt, completion), as token ids: scores_B, float32, read at its last token.

    A prompt that comes more than once is computed once. on_progress(done, total) is called after each microbatch;
    count(tokens, wasted, flops) is told beforehand what will be computed.
    """
    module = TokenScores(model).eval()
    device = next(model.parameters()).device
    scores_B, done = torch.empty(len(rows), dtype=torch.float32), 0
    costs = [Cost(own=len(completion), shared=len(prompt), prompt=tuple(prompt)) for prompt, completion in rows]
    for batch in deal(
        costs,
        max_tokens=max_tokens_per_microbatch,
        rank=0,
        world_size=1,
        models=[model],
        passes=FORWARD,
        count=count,
    ):
        picked = module(*last_tokens([rows[row] for row in batch.rows], device=device))
        scores_B[list(batch.rows)] = picked.cpu()
        done += len(batch.rows)
        on_progress(done, len(rows))
    return scores_B
