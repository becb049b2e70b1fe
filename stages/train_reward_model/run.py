"""train_reward_model: Bradley-Terry on preference pairs, starting from the policy's body."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.models import RewardModelConfig
from stages.artifacts import layout, schemas
from stages.artifacts.durable import write_json
from stages.artifacts.errors import GateError, InputError
from stages.artifacts.seeds import seed_at
from stages.artifacts.shards import read_rows, write_table
from stages.artifacts.store import open_artifact
from stages.engines.deepspeed_engine import TrainingEngine, sum_over_ranks
from stages.engines.devices import open_device
from stages.engines.schedule import learning_rate
from stages.models.adapters import add_adapters, merged_state
from stages.models.batches import Cost, Microbatch, named
from stages.models.language import write_model
from stages.models.scalar import TokenScores, head_digest, last_tokens, load_scalar_model, score_sequences
from stages.models.work import FORWARD_AND_BACKWARD, deal
from stages.program import Context, Metrics
from stages.rewards.statistics import wilson_interval
from stages.rl.preferences import bradley_terry_loss, centering_loss
from stages.snapshots import StageSnapshots
from stages.train_reward_model.job import TrainRewardModel

Row = dict[str, Any]
_CALIBRATION_BINS = 10


def run(job: TrainRewardModel, context: Context) -> Metrics:
    """Train, write reward_model/, and examine the model on the held-out pairs."""
    parameters = job.parameters
    device = open_device(job.compute)
    pairs = open_artifact(job.store, job.inputs.pairs)
    policy = open_artifact(job.store, job.inputs.policy) / "policy"
    train = read_rows(pairs, "pairs_train", schemas.PAIRS)
    held_out = read_rows(pairs, "pairs_held_out", schemas.PAIRS)
    if not train or not held_out:
        raise InputError(f"expected pairs for training and held out, found {len(train)} and {len(held_out)}")
    torch.manual_seed(seed_at(job.seed, job.STAGE, "head"))
    model = load_scalar_model(policy, dtype=parameters.model.dtype, head="seeded")
    if parameters.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if parameters.reward_model.lora is not None:
        add_adapters(model, parameters.reward_model.lora, trainable=("score",))
    engine = TrainingEngine(
        TokenScores(model),
        optimizer=parameters.reward_model.optimizer,
        resources=parameters.trainer,
        dtype=parameters.model.dtype,
        device=device,
    )
    figures = _train(job, engine, train, context)
    state = {name.removeprefix("model."): tensor for name, tensor in engine.full_state().items()}
    if context.rank != 0:
        return {}
    directory = context.out / "reward_model"
    write_model(merged_state(model, state), like=model, tokenizer=policy, directory=directory)
    write_table(layout.shard(context.out, "metrics", 0), figures, schemas.METRICS)
    exam = _examine(job, directory, train, held_out, context, device=device)
    write_json(context.out / "reward_model.json", exam | {"head_sha256": head_digest(directory)})
    return exam


def _train(job: TrainRewardModel, engine: TrainingEngine, pairs: list[Row], context: Context) -> list[Row]:
    settings = job.parameters.reward_model
    generator = torch.Generator()
    per_epoch = max(1, len(pairs) // settings.batch_size)
    num_steps = settings.epochs * per_epoch
    snapshots = StageSnapshots(job, context, every=settings.snapshot_every, total=num_steps)
    first, figures = snapshots.resume(engine)
    for step in range(first, num_steps):
        epoch, index = divmod(step, per_epoch)
        generator.manual_seed(seed_at(job.seed, job.STAGE, "order", epoch))
        order = torch.randperm(len(pairs), generator=generator).tolist()
        rows = [pairs[i] for i in order[index * settings.batch_size : (index + 1) * settings.batch_size]]
        total = [0.0]

        def loss_of(batch: Microbatch, rows: list[Row] = rows, total: list[float] = total) -> torch.Tensor:
            loss = _pair_loss(engine, rows, batch, settings) / len(rows)
            total[0] += loss.item()
            return loss

        batches = deal(
            [_pair_cost(row) for row in rows],
            max_tokens=job.parameters.trainer.max_tokens_per_microbatch,
            rank=context.rank,
            world_size=context.world_size,
            models=[engine.module.model],
            passes=FORWARD_AND_BACKWARD,
            count=context.count,
        )
        torch.manual_seed(seed_at(job.seed, job.STAGE, "step", step, context.rank))
        rate = learning_rate(settings.optimizer, step=step, num_steps=num_steps)
        where = partial(named, f"{job.STAGE}, optimizer step {step}", rows)
        engine.step(batches, loss_of, rate=rate, where=where)
        value = sum_over_ranks(total)[0]
        figures.append({"round_index": -1, "stage": job.STAGE, "step": step, "metric": "train_loss", "value": value})
        snapshots.after(step + 1, engine, figures)
        context.progress("optimizer steps", step + 1, num_steps)
    return figures


def _pair_cost(row: Row) -> Cost:
    """Tokens of a pair: its prompt once, and both completions."""
    prompt = tuple(row["prompt_ids"])
    return Cost(own=len(row["chosen_ids"]) + len(row["rejected_ids"]), shared=len(prompt), prompt=prompt)


def _pair_loss(engine: TrainingEngine, rows: list[Row], batch: Microbatch, settings: RewardModelConfig) -> torch.Tensor:
    """Sum over the pairs of a microbatch of the Bradley-Terry loss and the centering; zero for a filler."""
    picked = [rows[i] for i in batch.rows]
    sequences = [(r["prompt_ids"], r[column]) for column in ("chosen_ids", "rejected_ids") for r in picked]
    chosen, rejected = engine(*last_tokens(sequences, device=engine.device)).chunk(2)
    losses = bradley_terry_loss(
        chosen, rejected_B=rejected, margin=settings.margin, label_smoothing=settings.label_smoothing
    ) + settings.center_coef * centering_loss(chosen, rejected_B=rejected)
    total: torch.Tensor = losses.sum() * (0.0 if batch.is_filler else 1.0)
    return total


def _examine(
    job: TrainRewardModel,
    directory: Path,
    train: list[Row],
    held_out: list[Row],
    context: Context,
    *,
    device: torch.device,
) -> Metrics:
    """Score the pairs with the model as it was written: accuracy, margin, calibration, mean and std."""
    model = load_scalar_model(directory, dtype=job.parameters.model.dtype).to(device)
    limit = job.parameters.trainer.max_tokens_per_microbatch

    def scores(rows: list[Row], column: str) -> torch.Tensor:
        return score_sequences(
            model,
            [(row["prompt_ids"], row[column]) for row in rows],
            max_tokens_per_microbatch=limit,
            on_progress=lambda done, total: context.progress(f"scoring {column}", done, total),
            count=context.count,
        )

    known = torch.cat([scores(train, "chosen_ids"), scores(train, "rejected_ids")])
    chosen = scores(held_out, "chosen_ids")
    _require_batch_invariance(model, held_out, chosen)
    margins = chosen - scores(held_out, "rejected_ids")
    correct = int((margins > 0).sum())
    low, high = wilson_interval(correct, len(held_out))
    return {
        "held_out_accuracy": correct / len(held_out),
        "held_out_accuracy_low": low,
        "held_out_accuracy_high": high,
        "held_out_pairs": float(len(held_out)),
        "train_pairs": float(len(train)),
        "held_out_margin_mean": float(margins.mean()),
        "calibration_error": _calibration_error(torch.sigmoid(margins)),
        "score_mean": float(known.mean()),
        "score_std": max(float(known.std()), 1e-6),
    }


def _require_batch_invariance(model: Any, rows: list[Row], scores: torch.Tensor) -> None:
    """Gate: a score does not depend on what it is batched or padded with."""
    for index in range(min(8, len(rows))):
        sequence = (rows[index]["prompt_ids"], rows[index]["chosen_ids"])
        alone = float(score_sequences(model, [sequence], max_tokens_per_microbatch=1)[0])
        bound = 1e-4 if model.dtype == torch.float32 else 0.05
        if not math.isclose(alone, float(scores[index]), rel_tol=bound, abs_tol=bound):
            raise GateError(
                f"pair {rows[index]['prompt_id']}: score is {alone} alone and {float(scores[index])} in a batch; "
                "expected the same"
            )


def _calibration_error(probabilities: torch.Tensor) -> float:
    """Expected calibration error of P(chosen > rejected), over both orders of each pair so that both classes occur."""
    both = torch.cat([probabilities, 1 - probabilities])
    truth = torch.cat([torch.ones_like(probabilities), torch.zeros_like(probabilities)])
    bins = (both * _CALIBRATION_BINS).long().clamp(max=_CALIBRATION_BINS - 1)
    error = 0.0
    for index in range(_CALIBRATION_BINS):
        inside = bins == index
        if inside.any():
            gap = (both[inside].mean() - truth[inside].mean()).abs()
            error += float(gap) * int(inside.sum()) / len(both)
    return error


if __name__ == "__main__":
    from stages.program import main

    main("train_reward_model")
