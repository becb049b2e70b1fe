"""Small artifacts made by the real stages, for the tests of the engines: jobs, and pools that run them."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import stages.compute_logprobs.job as logprobs_contract
import stages.estimate_advantages.job as advantages_contract
import stages.generate_rollouts.job as rollouts_contract
import stages.initialize_critic.job as critic_contract
import stages.prepare_datasets.job as data_contract
import stages.score_rollouts.job as rewards_contract
import stages.train_reward_model.job as reward_model_contract
import stages.train_sft.job as sft_contract
import stages.update_policy.job as update_contract
from configs.algorithms import Grpo, Ppo
from configs.critic import CriticStart, FromRewardModel
from configs.models import FromScratch, Lora, ModelConfig, Optimizer, RewardModelConfig, SftConfig
from configs.resources import GeneratorResources, TrainerResources
from configs.rewards import VerifierSource
from configs.sources import DataConfig, FileSource, SortDigitsSource
from stages.artifacts import layout, schemas, store
from stages.artifacts.durable import digest_file, write_json
from stages.artifacts.manifest import Manifest
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.shards import read_rows, write_table
from stages.job import Compute, Job
from stages.prepare_datasets.digests import source_digests
from stages.update_policy.job import TrainerState, UpdateSettings
from stages.workers import PoolSpec, WorkerPool
from tests.unit.stage_artifacts import commit_files

SEED = 23
FAST = Optimizer(learning_rate=3e-3, schedule="cosine", warmup_steps=2)
SLOW = Optimizer(learning_rate=2e-4)
GRPO = Grpo(policy_optimizer=SLOW, num_minibatches=2)
PPO = Ppo(policy_optimizer=SLOW, critic_optimizer=SLOW, num_minibatches=2, kl_target=0.1)
Row = dict[str, Any]


def base(*, tied: bool) -> FromScratch:
    """The smallest model that vLLM's kernels take: 2 layers of width 32."""
    return FromScratch(vocabulary=300, hidden=32, layers=2, heads=1, mlp=64, max_positions=64, tied_embeddings=tied)


def settings(
    algorithm: Ppo | Grpo, *, tied: bool = True, dtype: Any = "float32", lora: Lora | None = None, **trainer: Any
) -> UpdateSettings:
    """What a resident trainer is built from; one thread and one rank unless `trainer` says otherwise."""
    resources = TrainerResources(**{"threads": 1, **trainer})
    return UpdateSettings(
        model=ModelConfig(base=base(tied=tied), dtype=dtype, lora=lora), algorithm=algorithm, trainer=resources
    )


def sampled_shards(out: Path) -> int:
    """How many shards of an attempt were sampled in it; those taken over are second names of an earlier one's."""
    return sum(path.stat().st_nlink == 1 for path in out.glob("rollouts-*.arrow"))


def sealed_shards(attempt: Path) -> set[str]:
    """The names of the shards that an attempt sealed. A worker killed while it seals leaves a temporary file."""
    return {mark.stem for mark in attempt.with_name(f"{attempt.name}.sealed").glob("rollouts-*.arrow.json")}


def hashes(directory: Path) -> dict[str, str]:
    """sha256 of every file of an artifact or an attempt, without its manifest."""
    files = (p for p in sorted(directory.rglob("*")) if p.is_file() and p.name != layout.MANIFEST)
    return {p.relative_to(directory).as_posix(): digest_file(p) for p in files}


class Pools:
    """The worker pools of a test session, by kind and ranks; started on first use, one thread per rank."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[PoolSpec, WorkerPool] = {}

    def of(self, job: Job) -> WorkerPool:
        """The resident pool that a job asks for."""
        spec = PoolSpec.of(job)
        if spec not in self._open:
            self._open[spec] = WorkerPool(spec, logs=self._directory / "logs", stall_seconds=120.0)
        return self._open[spec]

    @contextmanager
    def fresh(self, kind: Literal["trainer", "generator"], *, ranks: int = 1) -> Iterator[WorkerPool]:
        """New processes, ended at the end of the block."""
        spec = PoolSpec(kind, "cpu", ranks, 1)
        with WorkerPool(spec, logs=self._directory / "fresh", stall_seconds=120.0) as pool:
            pool.start()
            yield pool
            pool.kill()

    def close(self) -> None:
        """End every resident pool."""
        for pool in self._open.values():
            pool.kill()


@dataclass
class House:
    """A store, and how to make something in it."""

    store: Path
    pools: Pools
    data: ArtifactRef = field(init=False)

    def __post_init__(self) -> None:
        pairs = self.store / "pairs.jsonl"
        self.store.mkdir(parents=True)
        pairs.write_text("".join(json.dumps(pair) + "\n" for pair in _pairs(96)))
        config = DataConfig(
            prompts=SortDigitsSource(rows=96, min_digits=3, max_digits=5),
            demonstrations=SortDigitsSource(rows=192, min_digits=3, max_digits=5),
            preferences=FileSource(path=str(pairs)),
            held_out_fraction=0.25,
        )
        parameters = data_contract.Parameters(data=config, base=base(tied=True), digests=source_digests(config, None))
        self.data = self.make(data_contract.PrepareDatasets(store=self.store, seed=SEED, parameters=parameters))

    def job_file(self, job: Job) -> Path:
        """The job.json, as a flow would have written it."""
        path = layout.run_job(self.store / "runs" / "test", f"{job.STAGE}-{job.fingerprint}")
        write_json(path, job.document())
        return path

    def run(self, job: Job, out: Path, *, pool: WorkerPool | None = None, progress: Any = None) -> dict[str, float]:
        """Run a job into `out` without committing."""
        pool = pool or self.pools.of(job)
        return pool.run(self.job_file(job), out, on_progress=progress or (lambda *_: None))

    def make(self, job: Job, *, pool: WorkerPool | None = None) -> ArtifactRef:
        """Run a job and commit it, unless it is done."""
        if store.verify(self.store, job.ref) is None:
            attempt = store.new_attempt(job)
            metrics = self.run(job, attempt, pool=pool)
            store.commit(job, attempt, metrics=metrics, wall_seconds=0.0)
        return job.ref

    def again(self, job: Job, *, pool: WorkerPool) -> dict[str, str]:
        """The hashes of the files that a job makes in another pool."""
        (self.store / "again").mkdir(exist_ok=True)
        out = Path(tempfile.mkdtemp(dir=self.store / "again", prefix=f"{job.STAGE}-"))
        self.run(job, out, pool=pool)
        return hashes(out)

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """The manifest of what has been made."""
        manifest = store.verify(self.store, ref)
        assert manifest is not None, ref
        return manifest

    def rows(self, ref: ArtifactRef, kind: str) -> list[Row]:
        """The rows of an artifact."""
        return read_rows(ref.path(self.store), kind, schemas.ALL[kind.partition("_")[0]])

    def sft(
        self, *, tied: bool = True, steps: int = 60, batch_size: int = 16, snapshot_every: int = 100, **trainer: Any
    ) -> sft_contract.TrainSft:
        """policy_0."""
        resources = TrainerResources(**{"threads": 1, **trainer})
        return sft_contract.TrainSft(
            store=self.store,
            seed=SEED,
            compute=Compute(ranks=resources.ranks, threads=1),
            inputs=sft_contract.Inputs(data=self.data),
            parameters=sft_contract.Parameters(
                model=ModelConfig(base=base(tied=tied)),
                sft=SftConfig(steps=steps, batch_size=batch_size, optimizer=FAST, snapshot_every=snapshot_every),
                trainer=resources,
            ),
        )

    def reward_model(self, policy: ArtifactRef, **more: Any) -> reward_model_contract.TrainRewardModel:
        """A reward model on the embedded pairs; more: of its settings."""
        return reward_model_contract.TrainRewardModel(
            store=self.store,
            seed=SEED,
            compute=Compute(threads=1),
            inputs=reward_model_contract.Inputs(pairs=self.data, policy=policy),
            parameters=reward_model_contract.Parameters(
                model=ModelConfig(base=base(tied=True)),
                reward_model=RewardModelConfig(**{"batch_size": 16, "optimizer": FAST, **more}),
                trainer=TrainerResources(threads=1),
            ),
        )

    def critic(
        self,
        reward_model: ArtifactRef | None = None,
        *,
        policy: ArtifactRef | None = None,
        start: CriticStart | None = None,
        **parameters: Any,
    ) -> critic_contract.InitializeCritic:
        """critic_0, from the reward model unless `start` says otherwise."""
        return critic_contract.InitializeCritic(
            store=self.store,
            seed=SEED,
            compute=Compute(threads=1),
            inputs=critic_contract.Inputs(reward_model=reward_model, policy=policy),
            parameters=critic_contract.Parameters(
                **{"start": start or FromRewardModel(), "dtype": "float32", **parameters}
            ),
        )

    def rollouts(
        self, policy: ArtifactRef, *, engines: int = 1, dtype: Any = "float32", **parameters: Any
    ) -> rollouts_contract.GenerateRollouts:
        """Rollouts of 8 prompts, 2 of each, in 4 shards, unless `parameters` says otherwise."""
        usual = {
            "purpose": "training",
            "round_index": 0,
            "split": "train",
            "window": 0,
            "num_prompts": 8,
            "group_size": 2,
            "prompts_per_shard": 2,
            "temperature": 1.0,
            "max_completion_tokens": 12,
            "finish_fraction": 1.0,
            "max_prompt_tokens": 48,
            "dtype": dtype,
            "generator": GeneratorResources(engines=engines, threads=1),
        }
        return rollouts_contract.GenerateRollouts(
            store=self.store,
            seed=SEED,
            compute=Compute(ranks=engines, threads=1),
            inputs=rollouts_contract.Inputs(data=self.data, policy=policy),
            parameters=rollouts_contract.Parameters(**{**usual, **parameters}),
        )

    def logprobs(
        self, chosen: UpdateSettings, state: TrainerState, *, rollouts: ArtifactRef, reference: ArtifactRef
    ) -> logprobs_contract.ComputeLogprobs:
        """What the models say of the rollouts; the gate as the flow sets it."""
        bound = {"float32": 1e-4, "bfloat16": 0.05}[chosen.model.dtype]
        return logprobs_contract.ComputeLogprobs(
            store=self.store,
            seed=SEED,
            compute=Compute(ranks=chosen.trainer.ranks, threads=1),
            inputs=logprobs_contract.Inputs(rollouts=rollouts, state=state, ref_policy=reference),
            parameters=logprobs_contract.Parameters(temperature=1.0, settings=chosen, max_mismatch=bound),
        )

    def credit(
        self, chosen: UpdateSettings, state: TrainerState, *, rollouts: ArtifactRef, logprobs: ArtifactRef
    ) -> ArtifactRef:
        """Rewards by a rule, then advantages."""
        compute = Compute(threads=1)
        rewards = rewards_contract.ScoreRollouts(
            store=self.store,
            seed=SEED,
            compute=compute,
            inputs=rewards_contract.Inputs(rollouts=rollouts),
            parameters=rewards_contract.Parameters(
                sources=(VerifierSource(verifier="position_match"),),
                code={},
                dtype="float32",
                max_tokens_per_microbatch=4096,
            ),
        )
        inputs = advantages_contract.Inputs(
            rollouts=rollouts, rewards=self.make(rewards), logprobs=logprobs, state=state
        )
        parameters = advantages_contract.Parameters(algorithm=chosen.algorithm)
        return self.make(
            advantages_contract.EstimateAdvantages(
                store=self.store, seed=SEED, compute=compute, inputs=inputs, parameters=parameters
            )
        )

    def update(
        self,
        chosen: UpdateSettings,
        state: TrainerState,
        *,
        rollouts: ArtifactRef,
        logprobs: ArtifactRef,
        advantages: ArtifactRef,
        round_index: int = 0,
    ) -> update_contract.UpdatePolicy:
        """The round's optimizer steps."""
        return update_contract.UpdatePolicy(
            store=self.store,
            seed=SEED,
            compute=Compute(ranks=chosen.trainer.ranks, threads=1),
            inputs=update_contract.Inputs(rollouts=rollouts, logprobs=logprobs, advantages=advantages, state=state),
            parameters=update_contract.Parameters(round_index=round_index, temperature=1.0, settings=chosen),
        )

    def written_round(
        self,
        *,
        version: str,
        seed: int = 0,
        num_rollouts: int = 11,
        change: Callable[[Mapping[str, list[Row]]], None] | None = None,
    ) -> dict[str, ArtifactRef]:
        """A round written by hand, so that updates can be tested without a generator. change: edits the rows."""
        tables = _written_tables(self.rows(self.data, "prompts_train"), version, seed=seed, num_rollouts=num_rollouts)
        if change is not None:
            change(tables)
        stages = {"rollouts": "generate_rollouts", "logprobs": "compute_logprobs", "advantages": "estimate_advantages"}
        return {
            kind: commit_files(
                self.store,
                stages[kind],
                lambda out, kind=kind: write_table(  # type: ignore[misc]
                    layout.shard(out, kind, 0), tables[kind], schemas.ALL[kind]
                ),
                content=[kind, repr(rows)],
            )
            for kind, rows in tables.items()
        }


def _written_tables(prompts: list[Row], version: str, *, seed: int, num_rollouts: int) -> dict[str, list[Row]]:
    generator = random.Random(seed)
    tables: dict[str, list[Row]] = {"rollouts": [], "logprobs": [], "advantages": []}
    for index in range(num_rollouts):
        prompt = prompts[index]
        tokens = generator.randint(1, 9)

        def numbers(scale: float, count: int = tokens) -> list[float]:
            return [generator.gauss(0.0, scale) for _ in range(count)]

        key = {"prompt_id": prompt["prompt_id"], "sample_index": 0}
        old = [x - 5.7 for x in numbers(0.2)]  # about what a model says that has learnt nothing
        tables["rollouts"].append(
            {
                **key,
                "round_index": 0,
                "group_id": prompt["prompt_id"],
                "policy_version": version,
                "prompt_ids": prompt["prompt_ids"],
                "completion_ids": [generator.randrange(3, 290) for _ in range(tokens)],
                "rollout_logprobs": old,
                "finish_reason": "stop",
                "prompt": prompt["prompt"],
                "completion": "",
                "answer": prompt["answer"],
            }
        )
        ref = [x + d for x, d in zip(old, numbers(0.1), strict=True)]
        tables["logprobs"].append({**key, "old_logprobs": old, "ref_logprobs": ref, "values": numbers(0.5)})
        credit = {"token_rewards": numbers(1.0), "advantages": numbers(1.0), "returns": numbers(1.0)}
        tables["advantages"].append({**key, **credit})
    return tables


def _pairs(count: int) -> list[dict[str, str]]:
    generator = random.Random(1)
    pairs = []
    for _ in range(count):
        digits = "".join(generator.choice("0123456789") for _ in range(4))
        answer = "".join(sorted(digits))
        pairs.append({"prompt": f"Sort the digits {digits}.", "chosen": answer, "rejected": answer[:2]})
    return pairs
