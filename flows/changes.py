"""What a run began with, and what has changed since: refused by name, or accepted and remembered."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any, Literal

from configs.algorithms import Ppo
from configs.critic import FromDirectory
from configs.models import Pretrained
from configs.rewards import FunctionSource
from configs.schema import RunConfig
from stages.artifacts import layout
from stages.artifacts.durable import read_json, write_json
from stages.artifacts.errors import InputError
from stages.artifacts.manifest import library_versions
from stages.prepare_datasets.digests import source_digests
from stages.rewards.code import code_digest
from tasks.kept import keep_committed, keep_nothing
from tasks.models import base_digest, directory_digest
from tasks.run import Run, run_name

OnChange = Literal["refuse", "rebuild", "keep"]
Difference = dict[str, str]
_TRAINER = ("ranks", "threads", "zero_stage", "offload_optimizer", "offload_parameters", "max_tokens_per_microbatch")
_GENERATOR = ("threads", "tensor_parallel", "max_concurrent", "eager")
_NO_RECIPE = ("library.", "python", "machine")  # what no recipe holds, so that rebuilding cannot heal it
_ABSENT = "nothing"
_SHOWN = 8


def inputs_of(config: RunConfig) -> dict[str, str]:
    """Everything beside the configuration's own keys that can change the bits of a result, by name."""
    store = Path(config.store).resolve()
    found = {f"data.{name}": digest for name, digest in source_digests(config.data, layout.digest_cache(store)).items()}
    if isinstance(config.model.base, Pretrained):
        found["model.base"] = base_digest(config.model.base, store=store)
    if isinstance(config.algorithm, Ppo) and isinstance(config.algorithm.critic.initialize_from, FromDirectory):
        path = config.algorithm.critic.initialize_from.path
        found["model.critic"] = directory_digest(path, store=store)
    found |= {f"library.{name}": version for name, version in library_versions().items()}
    for part, resources, names in (
        ("trainer", config.resources.trainer, _TRAINER),
        ("generator", config.resources.generator, _GENERATOR),
    ):
        found |= {f"resources.{part}.{name}": str(getattr(resources, name)) for name in names}
        found[f"resources.{part}.device"] = "cuda" if resources.gpus else "cpu"
    return found | {"python": platform.python_version(), "machine": platform.machine()}


def refuse_changes(config: RunConfig) -> None:
    """Raise InputError, a line per input that has changed since the run began. Writes nothing."""
    directory = _directory(config)
    began = _began(directory)
    if began is None:
        return
    differences = _differences(began["inputs"], inputs_of(config))
    if differences:
        what = [f"{d['key']}: was {d['was']} when the run began, is {d['now']} now" for d in differences]
        raise InputError("\n".join([*what, _what_to_do(directory.name, began["began_at"])]))


def begin(run: Run, *, on_change: OnChange) -> None:
    """Write down what the run begins with; at a later start, compare. Call it with the run's lease held.

    Raises InputError where an input has changed and on_change is "refuse".
    """
    path, config = layout.run_began(run.directory), run.config
    if on_change == "refuse":
        refuse_changes(config)
    now, rules = inputs_of(config), _rules(config)
    began = _began(run.directory, required=on_change == "refuse")
    if began is None:
        for line in compared_with_last(config):
            run.display.say(line)
        write_json(path, {"began_at": _time(), "inputs": now, "rules": rules, "accepted": []})
        return
    differences = _differences(began["inputs"], now)
    if on_change == "rebuild":
        keep_nothing(run.directory)
        run.kept = {}
    for rule in sorted(r for r in rules if began["rules"].get(r, rules[r]) != rules[r]):
        run.display.say(f"reward function {rule} has changed since the run began; what it scored is scored again")
    if differences:
        if on_change == "keep":
            run.kept = keep_committed(run.directory, store=run.store)
        began["accepted"].append({"when": _time(), "mode": on_change, "differences": differences})
        for d in differences:
            run.display.say(f"accepted ({on_change}): {d['key']}: {d['was']} -> {d['now']}")
    if began["inputs"] != now or began["rules"] != rules:
        write_json(path, began | {"inputs": now, "rules": rules})


def not_bit_identical(directory: Path) -> list[str]:
    """Why an undisturbed run would not end in the same bits; empty if it would."""
    began = _began(directory, required=False)
    reasons = []
    for accepted in began["accepted"] if began else []:
        for d in accepted["differences"]:
            if accepted["mode"] == "keep" or d["key"].startswith(_NO_RECIPE):
                reasons.append(f"{d['key']} {d['was']} -> {d['now']}")
    return reasons


def compared_with_last(config: RunConfig) -> list[str]:
    """What this run does otherwise than the newest one of the same name, a line per key."""
    mine = _directory(config)
    others = [p for p in mine.parent.glob(f"{config.name}-????????/config.json") if p.parent != mine]
    if not others:
        return []
    newest = max(others, key=lambda p: p.stat().st_mtime_ns)
    try:
        before = _flat(read_json(newest))
    except (OSError, ValueError):
        return []
    now = _flat(config.model_dump(mode="json"))
    ignored = ("store", "tracking.", "resources.", "retention.")
    keys = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k) and not k.startswith(ignored)]
    lines = [
        f"differs from run {newest.parent.name} in {key}: {before.get(key, _ABSENT)} -> {now.get(key, _ABSENT)}"
        for key in keys[:_SHOWN]
    ]
    return lines + ([f"and in {len(keys) - _SHOWN} more keys"] if len(keys) > _SHOWN else [])


def _directory(config: RunConfig) -> Path:
    return layout.run_directory(Path(config.store).resolve(), run_name(config))


def _began(directory: Path, *, required: bool = True) -> dict[str, Any] | None:
    """began.json; None if the run has not begun. Raises InputError if it is required and cannot be read."""
    path = layout.run_began(directory)
    try:
        began = read_json(path)
        if began["inputs"].keys() and isinstance(began["accepted"], list) and isinstance(began["rules"], dict):
            return dict(began)
        raise KeyError("inputs")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if not required:
            return None
        raise InputError(
            f"{path}: expected what the run began with, found a file that cannot be read ({type(error).__name__}); "
            "--on-change rebuild writes it anew"
        ) from None


def _differences(was: dict[str, str], now: dict[str, str]) -> list[Difference]:
    return [
        {"key": key, "was": _short(key, was), "now": _short(key, now)}
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
    ]


def _short(key: str, values: dict[str, str]) -> str:
    value = values.get(key, _ABSENT)
    is_digest = key.startswith(("data.", "model.")) and len(value) == 64
    return f"sha256 {value[:16]}…" if is_digest else value


def _what_to_do(name: str, began_at: str) -> str:
    return (
        f"run {name} began at {began_at} with other inputs: --on-change rebuild makes what depends on them again and "
        "keeps the rest; --on-change keep leaves everything finished as it is and makes what is left with the new "
        "inputs, not bit-identical; or put the old inputs back"
    )


def _rules(config: RunConfig) -> dict[str, str]:
    """Digests of the user's own reward functions."""
    judge = getattr(config.data.preferences, "judge", ())
    sources = (*config.rewards, *config.evaluation.rewards, *judge)
    return {s.function: code_digest(s.function) for s in sources if isinstance(s, FunctionSource)}


def _flat(tree: Any, prefix: str = "") -> dict[str, str]:
    """A nested document by dotted keys."""
    if isinstance(tree, dict | list) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, value in items for k, v in _flat(value, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): tree if isinstance(tree, str) else json.dumps(tree)}


def _time() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
