"""Where a critic comes from, the rounds in which it learns alone, and the reward model's loss, on the real engines."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.critic import Critic, FromDirectory, FromPolicy
from configs.models import Lora, Optimizer
from stages.artifacts.durable import read_json
from stages.artifacts.errors import InputError
from stages.artifacts.model_directory import SCALAR_HEAD
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.seeds import seed_at
from stages.job import Job
from stages.models.packing import pack
from stages.models.scalar import TokenScores, load_scalar_model, score_sequences
from stages.snapshot_trainer.job import SnapshotTrainer
from stages.update_policy.job import TrainerState, UpdatePolicy, UpdateSettings
from tests.integration.stores import FAST, PPO, SEED, House, hashes, settings
from tests.unit import rl_oracles

Gate = Callable[[Job], str]
Weights = dict[str, torch.Tensor]
LORA = Lora(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj", "down_proj"))
WARM = PPO.model_copy(
    update={
        "critic": Critic(warmup_rounds=2),
        "policy_optimizer": Optimizer(learning_rate=2e-4, warmup_steps=3),
        "critic_optimizer": Optimizer(learning_rate=2e-4, warmup_steps=3),
    }
)
CASES: dict[str, UpdateSettings] = {
    **{f"ZeRO {stage}": settings(WARM, zero_stage=stage) for stage in (0, 1, 2, 3)},
    "lora, ZeRO 1": settings(WARM, zero_stage=1, lora=LORA),
}


def body(directory: Path) -> Weights:
    weights = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in weights.items() if name not in (SCALAR_HEAD, "lm_head.weight")}


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# Where it comes from


def test_a_critic_from_the_policy_has_its_body_and_values_nothing_at_first(house: House, policy: ArtifactRef) -> None:
    critic = house.make(house.critic(policy=policy, start=FromPolicy())).path(house.store) / "critic"
    assert same(body(critic), body(policy.path(house.store) / "policy"))
    head = load_file(critic / "model.safetensors")[SCALAR_HEAD]
    assert head.shape == (1, 32) and not head.any()
    model = load_scalar_model(critic, dtype="float32")
    packed = pack([([5, 6, 7], [8, 9, 10, 11])], device=torch.device("cpu"))
    with torch.no_grad():
        assert TokenScores(model).eval()(packed, torch.arange(7)).tolist() == [0.0] * 7


def test_a_seeded_head_is_drawn_from_the_runs_seed(house: House, policy: ArtifactRef) -> None:
    job = house.critic(policy=policy, start=FromPolicy(head="seeded"))
    made = {
        seed: house.make(job.model_copy(update={"seed": seed})).path(house.store) / "critic"
        for seed in (SEED, SEED + 1)
    }
    heads = {seed: load_file(path / "model.safetensors")[SCALAR_HEAD] for seed, path in made.items()}
    assert all(same(body(path), body(policy.path(house.store) / "policy")) for path in made.values())
    assert 0.5 / 33 < heads[SEED].std() < 2 / 33 and not torch.equal(heads[SEED], heads[SEED + 1])
    assert house.again(job, pool=house.pools.of(job)) == hashes(job.ref.path(house.store))


@dataclass(frozen=True)
class Outside:
    """Model directories of a user's: copies, which a test may change."""

    house: House
    policy: ArtifactRef
    directory: Path

    def job(self, source: Path, **start: Any) -> Any:
        shutil.copytree(source, self.directory)
        return self.house.critic(policy=self.policy, start=FromDirectory(path=str(self.directory), **start))


@pytest.fixture
def outside(house: House, policy: ArtifactRef, tmp_path: Path) -> Outside:
    return Outside(house, policy, tmp_path / "model")


def test_a_critic_from_a_directory_keeps_body_and_head(
    house: House, outside: Outside, reward_model: ArtifactRef
) -> None:
    source = reward_model.path(house.store) / "reward_model"
    job = outside.job(source)
    made = house.make(job).path(house.store) / "critic"
    assert same(load_file(made / "model.safetensors"), load_file(source / "model.safetensors"))
    elsewhere = job.model_copy(
        update={"parameters": job.parameters.model_copy(update={"start": FromDirectory(path="elsewhere")})}
    )
    assert elsewhere.fingerprint == job.fingerprint  # where it lies does not count; its digest does


def test_a_language_model_from_a_directory_gets_the_head_that_is_asked_for(
    house: House, outside: Outside, policy: ArtifactRef, gate: Gate
) -> None:
    source = policy.path(house.store) / "policy"
    made = house.make(outside.job(source, head="zero")).path(house.store) / "critic"
    assert same(body(made), body(source)) and not load_file(made / "model.safetensors")[SCALAR_HEAD].any()
    with pytest.raises(
        InputError, match=f"expected a scalar head named {SCALAR_HEAD}, found none; is it a reward model"
    ):
        gate(house.critic(policy=policy, start=FromDirectory(path=str(outside.directory))))


def test_a_directory_that_cannot_be_a_critic_is_refused(
    house: House, outside: Outside, policy: ArtifactRef, reward_model: ArtifactRef, gate: Gate
) -> None:
    job = outside.job(reward_model.path(house.store) / "reward_model")
    (outside.directory / "modeling.py").write_text("import os\n")
    with pytest.raises(InputError, match=r"modeling.py: expected weights in safetensors and no code"):
        gate(job)
    (outside.directory / "modeling.py").unlink()
    tokenizer = outside.directory / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.write_text(text.replace('"a"', '"\N{SNOWMAN}"', 1))
    with pytest.raises(InputError, match=r"expected the policy's tokenizer, in which 'a' is .*, found no such token"):
        gate(job)
    tokenizer.write_text(text)
    weights = load_file(outside.directory / "model.safetensors")
    lost = weights.pop("model.layers.1.mlp.up_proj.weight")  # transformers would draw it anew, with a warning
    save_file(weights, outside.directory / "model.safetensors", metadata={"format": "pt"})
    assert lost.any() and "model.layers.1.mlp.up_proj.weight is in one of them alone; expected the same" in gate(job)


def test_a_body_that_is_not_the_sources_is_caught(
    house: House, policy: ArtifactRef, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeded bug: a weight that changes between loading and writing."""
    import stages.initialize_critic.run as program

    write = program.write_model

    def careless(weights: Weights, **more: Any) -> None:
        name = "model.norm.weight"
        write(weights | {name: weights[name] + 1e-6}, **more)

    monkeypatch.setattr(program, "write_model", careless)
    said = gate(house.critic(policy=policy, start=FromPolicy()))
    assert said.startswith("body of ") and said.endswith("model.norm.weight differs; expected the same bits")


# The rounds in which it learns alone


@dataclass(frozen=True)
class Rounds:
    """Three rounds, the first two of them the critic's alone; snapshots after the first and the last."""

    updates: list[UpdatePolicy]

    @property
    def snapshots(self) -> list[SnapshotTrainer]:
        return [SnapshotTrainer.after(self.updates[index]) for index in (0, 2)]


@pytest.fixture(scope="module")
def rounds(house: House, policy: ArtifactRef) -> dict[str, Rounds]:
    critic = house.make(house.critic(policy=policy, start=FromPolicy()))
    made = {}
    for name, chosen in CASES.items():
        state, updates = TrainerState(policy=policy, critic=critic), []
        for index in range(3):
            written = house.written_round(version=state.policy.fingerprint, seed=index)
            job = house.update(chosen, state, **written, round_index=index)
            house.make(job)
            if index in (0, 2):
                house.make(SnapshotTrainer.after(job))
            updates.append(job)
            state = TrainerState(policy=job.ref, critic=job.ref)
        made[name] = Rounds(updates)
    return made


@pytest.mark.parametrize("name", CASES)
def test_while_the_critic_warms_up_the_policy_stays_the_same_bits(
    house: House, policy: ArtifactRef, rounds: dict[str, Rounds], name: str
) -> None:
    updates = rounds[name].updates
    weights = [hashes(ref.path(house.store))["policy/model.safetensors"] for ref in (policy, *(j.ref for j in updates))]
    assert weights[0] == weights[1] == weights[2] != weights[3]
    critic = updates[0].inputs.state.critic
    assert critic is not None
    critics = [critic.path(house.store) / "critic"]
    critics += [job.ref.path(house.store) / "critic" for job in rounds[name].snapshots]
    start, first, last = (load_file(path / "model.safetensors") for path in critics)
    assert not same(start, first) and not same(first, last) and first[SCALAR_HEAD].any()


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_of_the_rounds_that_warm_up(house: House, rounds: dict[str, Rounds], name: str) -> None:
    metrics = [house.manifest(job.ref).metrics for job in rounds[name].updates]
    for found in metrics:
        assert found["optimizer_steps"] == 2.0 and found["critic_grad_norm"] > 0.01 and found["value_loss"] > 0.0
        assert math.isfinite(found["policy_loss"]) and found["policy_loss"] != 0.0
        assert found["entropy"] > 1.0 and found["kl_to_old"] >= 0.0
    assert ["policy_grad_norm" in found for found in metrics] == [False, False, True]
    # the policy's schedule begins where the policy does: 1/4 and 2/4 of the rate; the critic's is at 5/4 by then
    assert [found["learning_rate"] for found in metrics] == [0.0, 0.0, pytest.approx(2e-4 * (0.25 + 0.5) / 2)]
    counters = [read_json(job.ref.path(house.store) / "trainer.json") for job in rounds[name].updates]
    assert [c["optimizer_steps"] for c in counters] == [2, 4, 6]
    assert [c["policy_steps"] for c in counters] == [0, 0, 2]
    assert counters[0]["kl_coef"] == counters[1]["kl_coef"] == WARM.kl_coef != counters[2]["kl_coef"]


def test_rounds_that_warm_up_are_redone_and_resumed_to_the_same_bits(
    house: House, rounds: dict[str, Rounds], tmp_path: Path
) -> None:
    """From the snapshot that a round of warm-up left, and without any, in processes that know nothing."""
    different: list[str] = []
    with house.pools.fresh("trainer") as pool:
        for name, made in rounds.items():
            last = made.snapshots[1]
            committed = hashes(last.ref.path(house.store))
            away = [job.ref.path(house.store) for job in made.snapshots]
            away[1].rename(tmp_path / "last")
            from_snapshot = house.again(last, pool=pool)
            away[0].rename(tmp_path / "first")
            second = house.again(made.updates[1], pool=pool)
            from_nothing = house.again(last, pool=pool)
            (tmp_path / "first").rename(away[0])
            (tmp_path / "last").rename(away[1])
            different += [f"{name}, snapshot: {f}" for f in committed if from_snapshot[f] != committed[f]]
            different += [f"{name}, redo: {f}" for f in committed if from_nothing[f] != committed[f]]
            expected = hashes(made.updates[1].ref.path(house.store))
            different += [f"{name}, round 1: {f}" for f in expected if second[f] != expected[f]]
    assert different == []


def test_an_update_in_which_nothing_learns_has_failed(
    house: House, rounds: dict[str, Rounds], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeded bug: a trainer without its critic, in a round that is the critic's alone."""
    import stages.update_policy.run as program

    make = program.resident_trainer

    def without_critic(*arguments: Any) -> Any:
        trainer = make(*arguments)
        trainer.critic = None
        return trainer

    monkeypatch.setattr(program, "resident_trainer", without_critic)
    said = gate(rounds["ZeRO 1"].updates[0])
    assert said == "made 0 optimizer steps of the policy or the critic; expected 2, and at least one"


# The reward model's loss


@pytest.mark.parametrize(("margin", "label_smoothing", "center_coef"), [(0.0, 0.0, 0.0), (0.5, 0.1, 0.2)])
def test_margin_smoothing_and_centering_reach_the_reward_model(
    house: House, policy: ArtifactRef, margin: float, label_smoothing: float, center_coef: float
) -> None:
    """One optimizer step over every pair: its loss by the oracle, from the scores of the model that it starts from."""
    pairs = house.rows(house.data, "pairs_train")
    asked = {"margin": margin, "label_smoothing": label_smoothing, "center_coef": center_coef}
    made = house.make(house.reward_model(policy, batch_size=len(pairs), optimizer=FAST, **asked))
    torch.manual_seed(seed_at(SEED, "train_reward_model", "head"))
    model = load_scalar_model(policy.path(house.store) / "policy", dtype="float32", head="seeded")
    chosen, rejected = (
        score_sequences(model, [(p["prompt_ids"], p[c]) for p in pairs], max_tokens_per_microbatch=4096).tolist()
        for c in ("chosen_ids", "rejected_ids")
    )
    losses = rl_oracles.bradley_terry(chosen, rejected, margin=margin, label_smoothing=label_smoothing)
    middles = rl_oracles.centering(chosen, rejected)
    expected = rl_oracles.mean([a + center_coef * b for a, b in zip(losses, middles, strict=True)])
    (row,) = house.rows(made, "metrics")
    assert row["value"] == pytest.approx(expected, rel=1e-5)
