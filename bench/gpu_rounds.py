"""The rounds that bench/gpu.py times: one job after the other, for a model of a known shape with random weights."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from bench.stages_alone import House
from configs.algorithms import Grpo, Ppo
from configs.critic import FromPolicy
from configs.models import FromScratch, ModelConfig, Optimizer
from configs.resources import GeneratorResources, TrainerResources
from configs.rewards import VerifierSource
from configs.sources import DataConfig, FileSource
from stages.artifacts.reference import ArtifactRef
from stages.compute_logprobs import job as logprobs_contract
from stages.estimate_advantages import job as advantages_contract
from stages.generate_rollouts import job as rollouts_contract
from stages.initialize_critic import job as critic_contract
from stages.prepare_datasets import job as data_contract
from stages.prepare_datasets.digests import source_digests
from stages.score_rollouts import job as rewards_contract
from stages.train_sft import job as sft_contract
from stages.update_policy.job import Inputs, Parameters, TrainerState, UpdatePolicy, UpdateSettings

SEED = 17
_PROMPT_TOKENS_PER_WORD = 4


def _shape(
    hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, *, tied: bool, words: int = 151_936
) -> FromScratch:
    return FromScratch(
        vocabulary=words,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        mlp=mlp,
        max_positions=32_768,
        tied_embeddings=tied,
    )


SHAPES = {
    "tiny": _shape(64, 2, 2, 1, 128, tied=True, words=512),
    "0.5b": _shape(896, 24, 14, 2, 4864, tied=True),
    "1.5b": _shape(1536, 28, 12, 2, 8960, tied=True),
    "3b": _shape(2048, 36, 16, 2, 11_008, tied=True),
    "7b": _shape(3584, 28, 28, 4, 18_944, tied=False, words=152_064),
}
"""Of the Qwen 2.5 models; `tiny` is for trying the bench on a CPU."""


def make_rounds(house: House, shape: FromScratch, asked: argparse.Namespace) -> None:
    """Data, policy_0 with random weights, and the rounds."""
    config = _data(house.store, asked)
    of_data = data_contract.Parameters(data=config, base=shape, digests=source_digests(config, None))
    data = house.make(data_contract.PrepareDatasets(store=house.store, seed=SEED, parameters=of_data))
    model = ModelConfig(base=shape, dtype=asked.dtype, gradient_checkpointing=asked.checkpointing)
    rate = Optimizer(learning_rate=1e-6)
    given: dict[str, Any] = {"policy_optimizer": rate, "num_minibatches": 4, "kl_coef": 0.01}
    algorithm = Ppo(critic_optimizer=rate, **given) if asked.algorithm == "ppo" else Grpo(**given)
    trainer = TrainerResources(
        gpus=house.gpus, threads=asked.threads, zero_stage=1, max_tokens_per_microbatch=asked.microbatch_tokens
    )
    settings = UpdateSettings(model=model, algorithm=algorithm, trainer=trainer)
    shared = _shared(house)
    of_policy = sft_contract.Parameters(model=model, sft=None, trainer=trainer)
    policy = house.make(sft_contract.TrainSft(inputs=sft_contract.Inputs(data=data), parameters=of_policy, **shared))
    state = TrainerState(policy=policy)
    if isinstance(algorithm, Ppo):
        of_critic = critic_contract.Parameters(start=FromPolicy(), dtype=asked.dtype)
        start = critic_contract.Inputs(reward_model=None, policy=policy)
        critic = house.make(critic_contract.InitializeCritic(inputs=start, parameters=of_critic, **shared))
        state = TrainerState(policy=policy, critic=critic)
    for index in range(asked.rounds):
        state = _round(house, asked, index=index, data=data, ref_policy=policy, state=state, settings=settings)


def _round(
    house: House,
    asked: argparse.Namespace,
    *,
    index: int,
    data: ArtifactRef,
    ref_policy: ArtifactRef,
    state: TrainerState,
    settings: UpdateSettings,
) -> TrainerState:
    """Generate, score, look, credit, update."""
    rollouts, rewards = _sample(house, asked, index=index, data=data, policy=state.policy)
    shared = _shared(house)
    bound = 1e-4 if asked.dtype == "float32" else 0.05
    logprobs = house.make(
        logprobs_contract.ComputeLogprobs(
            inputs=logprobs_contract.Inputs(rollouts=rollouts, state=state, ref_policy=ref_policy),
            parameters=logprobs_contract.Parameters(temperature=1.0, settings=settings, max_mismatch=bound),
            **shared,
        ),
        round_index=index,
    )
    credit = advantages_contract.Inputs(rollouts=rollouts, rewards=rewards, logprobs=logprobs, state=state)
    advantages = house.make(
        advantages_contract.EstimateAdvantages(
            store=house.store,
            seed=SEED,
            inputs=credit,
            parameters=advantages_contract.Parameters(algorithm=settings.algorithm),
        ),
        round_index=index,
    )
    update = house.make(
        UpdatePolicy(
            inputs=Inputs(rollouts=rollouts, logprobs=logprobs, advantages=advantages, state=state),
            parameters=Parameters(round_index=index, temperature=1.0, settings=settings),
            **shared,
        ),
        round_index=index,
    )
    return TrainerState(policy=update, critic=update if isinstance(settings.algorithm, Ppo) else None)


def _sample(
    house: House, asked: argparse.Namespace, *, index: int, data: ArtifactRef, policy: ArtifactRef
) -> tuple[ArtifactRef, ArtifactRef]:
    """Generate and score: rollouts and their rewards."""
    shared = _shared(house)
    of_rollouts = rollouts_contract.Parameters(
        purpose="training",
        round_index=index,
        split="train",
        window=index,
        num_prompts=asked.prompts,
        group_size=asked.group,
        prompts_per_shard=asked.prompts,
        temperature=1.0,
        max_completion_tokens=asked.tokens,
        finish_fraction=1.0,
        max_prompt_tokens=_PROMPT_TOKENS_PER_WORD * asked.prompt_words,
        dtype=asked.dtype,
        generator=GeneratorResources(
            gpus=house.gpus,
            threads=asked.threads,
            max_concurrent=asked.concurrent,
            eager=asked.eager,
            gpu_memory_utilization=asked.gpu_memory,
        ),
    )
    sampled_from = rollouts_contract.Inputs(data=data, policy=policy)
    rollouts = house.make(
        rollouts_contract.GenerateRollouts(inputs=sampled_from, parameters=of_rollouts, **shared), round_index=index
    )
    of_rewards = rewards_contract.Parameters(
        sources=(VerifierSource(verifier="length", options={"target": asked.tokens}),),
        code={},
        dtype=asked.dtype,
        max_tokens_per_microbatch=asked.microbatch_tokens,
    )
    rewards = house.make(
        rewards_contract.ScoreRollouts(
            inputs=rewards_contract.Inputs(rollouts=rollouts), parameters=of_rewards, **shared
        ),
        round_index=index,
    )
    return rollouts, rewards


def _shared(house: House) -> dict[str, Any]:
    """What every job of a model has."""
    return {"store": house.store, "seed": SEED, "compute": house.compute}


def _data(directory: Path, asked: argparse.Namespace) -> DataConfig:
    """Prompts of so many made-up words, enough for every round."""
    chance, path = random.Random(SEED), directory / "prompts.jsonl"
    words = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    count = 2 * asked.rounds * asked.prompts + 20
    texts = (" ".join(chance.choices(words, k=asked.prompt_words)) for _ in range(count))
    path.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    return DataConfig(
        prompts=FileSource(path=str(path)), max_prompt_tokens=_PROMPT_TOKENS_PER_WORD * asked.prompt_words
    )
