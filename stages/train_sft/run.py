"""train_sft: demonstrations -> policy_0, which is also the frozen reference of the whole run."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from configs.models import SftConfig
from stages.artifacts import layout, schemas
from stages.artifacts.seeds import seed_at
from stages.artifacts.shards import read_rows, write_table
from stages.artifacts.store import open_artifact
from stages.engines.deepspeed_engine import TrainingEngine, sum_over_ranks
from stages.engines.devices import open_device
from stages.engines.schedule import learning_rate
from stages.models.adapters import add_adapters, merged_state
from stages.models.batches import Microbatch, TokenBatch, named, rollout_cost
from stages.models.language import TokenLogprobs, base_model, export_policy
from stages.models.work import FORWARD, FORWARD_AND_BACKWARD, deal
from stages.program import Context, Metrics
from stages.snapshots import StageSnapshots
from stages.train_sft.job import TrainSft

Row = dict[str, Any]


def run(job: TrainSft, context: Context) -> Metrics:
    """Train `steps` optimizer steps (or none, if sft is None) and write policy/."""
    parameters = job.parameters
    data = open_artifact(job.store, job.inputs.data)
    device = open_device(job.compute)
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer", trust_remote_code=False)
    torch.manual_seed(seed_at(job.seed, job.STAGE, "weights"))
    model = base_model(
        parameters.model, bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id
    )
    num_parameters = float(sum(p.numel() for p in model.parameters()))
    if parameters.sft is None:
        if context.rank == 0:
            export_policy(
                model.state_dict(), like=model, tokenizer=data / "tokenizer", directory=context.out / "policy"
            )
        return {"parameters": num_parameters}
    if parameters.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if parameters.model.lora is not None:
        add_adapters(model, parameters.model.lora)
    engine = TrainingEngine(
        TokenLogprobs(model),
        optimizer=parameters.sft.optimizer,
        resources=parameters.trainer,
        dtype=parameters.model.dtype,
        device=device,
    )
    figures = _train(job, parameters.sft, engine, data, context)
    state = {name.removeprefix("model."): tensor for name, tensor in engine.full_state().items()}
    if context.rank == 0:
        merged = merged_state(model, state)
        export_policy(merged, like=model, tokenizer=data / "tokenizer", directory=context.out / "policy")
        write_table(layout.shard(context.out, "metrics", 0), figures, schemas.METRICS)
    metrics = {"parameters": num_parameters, "train_loss": figures[-1]["value"]}
    return metrics | _held_out_loss(job, engine, data, context)


def step_rows(rows: list[Row], *, step: int, batch_size: int, seed: int, stage: str) -> list[Row]:
    """The rows of optimizer step `step`: a window over an order shuffled anew each epoch, by coordinates alone."""
    picked: list[Row] = []
    position = step * batch_size
    while len(picked) < batch_size:
        epoch, offset = divmod(position, len(rows))
        order = list(range(len(rows)))
        random.Random(seed_at(seed, stage, "order", epoch)).shuffle(order)
        take = order[offset : offset + batch_size - len(picked)]
        picked.extend(rows[i] for i in take)
        position += len(take)
    return picked


def _train(job: TrainSft, sft: SftConfig, engine: TrainingEngine, data: Path, context: Context) -> list[dict[str, Any]]:
    rows = read_rows(data, "demonstrations_train", schemas.DEMONSTRATIONS)
    snapshots = StageSnapshots(job, context, every=sft.snapshot_every, total=sft.steps)
    first, figures = snapshots.resume(engine)
    for step in range(first, sft.steps):
        batch_rows = step_rows(rows, step=step, batch_size=sft.batch_size, seed=job.seed, stage=job.STAGE)
        batches = _microbatches(job, batch_rows, engine, context, passes=FORWARD_AND_BACKWARD)
        num_tokens = sum(len(row["completion_ids"]) for row in batch_rows)
        total = [0.0]

        def loss_of(
            microbatch: Microbatch, rows: list[Row] = batch_rows, n: int = num_tokens, total: list[float] = total
        ) -> torch.Tensor:
            loss = _negative_logprobs(engine, rows, microbatch) / n
            total[0] += loss.item()
            return loss

        torch.manual_seed(seed_at(job.seed, job.STAGE, "step", step, context.rank))
        rate = learning_rate(sft.optimizer, step=step, num_steps=sft.steps)
        where = partial(named, f"{job.STAGE}, optimizer step {step}", batch_rows)
        engine.step(batches, loss_of, rate=rate, where=where)
        value = sum_over_ranks(total)[0]
        figures.append({"round_index": -1, "stage": job.STAGE, "step": step, "metric": "train_loss", "value": value})
        snapshots.after(step + 1, engine, figures)
        context.progress("optimizer steps", step + 1, sft.steps)
    return figures


def _microbatches(
    job: TrainSft, rows: list[Row], engine: TrainingEngine, context: Context, *, passes: int
) -> list[Microbatch]:
    return deal(
        [rollout_cost(row) for row in rows],
        max_tokens=job.parameters.trainer.max_tokens_per_microbatch,
        rank=context.rank,
        world_size=context.world_size,
        models=[engine.module.model],
        passes=passes,
        count=context.count,
    )


def _negative_logprobs(engine: TrainingEngine, rows: list[Row], microbatch: Microbatch) -> torch.Tensor:
    """Sum of -log p of the completion tokens of a microbatch; zero for a filler."""
    picked = [rows[i] for i in microbatch.rows]
    batch = TokenBatch.of(
        [row["prompt_ids"] for row in picked], [row["completion_ids"] for row in picked], device=engine.device
    )
    logprobs, _ = engine(batch.packed, batch.select_M, batch.targets_M, 1.0)
    weight = 0.0 if microbatch.is_filler else 1.0
    loss: torch.Tensor = -logprobs.sum() * weight
    return loss


@torch.no_grad()
def _held_out_loss(job: TrainSft, engine: TrainingEngine, data: Path, context: Context) -> Metrics:
    """held_out_loss: mean -log p per completion token on the held-out demonstrations; nats. Nothing without any."""
    rows = read_rows(data, "demonstrations_held_out", schemas.DEMONSTRATIONS)
    if not rows:
        return {}
    engine.train(False)
    total = 0.0
    for microbatch in _microbatches(job, rows, engine, context, passes=FORWARD):
        total += _negative_logprobs(engine, rows, microbatch).item()
    num_tokens = sum(len(row["completion_ids"]) for row in rows)
    return {"held_out_loss": sum_over_ranks([total])[0] / num_tokens}


if __name__ == "__main__":
    from stages.program import main

    main("train_sft")
