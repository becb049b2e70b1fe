"""Causal language models: loading, log-probabilities of completion tokens, and export for generation."""

from __future__ import annotations

import copy
import math
import shutil
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from configs.models import FromScratch, ModelConfig, Pretrained
from stages.artifacts.errors import InputError
from stages.artifacts.model_directory import refuse_unsafe_model, safe_model
from stages.models.attention import hidden_states, use_packing
from stages.models.packing import Packed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LOGITS = 2**26


def base_model(model: ModelConfig, *, bos: int, eos: int, pad: int) -> PreTrainedModel:
    """The model that training starts from: random weights (from the current torch seed), or a pretrained one."""
    match model.base:
        case FromScratch() as scratch:
            config = LlamaConfig(
                vocab_size=scratch.vocabulary,
                hidden_size=scratch.hidden,
                intermediate_size=scratch.mlp,
                num_hidden_layers=scratch.layers,
                num_attention_heads=scratch.heads,
                num_key_value_heads=scratch.kv_heads or scratch.heads,
                max_position_embeddings=scratch.max_positions,
                tie_word_embeddings=scratch.tied_embeddings,
                bos_token_id=bos,
                eos_token_id=eos,
                pad_token_id=pad,
            )
            built: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPES[model.dtype])
            return built
        case Pretrained(path=path, revision=revision):
            return _from_pretrained(safe_model(path, revision=revision), model.dtype)


def load_policy(directory: Path, *, dtype: str) -> PreTrainedModel:
    """A policy that this house exported."""
    refuse_unsafe_model(directory)
    return _from_pretrained(directory, dtype)


def _from_pretrained(path: Path, dtype: str) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES[dtype], use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"model {path}: expected a causal language model in safetensors, found: {reason}") from None
    return model


class TokenLogprobs(nn.Module):
    """A language model seen as a function from sequences to log-probabilities of their completion tokens.

    entropy_gradient: whether the entropy is part of a loss; otherwise it costs no memory in the backward pass.
    """

    def __init__(self, model: PreTrainedModel, *, entropy_gradient: bool = False) -> None:
        super().__init__()
        use_packing(model)
        self.model = model
        self.entropy_gradient = entropy_gradient

    def forward(
        self, packed: Packed, select_M: torch.Tensor, targets_M: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logprobs_M and entropy_M (nats, float32) of the selected places, at `temperature`.

        The logits of all places are never held at once: a few hundred megabytes at a time, computed again in the
        backward pass where they are more than that.
        """
        hidden_MD = hidden_states(self.model.get_decoder(), packed).index_select(0, select_M)
        chunks = math.ceil(len(hidden_MD) * self.model.config.vocab_size / _LOGITS)
        pairs = zip(hidden_MD.chunk(chunks), targets_M.chunk(chunks), strict=True)
        if chunks == 1 or not torch.is_grad_enabled():
            parts = [self._logprobs(hidden, targets, temperature) for hidden, targets in pairs]
        else:
            again = partial(checkpoint, self._logprobs, use_reentrant=False, preserve_rng_state=False)
            parts = [again(hidden, targets, temperature) for hidden, targets in pairs]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _logprobs(
        self, hidden_MD: torch.Tensor, targets_M: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_MV = self.model.get_output_embeddings()(hidden_MD).float() / temperature
        all_MV = torch.log_softmax(logits_MV, dim=-1)
        logprobs_M = all_MV.gather(-1, targets_M.unsqueeze(-1)).squeeze(-1)
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            entropy_M = -(all_MV.exp() * all_MV).sum(-1)
        return logprobs_M, entropy_M


def export_policy(state: dict[str, torch.Tensor], *, like: PreTrainedModel, tokenizer: Path, directory: Path) -> None:
    """Write weights, config and tokenizer as a directory that transformers and vLLM both open.

    The output embedding is always written under its own name: vLLM reloading weights in place would otherwise
    keep the old one where it is tied to the input embedding.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    if "lm_head.weight" not in weights and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    if weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr():
        weights["lm_head.weight"] = weights["lm_head.weight"].clone()
    write_model(weights, like=like, tokenizer=tokenizer, directory=directory)


def write_model(weights: dict[str, torch.Tensor], *, like: PreTrainedModel, tokenizer: Path, directory: Path) -> None:
    """Write safetensors, config.json and the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, directory, max_shard_size="5GB")
    config = copy.deepcopy(like.config)
    config.architectures = [type(like).__name__]
    config.dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    for path in sorted(tokenizer.iterdir()):
        if path.name.startswith(("tokenizer", "special_tokens", "chat_template", "vocab", "merges", "added_tokens")):
            shutil.copyfile(path, directory / path.name)
