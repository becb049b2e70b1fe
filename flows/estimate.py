"""How many bytes a run has still to write, against what is free. Counts from shapes; opens no model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

from configs.algorithms import Ppo
from configs.critic import FromDirectory
from configs.models import FromScratch, Lora
from configs.schema import RunConfig
from configs.sources import PolicySamplesSource
from stages.artifacts.errors import InputError
from stages.artifacts.model_directory import tensor_shapes
from stages.prepare_datasets.files import file_sources, locate

Shapes = dict[str, tuple[int, ...]]
_BYTES = {"float32": 4, "bfloat16": 2}
_ADAM_BYTES = 12  # float32 master copy and two moments, per trained parameter
_ARTIFACT_BYTES = 10_000  # manifest, job, Arrow schemas
_MODEL_BYTES = 80_000  # config, tokenizer, DeepSpeed's script
_PREPARED_PER_RAW = 3  # text and tokens of every row


@dataclass(frozen=True)
class Estimate:
    """Bytes still to be written at the peak, by kind. policy, snapshot: of one."""

    policy: int
    snapshot: int
    data: int
    models: int
    policies: int
    snapshots: int
    rollouts: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.data + self.models + self.policies + self.snapshots + self.rollouts

    def __str__(self) -> str:
        kinds = ("data", "models", "policies", "snapshots", "rollouts")
        return ", ".join(f"{kind} {_gb(getattr(self, kind))}" for kind in kinds)


def check_disk(config: RunConfig, *, done: frozenset[str], until: str = "policy") -> None:
    """Raise InputError if what is still to be written does not fit. done: labels of the run that are committed."""
    estimate = estimate_run(config, done=done, until=until)
    free = shutil.disk_usage(config.store).free
    if estimate is not None and estimate.total > free:
        kept = config.retention.policies
        raise InputError(
            f"store {config.store}: expected about {_gb(estimate.total)} free for what is still to be written "
            f"({estimate}), found {_gb(free)} free; make room, or lower retention.policies (now {kept or 'all'}) or "
            f"retention.snapshots (now {config.retention.snapshots}), or raise rounds.snapshot_every "
            f"(now {config.rounds.snapshot_every})"
        )


def estimate_run(config: RunConfig, *, done: frozenset[str], until: str = "policy") -> Estimate | None:
    """What is still to be written; None where the base model is not on this machine yet."""
    shapes = _shapes(config)
    if not shapes:
        return None
    width = _BYTES[config.model.dtype]
    all_parameters = _count(shapes)
    head = prod(shapes.get("model.embed_tokens.weight", (0,)))
    policy = (all_parameters + (0 if "lm_head.weight" in shapes else head)) * width + _MODEL_BYTES
    body = all_parameters - (head if "lm_head.weight" in shapes else 0)
    scalar = body * width + _MODEL_BYTES
    snapshot = policy + all_parameters * width + _trained(shapes, config.model.lora) * _ADAM_BYTES + _MODEL_BYTES
    critic = _critic_parameters(config) or body
    if isinstance(config.algorithm, Ppo):
        snapshot += critic * width + critic * (width + _ADAM_BYTES) + 2 * _MODEL_BYTES
    left = config.rounds.count - sum(label.endswith("-update_policy") for label in done) if until == "policy" else 0
    policies, snapshots = _kept(config, left=left)
    models = 0 if "train_sft" in done else policy
    if config.reward_model is not None and until != "sft":
        models += 0 if "train_reward_model" in done else scalar
    if isinstance(config.algorithm, Ppo) and until == "policy":
        models += 0 if "initialize_critic" in done else critic * width + _MODEL_BYTES
    return Estimate(
        policy=policy,
        snapshot=snapshot,
        data=0 if "prepare_datasets" in done else _data(config),
        models=models,
        policies=policies * policy,
        snapshots=snapshots * (snapshot - policy),
        rollouts=_rollouts(config, left=left, done=done, until=until),
    )


def _kept(config: RunConfig, *, left: int) -> tuple[int, int]:
    """Policies and snapshots that are written from now on and are on the disk at the same time, at most."""
    every, made = config.rounds.snapshot_every, config.rounds.count - left
    kept = config.retention.policies
    policies = left if kept is None else min(left, kept + 2)  # the best one, and one being written
    have = min(made // every, config.retention.snapshots)
    return policies, min(-(-left // every), config.retention.snapshots + 1 - have)


def _rollouts(config: RunConfig, *, left: int, done: frozenset[str], until: str) -> int:
    """Rollouts and what is computed from them, and evaluations, at their longest."""
    prompt, completion = config.data.max_prompt_tokens, config.sampling.max_completion_tokens
    row = 200 + 8 * prompt + 12 * completion  # ids, logprobs, and the text
    rounds, evaluation = config.rounds, config.evaluation
    dynamic = rounds.dynamic_sampling
    batches = dynamic.max_batches if dynamic is not None else 1
    copies = batches + (1 if dynamic is not None else 0)  # what is selected is written once more
    per_rollout = copies * (row + 200) + 24 * completion
    per_round = rounds.prompts_per_round * rounds.group_size * per_rollout + (3 * copies + 2) * _ARTIFACT_BYTES
    evaluations = -(-left // evaluation.every) + 1 if left else 0
    total = left * per_round + evaluations * (evaluation.prompts * row + 3 * _ARTIFACT_BYTES)
    samples = config.data.preferences
    if isinstance(samples, PolicySamplesSource) and until != "sft" and "train_reward_model" not in done:
        total += (samples.prompts + samples.held_out_prompts) * samples.group_size * row * 2 + 6 * _ARTIFACT_BYTES
    return total


def _data(config: RunConfig) -> int:
    total = 2 * _MODEL_BYTES
    for role, source in file_sources(config.data).items():
        if not source.hub:
            total += _PREPARED_PER_RAW * sum(file.path.stat().st_size for file in locate(source, role=role))
    for part in (config.data.prompts, config.data.demonstrations):
        total += getattr(part, "rows", 0) * 100
    return total


def _critic_parameters(config: RunConfig) -> int | None:
    """Of a critic that starts from a directory of the user's; None where it is as large as the policy's body."""
    start = config.algorithm.critic.initialize_from if isinstance(config.algorithm, Ppo) else None
    if not isinstance(start, FromDirectory):
        return None
    shapes = tensor_shapes(Path(start.path).expanduser())
    return _count({name: shape for name, shape in shapes.items() if name != "lm_head.weight"})


def _shapes(config: RunConfig) -> Shapes:
    base = config.model.base
    if isinstance(base, FromScratch):
        return _llama(base)
    directory = Path(base.path).expanduser()
    return tensor_shapes(directory) if directory.is_dir() else {}


def _llama(base: FromScratch) -> Shapes:
    """The tensors of a model from scratch, as its safetensors file names them."""
    hidden, mlp = base.hidden, base.mlp
    shapes: Shapes = {"model.embed_tokens.weight": (base.vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not base.tied_embeddings:
        shapes["lm_head.weight"] = (base.vocabulary, hidden)
    for layer in range(base.layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, mlp)
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return shapes


def _trained(shapes: Shapes, lora: Lora | None) -> int:
    """Parameters that an optimizer moves: all, or the adapters."""
    if lora is None:
        return _count(shapes)
    targets = [shape for name, shape in shapes.items() if name.removesuffix(".weight").endswith(lora.target_modules)]
    return sum(lora.rank * sum(shape) for shape in targets if len(shape) == 2)


def _count(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB"
