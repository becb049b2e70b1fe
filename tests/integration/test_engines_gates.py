"""Gates and adapters on the real engines, each gate with a seeded bug that it catches. One rank, in this process."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.models import Lora, ModelConfig, Optimizer
from configs.resources import TrainerResources
from stages.artifacts.errors import GateError, InputError
from stages.artifacts.model_directory import SCALAR_HEAD
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.seals import find_sealed
from stages.artifacts.store import new_attempt
from stages.compute_logprobs.run import run
from stages.job import Job
from stages.models.adapters import add_adapters, merged_state
from stages.models.batches import Cost, Microbatch, TokenBatch, microbatches
from stages.models.language import TokenLogprobs, base_model, export_policy, load_policy
from stages.models.scalar import load_scalar_model, require_same_head, score_sequences
from stages.program import Context
from stages.rollout_shards import digest_of_inputs, shards_of
from stages.update_policy.job import TrainerState
from tests.integration.stores import GRPO, PPO, House, Row, base, settings
from tests.unit.stage_artifacts import commit_files, run_stage

CPU = torch.device("cpu")
LORA = Lora(rank=4, alpha=16.0)
Gate = Callable[[Job], str]
Tables = Mapping[str, list[Row]]


def tiny(*, tied: bool = True) -> Any:
    torch.manual_seed(0)
    return base_model(ModelConfig(base=base(tied=tied)), bos=0, eos=1, pad=2)


def sentences(count: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 20, (count,), generator=generator).tolist()
    return [torch.randint(3, 290, (length,), generator=generator).tolist() for length in lengths]


def logprobs(model: Any, rows: list[list[int]]) -> torch.Tensor:
    batch = TokenBatch.of([row[:1] for row in rows], [row[1:] for row in rows], device=CPU)
    with torch.no_grad():
        found: torch.Tensor = TokenLogprobs(model).eval()(batch.packed, batch.select_M, batch.targets_M, 1.0)[0]
    return found


# The engine itself


def engine_of(model: Any, *, zero_stage: Any = 1, wrap: Any = TokenLogprobs) -> Any:
    from stages.engines.deepspeed_engine import TrainingEngine

    return TrainingEngine(
        wrap(model),
        optimizer=Optimizer(learning_rate=1e-3),
        resources=TrainerResources(zero_stage=zero_stage, threads=1),
        dtype="float32",
        device=CPU,
    )


def step(engine: Any, batches: list[Microbatch], *, factor: float = 1.0, power: float = 1.0) -> float:
    rows = sentences(6)

    def loss_of(batch: Microbatch) -> torch.Tensor:
        picked = [rows[index] for index in batch.rows]
        tokens = TokenBatch.of([row[:1] for row in picked], [row[1:] for row in picked], device=CPU)
        found, _ = engine(tokens.packed, tokens.select_M, tokens.targets_M, 1.0)
        loss: torch.Tensor = -(found * factor).sum().pow(power) / 60 * (0.0 if batch.is_filler else 1.0)
        return loss

    norm: float = engine.step(batches, loss_of, rate=1e-3, where=lambda batches: f"step 7 of {len(batches)}")
    return norm


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_filler_microbatches_change_no_bit(one_rank: None, zero_stage: int) -> None:
    states, norms = [], []
    for fillers in (0, 3):
        engine = engine_of(tiny(), zero_stage=zero_stage)
        batches = microbatches([Cost(own=len(row)) for row in sentences(6)], max_tokens=40)[0]
        batches += [Microbatch(rows=(index,), is_filler=True) for index in range(fillers)]
        norms.append([step(engine, batches) for _ in range(2)])
        states.append(engine.full_state())
    assert norms[0] == norms[1]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_stops_at_the_step(one_rank: None, zero_stage: int) -> None:
    """The loss is finite, its gradient is not: the derivative of the square root at 0."""
    batches = [Microbatch(rows=(0, 1))]
    healthy, sick = engine_of(tiny(), zero_stage=zero_stage), engine_of(tiny(), zero_stage=zero_stage)
    assert 0.01 < step(healthy, batches) < 100.0
    with pytest.raises(GateError, match=r"^step 7 of 1: gradient norm is (nan|inf|-1.0); expected a finite number"):
        step(sick, batches, factor=0.0, power=0.5)


def test_the_gradient_norm_is_the_gradients_norm_at_every_zero_stage(one_rank: None) -> None:
    model, rows = tiny(), sentences(6)
    batch = TokenBatch.of([row[:1] for row in rows], [row[1:] for row in rows], device=CPU)
    (-TokenLogprobs(model)(batch.packed, batch.select_M, batch.targets_M, 1.0)[0].sum() / 60).backward()
    expected = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in model.parameters()))
    for zero_stage in (0, 1, 2, 3):
        found = step(engine_of(tiny(), zero_stage=zero_stage), [Microbatch(rows=tuple(range(6)))])
        assert found == pytest.approx(expected, rel=1e-5), zero_stage


def test_a_step_over_nothing_is_refused(one_rank: None) -> None:
    with pytest.raises(GateError, match="expected at least one microbatch"):
        step(engine_of(tiny()), [])


# Adapters


@pytest.mark.parametrize("tied", [True, False])
def test_the_merged_policy_says_what_the_live_adapters_say(
    one_rank: None, house: House, policy: ArtifactRef, tmp_path: Path, tied: bool
) -> None:
    model = tiny(tied=tied)
    torch.manual_seed(1)
    add_adapters(model, LORA)
    engine = engine_of(model)
    before = engine.full_state()
    for _ in range(3):
        step(engine, [Microbatch(rows=tuple(range(6)))])
    after = engine.full_state()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if ".lora_" in name
    }
    rows = sentences(8, seed=3)
    live = logprobs(model, rows)
    own = {name.removeprefix("model."): tensor for name, tensor in after.items()}
    tokenizer = policy.path(house.store) / "policy"
    export_policy(merged_state(model, own), like=model, tokenizer=tokenizer, directory=tmp_path)
    assert torch.equal(live, logprobs(model, rows))  # exporting leaves the live model as it is
    merged = logprobs(load_policy(tmp_path, dtype="float32"), rows)
    assert (merged - live).abs().max() < 1e-5
    assert (merged - logprobs(tiny(tied=tied), rows)).abs().max() > 1e-3


def test_a_reward_model_trained_with_adapters(one_rank: None, house: House, policy: ArtifactRef) -> None:
    """Merged on disk; outside the adapters' modules and the head it is still the policy's body, bit for bit."""
    import stages.train_reward_model.run as program

    path, metrics = run_stage(program.run, house.reward_model(policy, lora=LORA))
    body = load_file(policy.path(house.store) / "policy" / "model.safetensors")
    trained = load_file(path / "reward_model" / "model.safetensors")
    assert {name for name in trained if "lora" in name or "base_layer" in name} == set()
    moved = {name for name in trained if name != SCALAR_HEAD and not torch.equal(trained[name], body[name])}
    assert moved == {name for name in body if any(module in name for module in LORA.target_modules)}
    assert metrics["held_out_accuracy"] >= 0.9  # the rejected replies are half as long: easy


# Reward model and critic


def test_a_score_depends_on_nothing_but_the_sequence(house: House, reward_model: ArtifactRef) -> None:
    model = load_scalar_model(reward_model.path(house.store) / "reward_model", dtype="float32")
    rows = [(row[:1], row[1:]) for row in sentences(23, seed=5)]
    alone = torch.cat([score_sequences(model, [row], max_tokens_per_microbatch=16) for row in rows])
    for limit in (16, 64, 100_000):
        together = score_sequences(model, rows, max_tokens_per_microbatch=limit)
        assert (together - alone).abs().max() < 1e-5
        backwards = score_sequences(model, rows[::-1], max_tokens_per_microbatch=limit)
        assert (backwards.flip(0) - alone).abs().max() < 1e-5
    assert alone.std() > 1e-3


def test_our_score_is_the_librarys(house: House, reward_model: ArtifactRef) -> None:
    """The same number as AutoModelForSequenceClassification gives for an unpadded sequence."""
    directory = reward_model.path(house.store) / "reward_model"
    library, ours = (load_scalar_model(directory, dtype="float32").eval() for _ in range(2))
    for row in sentences(4, seed=6):
        with torch.no_grad():
            theirs = float(library(input_ids=torch.tensor([row])).logits[0, 0])
        assert float(score_sequences(ours, [([], row)], max_tokens_per_microbatch=16)[0]) == pytest.approx(
            theirs, abs=1e-6
        )


def test_a_language_model_without_a_head_is_no_reward_model(house: House, policy: ArtifactRef) -> None:
    with pytest.raises(
        InputError, match=f"expected a scalar head named {SCALAR_HEAD}, found none; is it a reward model"
    ):
        load_scalar_model(policy.path(house.store) / "policy", dtype="float32")


def test_the_critic_has_the_reward_models_bits(house: House, reward_model: ArtifactRef) -> None:
    ours = load_file(house.make(house.critic(reward_model)).path(house.store) / "critic" / "model.safetensors")
    theirs = load_file(reward_model.path(house.store) / "reward_model" / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_head_drawn_anew_is_caught(
    house: House, reward_model: ArtifactRef, gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The seeded bug: a copy that loses the head and draws another, as loading through transformers would."""
    source = reward_model.path(house.store) / "reward_model"

    def careless(source: Path, target: Path) -> None:
        shutil.copytree(source, target)
        weights = load_file(target / "model.safetensors")
        torch.nn.init.normal_(weights[SCALAR_HEAD], std=0.02)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})

    import stages.initialize_critic.run as program

    require_same_head(source, source)
    monkeypatch.setattr(program.shutil, "copytree", _first(careless, shutil.copytree))
    message = gate(house.critic(reward_model))
    assert message.startswith("head of ") and message.endswith("expected the same bits")


def _first(once: Callable[[Path, Path], None], then: Callable[..., Any]) -> Callable[..., Any]:
    """`once` for the first call (which calls `then` itself), `then` after that."""
    calls: list[int] = []

    def call(source: Path, target: Path) -> Any:
        calls.append(1)
        return once(source, target) if len(calls) == 1 else then(source, target)

    return call


# Gates before the optimizer


def refused(house: House, gate: Gate, policy: ArtifactRef, change: Callable[[Tables], None], **round_: Any) -> str:
    """What update_policy says of a round that has been tampered with; nothing may be committed."""
    written = house.written_round(version=policy.fingerprint, change=change, **round_)
    job = house.update(settings(GRPO), TrainerState(policy=policy), **written)
    said = gate(job)
    assert not job.ref.path(house.store).exists()
    return said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("table, column", [("advantages", "advantages"), ("logprobs", "old_logprobs")])
def test_a_number_that_is_not_finite_is_named_with_its_prompt(
    house: House, policy: ArtifactRef, gate: Gate, value: float, table: str, column: str
) -> None:
    where: list[str] = []

    def plant(tables: Tables) -> None:
        row = tables[table][3]
        row[column][-1] = value
        where.append(row["prompt_id"])

    said = refused(house, gate, policy, plant)
    assert said.startswith(f"rollout prompt_id {where[0]}, sample_index 0: expected finite {column}, found {value}")


def test_values_and_returns_are_looked_at_too(
    house: House, policy: ArtifactRef, reward_model: ArtifactRef, gate: Gate
) -> None:
    critic = house.make(house.critic(reward_model))

    def plant(tables: Tables) -> None:
        tables["advantages"][0]["returns"][0] = math.nan

    written = house.written_round(version=policy.fingerprint, change=plant)
    said = gate(house.update(settings(PPO), TrainerState(policy=policy, critic=critic), **written))
    assert "expected finite returns, found nan; no optimizer step was made" in said


def test_an_update_over_no_rows_is_refused(house: House, policy: ArtifactRef, gate: Gate) -> None:
    said = refused(house, gate, policy, lambda tables: None, num_rollouts=0)
    assert said == "expected at least 2 rollouts, one per minibatch, found 0"
    said = refused(house, gate, policy, lambda tables: None, num_rollouts=1)
    assert said == "expected at least 2 rollouts, one per minibatch, found 1"


def test_files_whose_rows_differ_are_refused(house: House, policy: ArtifactRef, gate: Gate) -> None:
    def missing(tables: Tables) -> None:
        tables["advantages"].pop()

    def twice(tables: Tables) -> None:
        tables["logprobs"].append(tables["logprobs"][0])

    def short(tables: Tables) -> None:
        tables["advantages"][2]["advantages"].append(0.5)

    with pytest.raises(InputError, match="is in rollouts but not in advantages; expected the same rows in both"):
        refused(house, gate, policy, missing)
    with pytest.raises(InputError, match="occurs twice; expected each"):
        refused(house, gate, policy, twice)
    assert "advantages, one per token, found" in refused(house, gate, policy, short)


def test_weights_that_are_not_finite_are_named(house: House, policy: ArtifactRef, gate: Gate) -> None:
    """compute_logprobs finds them first; update_policy, given such a round anyway, names the parameter."""
    name = "model.layers.1.mlp.up_proj.weight"

    def write(out: Path) -> None:
        shutil.copytree(policy.path(house.store) / "policy", out / "policy")
        weights = load_file(out / "policy" / "model.safetensors")
        weights[name][3, 5] = math.nan
        save_file(weights, out / "policy" / "model.safetensors", metadata={"format": "pt"})

    sick = commit_files(house.store, "train_sft", write, content="nan")
    state, written = TrainerState(policy=sick), house.written_round(version=sick.fingerprint)
    looked = house.logprobs(settings(GRPO), state, rollouts=written["rollouts"], reference=policy)
    assert "expected finite old_logprobs, found [" in gate(looked)
    said = gate(house.update(settings(GRPO), state, **written))
    assert said.startswith("round 0, optimizer step 0, prompt_id ")
    assert ": loss of microbatch 0 is nan; expected a finite number; parameter" in said
    assert said.endswith(f"{name} is not finite")


def test_one_nan_among_the_rollouts_logprobs_is_found(house: House, policy: ArtifactRef, gate: Gate) -> None:
    """A NaN that is followed by good numbers must not be forgotten."""

    def plant(tables: Tables) -> None:
        tables["rollouts"][0]["rollout_logprobs"][0] = math.nan

    written = house.written_round(version=policy.fingerprint, change=plant)
    state = TrainerState(policy=policy)
    looked = house.logprobs(settings(GRPO), state, rollouts=written["rollouts"], reference=policy)
    loose = looked.model_copy(update={"parameters": looked.parameters.model_copy(update={"max_mismatch": 99.0})})
    assert "expected finite rollout_logprobs, found [nan" in gate(loose)


def test_rollouts_of_another_policy_version_are_refused(house: House, policy: ArtifactRef, gate: Gate) -> None:
    written = house.written_round(version="f" * 32)
    state = TrainerState(policy=policy)
    said = gate(house.logprobs(settings(GRPO), state, rollouts=written["rollouts"], reference=policy))
    assert f"was sampled by policy {'f' * 32}; expected {policy.fingerprint}: stale weights in the generator" in said


def test_a_logprob_that_is_off_names_rollout_and_token(house: House, policy: ArtifactRef, gate: Gate) -> None:
    written = house.written_round(version=policy.fingerprint)
    state = TrainerState(policy=policy)
    said = gate(house.logprobs(settings(GRPO), state, rollouts=written["rollouts"], reference=policy))
    assert "generator and trainer disagree" in said and "completion token" in said


def test_the_trainer_is_dropped_when_an_update_fails_midway(
    one_rank: None, house: House, policy: ArtifactRef, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A state in doubt is never used again: after the failure the same job gives the bits of a clean run."""
    import stages.optimization as optimization
    import stages.update_policy.run as program

    job = house.update(settings(GRPO), TrainerState(policy=policy), **house.written_round(version=policy.fingerprint))
    clean = house.make(job).path(house.store) / "policy" / "model.safetensors"
    live: dict[Any, Any] = {}
    (tmp_path / "failed").mkdir()
    (tmp_path / "again").mkdir()
    make = optimization._Step.make
    calls: list[int] = []

    def fail_on_the_second(self: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            raise GateError("planted")
        return make(self)

    monkeypatch.setattr(optimization._Step, "make", fail_on_the_second)
    with pytest.raises(GateError, match="planted"):
        program.run(job, Context(out=tmp_path / "failed", live=live))
    program.run(job, Context(out=tmp_path / "again", live=live))
    assert (tmp_path / "again" / "policy" / "model.safetensors").read_bytes() == clean.read_bytes()


def test_what_a_gate_refused_is_computed_anew(house: House, policy: ArtifactRef) -> None:
    """The cause may be the trainer's own: once it is gone, nothing of what it computed counts."""
    written = house.written_round(version=policy.fingerprint)
    looked = house.logprobs(settings(GRPO), TrainerState(policy=policy), rollouts=written["rollouts"], reference=policy)
    ahead, attempt = new_attempt(looked), new_attempt(looked)
    (shard, *_) = shards_of(looked.store, written["rollouts"])
    run(looked, Context(out=ahead, shard=shard))
    made_from = digest_of_inputs(looked, written["rollouts"], shard)
    assert find_sealed("logprobs-00000.arrow", attempts=[ahead], made_from=made_from) is not None
    with pytest.raises(GateError, match="generator and trainer disagree"):
        run(looked, Context(out=attempt))
    assert (attempt / "logprobs-00000.arrow").samefile(ahead / "logprobs-00000.arrow"), "it had been adopted"
    for each in (ahead, attempt):
        assert find_sealed("logprobs-00000.arrow", attempts=[each], made_from=made_from) is None
