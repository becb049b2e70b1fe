"""Identity by recipe: every field of every job changes its fingerprint, except what the job excludes.

The fields are found in the jobs themselves, so a field added later is tested without a line here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from configs.algorithms import (
    Cispo,
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    Mismatch,
    Overlong,
    Ppo,
    ReinforcePp,
    ReinforcePpBaseline,
    Rloo,
)
from configs.critic import Critic, FromDirectory, FromPolicy, FromRewardModel
from configs.models import FromScratch, Lora, ModelConfig, Pretrained, RewardModelConfig, SftConfig
from configs.resources import GeneratorResources, TrainerResources
from configs.rewards import FunctionSource, HttpSource, RewardModelSource, VerifierSource
from configs.sources import DataConfig, FileSource, PolicySamplesSource, SortDigitsSource
from stages.artifacts.reference import ArtifactRef
from stages.compute_logprobs import job as compute_logprobs
from stages.estimate_advantages import job as estimate_advantages
from stages.evaluate_policy import job as evaluate_policy
from stages.generate_rollouts import job as generate_rollouts
from stages.initialize_critic import job as initialize_critic
from stages.job import Compute, Job
from stages.label_preferences import job as label_preferences
from stages.prepare_datasets import job as prepare_datasets
from stages.score_rollouts import job as score_rollouts
from stages.select_rollouts import job as select_rollouts
from stages.snapshot_trainer import job as snapshot_trainer
from stages.train_reward_model import job as train_reward_model
from stages.train_sft import job as train_sft
from stages.update_policy import job as update_policy
from stages.update_policy.job import TrainerState, UpdateSettings

Path_ = tuple[str | int, ...]
REF = ArtifactRef(stage="toy", fingerprint="a" * 32)
STATE = TrainerState(policy=REF, critic=REF)
TRAINER = TrainerResources(ranks=2, gpus=(0, 1), zero_stage=3, offload_optimizer=True, offload_parameters=True)
MODELS = (ModelConfig(lora=Lora()), ModelConfig(base=Pretrained(path="models/a", revision="main")))
ALGORITHMS = (
    Ppo(
        kl_target=0.1,
        overlong=Overlong(),
        mismatch=Mismatch(form="mask"),
        critic=Critic(initialize_from=FromDirectory(path="models/critic")),
    ),
    Grpo(kl_target=0.1),
)
OTHERS = (DrGrpo(), Dapo(), Gspo(), Cispo(), Rloo(), ReinforcePp(), ReinforcePpBaseline())
SOURCES = (
    RewardModelSource(clip=5.0),
    VerifierSource(verifier="length", options={"target": 9}),
    FunctionSource(function="rules:mine"),
    HttpSource(url="http://scorer/score", clip=5.0, token_env="TOKEN"),
)
SETTINGS = [UpdateSettings(model=m, algorithm=a, trainer=TRAINER) for m, a in zip(MODELS, ALGORITHMS, strict=True)]
FILES = FileSource(path="a.jsonl", revision="main", columns={"prompt": "question"}, limit=9)
GENERATOR = GeneratorResources(engines=2, gpus=(2, 3))


def examples() -> Iterator[Job]:
    """Jobs in which every optional field is set and every kind of a union occurs."""
    common: dict[str, Any] = {"store": Path("/store"), "seed": 7, "compute": Compute(ranks=2, gpus=(0, 1))}
    for demonstrations, preferences in (
        (FILES, FILES),
        (SortDigitsSource(), PolicySamplesSource(judge=SOURCES[1:])),
    ):
        data = DataConfig(prompts=FILES, demonstrations=demonstrations, preferences=preferences)
        for base in (FromScratch(), Pretrained(path="models/a", revision="main")):
            parameters = prepare_datasets.Parameters(data=data, base=base, digests={"prompts/a.jsonl": "b" * 64})
            yield prepare_datasets.PrepareDatasets(**common, parameters=parameters)
    for model in MODELS:
        yield train_sft.TrainSft(
            **common,
            inputs=train_sft.Inputs(data=REF),
            parameters=train_sft.Parameters(model=model, sft=SftConfig(), trainer=TRAINER, base_digest="c"),
        )
        yield train_reward_model.TrainRewardModel(
            **common,
            inputs=train_reward_model.Inputs(pairs=REF, policy=REF),
            parameters=train_reward_model.Parameters(
                model=model, reward_model=RewardModelConfig(lora=Lora()), trainer=TRAINER
            ),
        )
    for start in (FromRewardModel(), FromPolicy(), FromDirectory(path="models/critic")):
        yield initialize_critic.InitializeCritic(
            **common,
            inputs=initialize_critic.Inputs(reward_model=REF, policy=REF),
            parameters=initialize_critic.Parameters(start=start, dtype="float32", start_digest="e"),
        )
    yield label_preferences.LabelPreferences(
        **common,
        inputs=label_preferences.Inputs(
            rollouts_train=REF, rewards_train=REF, rollouts_held_out=REF, rewards_held_out=REF
        ),
        parameters=label_preferences.Parameters(pairs_per_prompt=2),
    )
    yield generate_rollouts.GenerateRollouts(
        **common,
        inputs=generate_rollouts.Inputs(data=REF, policy=REF),
        parameters=generate_rollouts.Parameters(
            purpose="training",
            round_index=1,
            split="train",
            window=1,
            num_prompts=8,
            group_size=2,
            prompts_per_shard=4,
            temperature=1.0,
            max_completion_tokens=8,
            finish_fraction=1.0,
            max_prompt_tokens=32,
            dtype="float32",
            generator=GENERATOR,
        ),
    )
    yield score_rollouts.ScoreRollouts(
        **common,
        inputs=score_rollouts.Inputs(rollouts=REF, reward_model=REF),
        parameters=score_rollouts.Parameters(
            sources=SOURCES, code={"mine": "d" * 64}, dtype="float32", max_tokens_per_microbatch=64
        ),
    )
    yield select_rollouts.SelectRollouts(
        **common,
        inputs=select_rollouts.Inputs(rollouts=(REF, REF), rewards=(REF, REF)),
        parameters=select_rollouts.Parameters(round_index=1, num_groups=8, group_size=4, min_spread=0.5, is_last=False),
    )
    yield evaluate_policy.EvaluatePolicy(
        **common,
        inputs=evaluate_policy.Inputs(rollouts=REF, rewards=REF),
        parameters=evaluate_policy.Parameters(samples=4),
    )
    for settings in SETTINGS:
        yield compute_logprobs.ComputeLogprobs(
            **common,
            inputs=compute_logprobs.Inputs(rollouts=REF, state=STATE, ref_policy=REF, sampled_by=REF),
            parameters=compute_logprobs.Parameters(temperature=1.0, settings=settings, max_mismatch=1e-4),
        )
        yield estimate_advantages.EstimateAdvantages(
            **common,
            inputs=estimate_advantages.Inputs(rollouts=REF, rewards=REF, logprobs=REF, state=STATE),
            parameters=estimate_advantages.Parameters(algorithm=settings.algorithm),
        )
        yield update_policy.UpdatePolicy(
            **common,
            inputs=update_policy.Inputs(rollouts=REF, logprobs=REF, advantages=REF, state=STATE),
            parameters=update_policy.Parameters(round_index=1, temperature=1.0, settings=settings),
        )
        yield snapshot_trainer.SnapshotTrainer(
            **common,
            inputs=snapshot_trainer.Inputs(state=STATE),
            parameters=snapshot_trainer.Parameters(settings=settings),
        )
    for algorithm in OTHERS:
        yield estimate_advantages.EstimateAdvantages(
            **common,
            inputs=estimate_advantages.Inputs(rollouts=REF, rewards=REF, logprobs=REF, state=STATE),
            parameters=estimate_advantages.Parameters(algorithm=algorithm),
        )


JOBS = list(examples())


def leaves(tree: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every value that is no mapping of fields, and every item of a list."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list) and tree:
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


WORDS = (
    "cosine",
    "linear",
    "k2",
    "sequence_mean",
    "loss",
    "reward",
    "verl",
    "token_mean",
    "k1",
    "truncate",
    "mask",
    "gspo",
    "clip",
    "biased",
    "maximum",
    "raw",
    "rank",
    "first_pad",
    "seeded",
    "keep",
    "bfloat16",
    "evaluation",
    "held_out",
    "cpu",
    "cuda",
)
MORE_WORDS = ("length", "keywords", "always", "truncate_left", "messages", "rules:other", "z", "cpu", "answer", "A_KEY")
ANOTHER_FINGERPRINT = "b" * 32


def others(value: Any) -> list[Any]:
    """Values that a field might have instead."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value - 1, value * 2, value // 2, 0]
        case float():
            return [value / 2, value + 0.125, 0.0]
        case str():
            return [f"{value}x", ANOTHER_FINGERPRINT, *(word for word in (*WORDS, *MORE_WORDS) if word != value)]
        case None:
            return [1, 0.5, 1.5, "x", {}]
        case _:
            return [{"prompt": "other"}, ["other"], [9]]


def changed(job: Job, path: Path_) -> Job | None:
    """The job with another value at `path`, if the job allows one there."""
    document = job.model_dump(mode="json")
    for value in others(_at(document, path)):
        edited = copy.deepcopy(document)
        _at(edited, path[:-1])[path[-1]] = value
        try:
            found = type(job).model_validate(edited)
        except ValidationError:
            continue
        if found != job:
            return found
    return None


def _at(tree: Any, path: Path_) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def is_excluded(job: Job, path: Path_) -> bool:
    names = {"store", "compute.gpus", *job.EXCLUDED}
    return any(_is_within(path, name.split(".")) for name in names)


def _is_within(path: Path_, name: list[str]) -> bool:
    """Whether `path` is the field `name`, or below it; `*` stands for every item of a list."""
    pairs = zip(name, path, strict=False)
    return len(path) >= len(name) and all(part == "*" or part == str(found) for part, found in pairs)


def test_there_is_an_example_of_every_job() -> None:
    stages = {path.parent.name for path in (Path(__file__).parents[2] / "stages").glob("*/job.py")}
    assert {job.STAGE for job in JOBS} == stages


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.STAGE)
def test_every_field_counts_but_the_excluded_ones(job: Job) -> None:
    counted, left_out, fixed = [], [], []
    for path, _ in leaves(job.model_dump(mode="json")):
        other = changed(job, path)
        dotted = ".".join(map(str, path))
        if other is None:
            fixed.append(dotted)
        elif is_excluded(job, path):
            left_out.append(dotted)
            assert other.fingerprint == job.fingerprint, f"{dotted} is excluded, yet changes the fingerprint"
        else:
            counted.append(dotted)
            assert other.fingerprint != job.fingerprint, f"{dotted} does not change the fingerprint"
    # `kind` and `name` say which record of a union it is.
    assert "seed" in counted and "compute.threads" in counted and "store" in left_out
    assert {name.rpartition(".")[2] for name in fixed} <= {"kind", "name"} | TIED, fixed


# Fields that a validator ties to another; the tests below change them together.
# The last two, the schedule of the rounds and where REINFORCE++-baseline has its KL, have one value to choose from.
TIED = {"gpus", "0", "1", "ranks", "engines", "zero_stage", "tensor_parallel", "schedule", "kl_placement"}


def test_fields_that_are_tied_together() -> None:
    """ranks and gpus must agree, so both change; the ranks count, which devices they are does not."""
    for job in JOBS:
        for fields, counts in (({"gpus": [4, 5]}, False), ({"ranks": 1, "gpus": []}, True)):
            document = job.model_dump(mode="json")
            parameters = document.get("parameters", {})
            trainer = parameters.get("trainer") or parameters.get("settings", {}).get("trainer")
            if trainer:
                trainer.update(fields)
                assert (type(job).model_validate(document).fingerprint != job.fingerprint) == counts


def test_engines_and_their_devices_do_not_count() -> None:
    (job,) = (job for job in JOBS if job.STAGE == "generate_rollouts")
    document = job.model_dump(mode="json")
    document["parameters"]["generator"] |= {"engines": 1, "gpus": [5], "kv_cache_gib": 4}
    assert type(job).model_validate(document).fingerprint == job.fingerprint
    document["parameters"]["generator"] |= {"gpus": [4, 5], "tensor_parallel": 2}
    assert type(job).model_validate(document).fingerprint != job.fingerprint


def test_which_devices_does_not_count_how_many_does() -> None:
    for job in JOBS:
        compute = job.compute.model_copy(update={"gpus": (6, 7)})
        moved = type(job).model_validate(job.model_dump() | {"compute": compute})
        assert moved.fingerprint == job.fingerprint
        alone = type(job).model_validate(job.model_dump() | {"compute": Compute(ranks=1)})
        assert (alone.fingerprint == job.fingerprint) == (job.STAGE == "generate_rollouts")


def test_stage_and_version_count() -> None:
    job = JOBS[-1]
    newer = type("Newer", (type(job),), {"VERSION": job.VERSION + 1})
    other = type("Other", (type(job),), {"STAGE": "another"})
    prints = {kind.model_validate(job.model_dump()).fingerprint for kind in (type(job), newer, other)}
    assert len(prints) == 3


def test_how_a_server_is_asked_does_not_count_and_which_one_does() -> None:
    held_by = set()
    for job in JOBS:
        document = job.model_dump(mode="json")
        parameters = document.get("parameters", {})
        judge = ((parameters.get("data") or {}).get("preferences") or {}).get("judge", [])
        for source in (*parameters.get("sources", []), *judge):
            if source["kind"] == "http":
                source |= {"batch_size": 1, "timeout_seconds": 1.0, "budget_seconds": 1.0, "token_env": None}
                assert type(job).model_validate(document).fingerprint == job.fingerprint
                source |= {"url": "http://scorer/another"}
                assert type(job).model_validate(document).fingerprint != job.fingerprint
                held_by.add(job.STAGE)
    assert held_by == {"score_rollouts", "prepare_datasets"}


def test_bits_are_promised_on_cpu_and_not_by_somebody_elses_server() -> None:
    (job,) = (job for job in JOBS if job.STAGE == "score_rollouts")
    on_cpu = job.compute.model_copy(update={"device": "cpu", "gpus": ()})
    for sources, promised in ((("verifier",), True), (("verifier", "http"), False)):
        kinds = {"verifier": VerifierSource(verifier="countdown"), "http": HttpSource(url="http://127.0.0.1:1/score")}
        parameters = job.parameters.model_copy(update={"sources": tuple(kinds[name] for name in sources)})
        other = job.model_copy(update={"compute": on_cpu, "parameters": parameters})
        assert other.promises_bits is promised
    assert not job.model_copy(update={"compute": Compute(device="cuda", gpus=(0,))}).promises_bits
