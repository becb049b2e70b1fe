"""R18: inputs that change between a start and the next are refused by name, or accepted and remembered."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from configs.load import load_config
from configs.schema import RunConfig
from flows.changes import begin, compared_with_last, not_bit_identical, refuse_changes
from flows.report import Report
from stages.artifacts import layout
from stages.artifacts.durable import read_json, write_json
from stages.artifacts.errors import InputError
from stages.artifacts.reference import ArtifactRef
from stages.prepare_datasets.job import PrepareDatasets
from tasks.display import Lines
from tasks.kept import committed_stages
from tasks.launch import complete
from tasks.run import Run
from tests.fault.hostile_models import edit
from tests.integration.pipelines import ROOT, TINY_GRPO, environment
from tests.unit.stage_artifacts import commit_files

ROWS = [{"prompt": f"Sort {i}.", "completion": f"{i}", "answer": f"{i}"} for i in range(40)]


@dataclass
class Place:
    """A run's surroundings: data, a base model, a store, and settings that a trial may change."""

    directory: Path
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def began(self) -> Path:
        return layout.run_began(self.run().directory)

    def config(self) -> RunConfig:
        return load_config(self.directory / "run.yaml", overrides=self.more)

    def run(self) -> Run:
        return Run(self.config(), display=Lines())

    def start(self, on_change: Any = "refuse") -> list[str]:
        """One start of the run, as far as its engines. What it said."""
        with self.run() as run:
            begin(run, on_change=on_change)
            return cast(Lines, run.display).lines

    def write_rows(self, rows: list[dict[str, str]], name: str = "a.jsonl") -> None:
        (self.data / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def pretend(self, key: str, value: str | None) -> None:
        """As if the run had begun with another library, Python or machine."""
        began = read_json(self.began)
        if value is None:
            del began["inputs"][key]
        else:
            began["inputs"][key] = value
        write_json(self.began, began)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return new_place(tmp_path / "place")


def new_place(directory: Path) -> Place:
    place = Place(directory)
    place.data.mkdir(parents=True)
    place.model.mkdir()
    place.write_rows(ROWS)
    (place.model / "config.json").write_text('{"model_type": "llama"}')
    (place.model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    change = {
        "extends": str(ROOT / TINY_GRPO),
        "store": str(directory / "store"),
        "data": {"prompts": {"kind": "files", "path": str(place.data)}, "demonstrations": None},
        "model": {"base": {"kind": "pretrained", "path": str(place.model)}},
        "sft": None,
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(change))
    return place


def _set(**resources: Any) -> Callable[[Place], object]:
    """trainer_ranks=2 sets resources.trainer.ranks."""
    more = {f"resources.{name.replace('_', '.', 1)}": value for name, value in resources.items()}
    return lambda place: place.more.update(more)


def _began_with(**inputs: str | None) -> Callable[[Place], object]:
    return lambda place: [place.pretend(key.replace("__", "."), value) for key, value in inputs.items()]


# What changes, the keys that must be named, and whether making again what depends on it gives the same bits as ever.
TRIALS: dict[str, tuple[Callable[[Place], object], tuple[str, ...], bool]] = {
    "a row": (lambda p: p.write_rows([*ROWS[:-1], ROWS[0]]), ("data.prompts/a.jsonl",), True),
    "a row more": (lambda p: p.write_rows([*ROWS, ROWS[0]]), ("data.prompts/a.jsonl",), True),
    "a row less": (lambda p: p.write_rows(ROWS[1:]), ("data.prompts/a.jsonl",), True),
    "a file more": (lambda p: p.write_rows(ROWS, "b.jsonl"), ("data.prompts/b.jsonl",), True),
    "another file": (
        lambda p: (p.data / "a.jsonl").rename(p.data / "c.jsonl"),
        ("data.prompts/a.jsonl", "data.prompts/c.jsonl"),
        True,
    ),
    "the base's weights": (lambda p: (p.model / "model.safetensors").write_bytes(b"x"), ("model.base",), True),
    "the base's config": (lambda p: edit(p.model, "config.json", bos_token_id=5), ("model.base",), True),
    "a file more in the base": (lambda p: (p.model / "x.txt").write_text("x"), ("model.base",), True),
    "torch": (_began_with(library__torch="2.12.0"), ("library.torch",), False),
    "transformers": (_began_with(library__transformers="5.18.0"), ("library.transformers",), False),
    "deepspeed": (_began_with(library__deepspeed="0.18.0"), ("library.deepspeed",), False),
    "a library that is new": (_began_with(library__pyarrow=None), ("library.pyarrow",), False),
    "Python": (_began_with(python="3.11.0"), ("python",), False),
    "the machine": (_began_with(machine="aarch64"), ("machine",), False),
    "threads": (_set(trainer_threads=2), ("resources.trainer.threads",), True),
    "ranks": (_set(trainer_ranks=2), ("resources.trainer.ranks",), True),
    "ZeRO stage": (_set(trainer_zero_stage=2), ("resources.trainer.zero_stage",), True),
    "offload": (_set(trainer_offload_optimizer=True), ("resources.trainer.offload_optimizer",), True),
    "microbatch": (_set(trainer_max_tokens_per_microbatch=999), ("resources.trainer.max_tokens_per",), True),
    "GPUs": (_set(trainer_gpus=[0]), ("resources.trainer.device",), True),
    "the generator's threads": (_set(generator_threads=2), ("resources.generator.threads",), True),
    "the generator's batch": (_set(generator_max_concurrent=7), ("resources.generator.max_concurrent",), True),
    "three at once": (
        lambda p: (_set(trainer_ranks=2)(p), _began_with(python="3.11.0")(p), p.write_rows(ROWS[1:])),
        ("data.prompts/a.jsonl", "python", "resources.trainer.ranks"),
        False,
    ),
}


def test_changed_inputs_are_refused_by_name_or_accepted_and_recorded(tmp_path: Path) -> None:
    started = time.monotonic()
    for number, (name, (change, keys, heals)) in enumerate(TRIALS.items()):
        place = new_place(tmp_path / str(number))
        place.start()
        assert place.start() == [] and not_bit_identical(place.run().directory) == [], name
        change(place)
        before = read_json(place.began)
        for refuse in (lambda: refuse_changes(place.config()), place.start):  # noqa: B023
            with pytest.raises(InputError) as caught:
                refuse()
            *lines, advice = str(caught.value).splitlines()
            assert len(lines) == len(keys) and "--on-change rebuild" in advice and "--on-change keep" in advice, name
            assert all(line.startswith(key) for line, key in zip(lines, keys, strict=True)), (name, lines)
            assert all(": was " in line and " when the run began, is " in line for line in lines), (name, lines)
        assert read_json(place.began) == before, "a refusal changes nothing"
        mode = "keep" if number % 2 else "rebuild"
        said = place.start(mode)
        assert len(said) == len(keys) and said[0].startswith(f"accepted ({mode}): {keys[0]}"), (name, said)
        (accepted,) = read_json(place.began)["accepted"]
        assert accepted["mode"] == mode and len(accepted["differences"]) == len(keys)
        assert bool(not_bit_identical(place.run().directory)) == (mode == "keep" or not heals), name
        assert place.start() == [], "accepted once, it is what the run has now"
    seconds = time.monotonic() - started
    print(f"R18: {len(TRIALS)} of {len(TRIALS)} changes refused by name, accepted and recorded, {seconds:.1f} s in all")


@pytest.mark.parametrize("name", ["a row", "threads"])
def test_the_command_refuses_before_any_engine_starts(name: str, tmp_path: Path) -> None:
    place = new_place(tmp_path / "place")
    place.start()
    TRIALS[name][0](place)
    command = [sys.executable, "-m", "flows.rlhf", "--config", str(place.directory / "run.yaml")]
    command += [word for key, value in place.more.items() for word in ("--set", f"{key}={value}")]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    seconds = time.monotonic() - started
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 2), done.stdout + done.stderr
    assert lines[0].startswith(f"error: {TRIALS[name][1][0]}: was ") and "--on-change" in lines[1]
    assert seconds < 10.0 and not list((tmp_path / "place" / "store" / "runs").glob("*/logs/*"))
    print(f"R18: {name} refused from the command line in {seconds:.1f} s")


def test_the_same_run_by_another_layout_and_another_run_by_another_key(place: Place) -> None:
    place.start()
    name = place.run().name
    for key in ("resources.trainer.threads", "resources.attempts", "retention.snapshots", "rounds.snapshot_every"):
        assert Place(place.directory, {key: 2}).run().name == name, key
    other = Place(place.directory, {"rewards.0.weight": 0.5, "rounds.group_size": 8})
    assert other.run().name != name
    assert compared_with_last(place.config()) == []
    assert other.start() == [
        f"differs from run {name} in rewards.0.weight: 1.0 -> 0.5",
        f"differs from run {name} in rounds.group_size: 4 -> 8",
    ]
    assert other.start() == [], "said once"


def test_an_edited_reward_function_is_told_and_not_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place.directory))
    rule = place.directory / "rule_of_r18.py"
    rule.write_text("def reward(*, prompt, completion, answer):\n    return 1.0\n")
    place.more["rewards"] = [{"kind": "function", "function": "rule_of_r18:reward"}]
    assert place.start() == place.start() == []
    rule.write_text("def reward(*, prompt, completion, answer):\n    return 2.0\n")
    assert place.start() == [
        "reward function rule_of_r18:reward has changed since the run began; what it scored is scored again"
    ]
    assert place.start() == []


def test_a_damaged_record_is_refused_and_written_anew(place: Place) -> None:
    place.start()
    for damage in (b"", b"{}", b'{"inputs": 3, "accepted": [], "rules": {}}', b"\xff"):
        place.began.write_bytes(damage)
        with pytest.raises(InputError, match=r"began\.json: expected what the run began with.*--on-change rebuild"):
            place.start()
        assert place.start("rebuild") == []
        assert place.start() == []


def _job(run: Run, seed: int) -> PrepareDatasets:
    from stages.prepare_datasets.job import Parameters

    parameters = Parameters(data=run.config.data, base=run.config.model.base, digests={})
    return PrepareDatasets(store=run.store, seed=seed, parameters=parameters)


def _commit(run: Run, label: str, text: str) -> ArtifactRef:
    """A finished stage of the run, as launch.complete() leaves it."""
    ref = commit_files(run.store, "prepare_datasets", lambda out: (out / "x").write_text(text), content=text)
    write_json(layout.run_job(run.directory, label), {"stage": ref.stage, "fingerprint": ref.fingerprint})
    return ref


def test_what_is_kept_is_taken_as_it_is_until_a_rebuild(place: Place) -> None:
    place.start()
    run = place.run()
    done = _commit(run, "prepare_datasets", "finished")
    write_json(layout.run_job(run.directory, "train_sft"), {"stage": "train_sft", "fingerprint": "0" * 32})
    (layout.run_directory(run.store, run.name) / "jobs" / "broken.json").write_text("[")
    assert committed_stages(run.directory, store=run.store) == {"prepare_datasets": done}
    _set(trainer_threads=2)(place)
    place.start("keep")
    kept = Run(place.config(), display=Lines(), replay=True)
    assert kept.kept == {"prepare_datasets": done}
    outcome = complete(kept, _job(kept, seed=99), label="prepare_datasets")
    assert (outcome.ref, outcome.reused, outcome.path) == (done, True, done.path(kept.store))
    shutil.rmtree(done.path(kept.store))
    with pytest.raises(Exception, match="prepare_datasets"):  # NotDone: it is gone, so its recipe counts
        complete(kept, _job(kept, seed=99), label="prepare_datasets")
    _set(trainer_threads=1)(place)
    place.start("rebuild")
    assert place.run().kept == {}


def test_the_summary_says_that_the_run_is_not_bit_identical(place: Place) -> None:
    place.start()
    assert Report(place.run()).summary()["bit_reproducible"] is True
    _set(trainer_ranks=2)(place)
    place.start("keep")
    summary = Report(place.run()).summary()
    assert summary["bit_reproducible"] is False
    assert summary["not_bit_identical"] == ["resources.trainer.ranks 1 -> 2"]
