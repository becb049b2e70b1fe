"""Real vLLM through the real stages: what it samples does not depend on how, and the trainer agrees with it."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from configs.algorithms import Grpo, Ppo
from stages.artifacts import store
from stages.artifacts.errors import TransientError
from stages.artifacts.reference import ArtifactRef
from stages.compute_logprobs.job import ComputeLogprobs
from stages.update_policy.job import TrainerState, UpdatePolicy, UpdateSettings
from tests.integration.stores import GRPO, PPO, House, Row, hashes, sampled_shards, sealed_shards, settings
from tests.unit.stage_artifacts import commit_files

BOUND = 1e-4


@dataclass(frozen=True)
class Chain:
    """Two warm rounds and the rollouts after them."""

    chosen: UpdateSettings
    start: TrainerState
    trainer_jobs: list[ComputeLogprobs | UpdatePolicy]
    rollouts: list[ArtifactRef]
    logprobs: list[ArtifactRef]


def chain(house: House, algorithm: Ppo | Grpo, *, tied: bool) -> Chain:
    chosen = settings(algorithm, tied=tied)
    house.pools.of(house.rollouts(house.data)).start()
    policy = house.make(house.sft(tied=tied))
    critic = None
    if isinstance(algorithm, Ppo):
        critic = house.make(house.critic(house.make(house.reward_model(policy))))
    start = state = TrainerState(policy=policy, critic=critic)
    jobs: list[ComputeLogprobs | UpdatePolicy] = []
    all_rollouts, all_logprobs = [], []
    for round_index in range(3):
        rollouts = house.make(house.rollouts(state.policy, round_index=round_index, window=round_index))
        looked = house.logprobs(chosen, state, rollouts=rollouts, reference=policy)
        logprobs = house.make(looked)
        all_rollouts.append(rollouts)
        all_logprobs.append(logprobs)
        if round_index == 2:
            break
        credit = house.credit(chosen, state, rollouts=rollouts, logprobs=logprobs)
        update = house.update(
            chosen, state, rollouts=rollouts, logprobs=logprobs, advantages=credit, round_index=round_index
        )
        jobs += [looked, update]
        state = TrainerState(policy=house.make(update), critic=update.ref if critic is not None else None)
    return Chain(chosen, start, jobs, all_rollouts, all_logprobs)


@pytest.fixture(scope="module")
def chains(house: House) -> dict[str, Chain]:
    return {"ppo, tied": chain(house, PPO, tied=True), "grpo, untied": chain(house, GRPO, tied=False)}


# Agreement


@pytest.mark.parametrize("name", ["ppo, tied", "grpo, untied"])
def test_generator_and_trainer_agree_on_every_policy_version(house: House, chains: dict[str, Chain], name: str) -> None:
    versions = set()
    for rollouts, logprobs in zip(chains[name].rollouts, chains[name].logprobs, strict=True):
        theirs_by_key = sampled(house, rollouts)
        differences = [
            abs(ours - theirs)
            for row in house.rows(logprobs, "logprobs")
            for ours, theirs in zip(
                row["old_logprobs"],
                theirs_by_key[row["prompt_id"], row["sample_index"]]["rollout_logprobs"],
                strict=True,
            )
        ]
        assert len(theirs_by_key) == 16 and len(differences) > 32
        assert max(differences) < BOUND
        assert house.manifest(logprobs).metrics["logprob_difference_max"] == max(differences)
        versions |= {row["policy_version"] for row in theirs_by_key.values()}
    assert len(versions) == 3
    metrics = house.manifest(chains[name].trainer_jobs[1].ref).metrics
    assert metrics["policy_grad_norm"] > 1e-4 and metrics["optimizer_steps"] == 2.0


@pytest.mark.parametrize("name", ["ppo, tied", "grpo, untied"])
def test_at_the_first_step_of_the_first_round_ratio_is_one_and_kl_is_zero(
    house: House, chains: dict[str, Chain], name: str
) -> None:
    first = chains[name].trainer_jobs[1]
    figures = {row["metric"]: row["value"] for row in house.rows(first.ref, "metrics") if row["step"] == 0}
    assert figures["ratio"] == pytest.approx(1.0, abs=1e-5) and figures["kl_to_old"] < 1e-9
    assert figures["clip_fraction"] == 0.0
    for row in house.rows(chains[name].logprobs[0], "logprobs"):
        assert row["old_logprobs"] == pytest.approx(row["ref_logprobs"], abs=1e-5)
    later = [row for row in house.rows(chains[name].logprobs[2], "logprobs")]
    assert any(
        abs(o - r) > 1e-4 for row in later for o, r in zip(row["old_logprobs"], row["ref_logprobs"], strict=True)
    )


# The reload trap


@dataclass(frozen=True)
class Trapped:
    """A tied policy written without lm_head.weight, and the same one as this house writes it."""

    without_head: ArtifactRef
    with_head: ArtifactRef


@pytest.fixture(scope="module")
def trapped(house: House, chains: dict[str, Chain]) -> Trapped:
    """Another policy of the same shape, so that an engine that holds policy_0 reloads in place."""
    source = house.make(house.sft(tied=True, steps=12)).path(house.store) / "policy"

    def write(out: Path, *, keep_head: bool) -> None:
        (out / "policy").mkdir()
        for path in source.iterdir():
            if path.suffix != ".safetensors":
                (out / "policy" / path.name).write_bytes(path.read_bytes())
        weights = load_file(source / "model.safetensors")
        if not keep_head:
            del weights["lm_head.weight"]
        save_file(weights, out / "policy" / "model.safetensors", metadata={"format": "pt"})

    return Trapped(
        *(
            commit_files(house.store, "train_sft", lambda out, keep=keep: write(out, keep_head=keep), content=keep)  # type: ignore[misc]
            for keep in (False, True)
        )
    )


def test_our_export_names_the_tied_head(house: House) -> None:
    weights = load_file(house.make(house.sft(tied=True)).path(house.store) / "policy" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_a_reload_without_the_tied_head_keeps_the_old_one_and_the_gate_says_so(
    house: House, chains: dict[str, Chain], trapped: Trapped, gate: Any
) -> None:
    house.run(house.rollouts(chains["ppo, tied"].start.policy, round_index=90), fresh(house, "warm"))
    found = {}
    for name, policy in (("without", trapped.without_head), ("with", trapped.with_head)):
        rollouts = house.make(house.rollouts(policy, round_index=91))
        state = TrainerState(policy=policy)
        found[name] = house.logprobs(settings(GRPO), state, rollouts=rollouts, reference=policy)
    message = gate(found["without"])
    assert message.startswith("generator and trainer disagree: largest |old_logprobs - rollout_logprobs| is ")
    assert "expected at most 0.0001; artifact not committed" in message
    assert gate(found["with"]) == ""


# Sampling


def fresh(house: House, name: str) -> Path:
    out = house.store / "outs" / name
    out.mkdir(parents=True)
    return out


def sampled(house: House, ref: ArtifactRef) -> dict[tuple[str, int], Row]:
    return {(row["prompt_id"], row["sample_index"]): row for row in house.rows(ref, "rollouts")}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_same_tokens_and_logprobs_whole_and_in_shards(
    house: House, chains: dict[str, Chain], temperature: float
) -> None:
    policy = chains["ppo, tied"].start.policy
    rows = []
    for size in (8, 3, 1):
        job = house.rollouts(policy, temperature=temperature, prompts_per_shard=size, round_index=5)
        rows.append(sampled(house, house.make(job)))
    assert rows[0] == rows[1] == rows[2]
    first, second = (
        {key[0]: row["completion_ids"] for key, row in rows[0].items() if key[1] == index} for index in (0, 1)
    )
    assert (first == second) == (temperature == 0.0)  # two samples of a prompt are the same only if greedy


def test_a_completion_ends_in_eos_if_and_only_if_it_stopped(house: House, chains: dict[str, Chain]) -> None:
    policy = chains["ppo, tied"].start.policy
    eos = AutoTokenizer.from_pretrained(policy.path(house.store) / "policy").eos_token_id
    job = house.rollouts(policy, num_prompts=32, prompts_per_shard=32, max_completion_tokens=5, round_index=6)
    rows = list(sampled(house, house.make(job)).values())
    for row in rows:
        assert (row["completion_ids"][-1] == eos) == (row["finish_reason"] == "stop")
        assert eos not in row["completion_ids"][:-1]
        assert len(row["completion_ids"]) == len(row["rollout_logprobs"]) <= 5
        assert row["finish_reason"] == "stop" or len(row["completion_ids"]) == 5
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


def test_two_engines_and_a_killed_one_give_the_same_bits(house: House, chains: dict[str, Chain]) -> None:
    """Kill -9 after the first sealed shard; the next attempt generates only what is missing."""
    policy = chains["ppo, tied"].start.policy
    usual: dict[str, Any] = {"num_prompts": 48, "prompts_per_shard": 2, "round_index": 7}
    house.pools.of(house.rollouts(policy, engines=2)).start()
    undisturbed = fresh(house, "undisturbed")
    expected = house.run(house.rollouts(policy, **usual), undisturbed)
    assert sampled_shards(undisturbed) == 24
    job = house.rollouts(policy, engines=2, **usual)
    assert job.fingerprint == house.rollouts(policy, **usual).fingerprint
    pool = house.pools.of(job)
    whole = fresh(house, "two-engines")
    assert house.run(job, whole) == expected, "what both engines did, added up"
    assert hashes(whole) == hashes(undisturbed)

    def kill(what: str, done: int, total: int) -> None:
        if what == "rollout shards" and done == 1:
            for worker in pool._workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.child.pid, signal.SIGKILL)

    first = store.new_attempt(job)
    with pytest.raises(TransientError, match="ended with signal 9"):
        house.run(job, first, progress=kill)
    sealed = sealed_shards(first)
    assert 1 <= len(sealed) < 24
    second = store.new_attempt(job)
    with_one = house.rollouts(policy, **usual)
    assert house.run(with_one, second) == expected, "figures of the whole, whoever sampled it"
    assert sampled_shards(second) == 24 - len(sealed)
    assert hashes(second) == hashes(undisturbed)
    assert all(os.path.samefile(first / name, second / name) for name in sealed)


# Cold equals warm


def test_a_new_pool_for_each_stage_gives_the_same_files(house: House, chains: dict[str, Chain]) -> None:
    """PPO with its critic, and GRPO: two rounds in one pool, and each stage in processes of its own."""
    different: list[str] = []
    with contextlib.ExitStack() as stack:
        ready = [stack.enter_context(house.pools.fresh("trainer"))]  # one more than needed, so that imports overlap
        for place in range(4):
            if place < 3:
                ready.append(stack.enter_context(house.pools.fresh("trainer")))
            for name, made in chains.items():
                job = made.trainer_jobs[place]
                again, committed = house.again(job, pool=ready[place]), hashes(job.ref.path(house.store))
                assert again.keys() == committed.keys() and len(committed) >= 1
                different += [f"{name}, {job.STAGE}, {f}" for f in committed if again[f] != committed[f]]
            ready[place].kill()
    assert different == []


# bfloat16


def test_one_round_in_bfloat16(house: House, chains: dict[str, Chain]) -> None:
    """Another dtype is another engine in the same process; the gate then bounds the mean difference."""
    policy = chains["ppo, tied"].start.policy
    chosen = settings(GRPO, dtype="bfloat16")
    rollouts = house.make(house.rollouts(policy, dtype="bfloat16"))
    state = TrainerState(policy=policy)
    logprobs = house.make(house.logprobs(chosen, state, rollouts=rollouts, reference=policy))
    mean = house.manifest(logprobs).metrics["logprob_difference_mean"]
    assert 0.0 < mean < 0.05
    credit = house.credit(chosen, state, rollouts=rollouts, logprobs=logprobs)
    made = house.make(house.update(chosen, state, rollouts=rollouts, logprobs=logprobs, advantages=credit))
    before = load_file(policy.path(house.store) / "policy" / "model.safetensors")
    after = load_file(made.path(house.store) / "policy" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    changed = [name for name in after if not torch.equal(after[name], before[name].bfloat16())]
    assert "model.layers.1.mlp.down_proj.weight" in changed
    resumed = TrainerState(policy=made)
    rollouts = house.make(house.rollouts(made, dtype="bfloat16", round_index=1))
    logprobs = house.make(house.logprobs(chosen, resumed, rollouts=rollouts, reference=policy))
    assert house.manifest(logprobs).metrics["logprob_difference_mean"] < 0.05
