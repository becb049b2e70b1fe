"""The resident trainer, and how a lost one is brought back: newest snapshot, then redo from the committed rollouts.

The rounds' files are a write-ahead log. Nothing is generated again; each redone policy must be the committed one, bit
for bit, or the run stops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from configs.resources import TrainerResources
from stages.artifacts.durable import digest_file, remove
from stages.artifacts.errors import GateError
from stages.artifacts.manifest import Manifest, damaged, library_versions, read_manifest
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.store import is_released, open_artifact
from stages.job import Job
from stages.optimization import update
from stages.program import Context
from stages.snapshot_trainer.job import SnapshotTrainer
from stages.trainer import Trainer
from stages.update_policy.job import TrainerState, UpdatePolicy, UpdateSettings

_LIVE = "trainer"
_NOTHING = (
    "expected a committed update, found nothing; if finished stages were kept with --on-change keep, this one cannot "
    "be made again: --on-change rebuild"
)
_CHECKED = ("policy/", "trainer.json")


@dataclass(frozen=True)
class Redo:
    """One update to be made again, and the manifest of what it came to the first time."""

    job: UpdatePolicy
    manifest: Manifest


@dataclass(frozen=True)
class Recovery:
    """How to come back to a state: from `origin`, through `snapshot` if there is one, by `redo`, oldest first."""

    origin: TrainerState
    snapshot: ArtifactRef | None
    redo: tuple[Redo, ...]


def resident_trainer(job: Job, settings: UpdateSettings, state: TrainerState, context: Context) -> Trainer:
    """The live trainer if it stands at `state`, else a new one brought to it.

    Raises DamagedArtifact where a file that is needed is damaged, and GateError where a redone policy is not the
    committed one.
    """
    held = context.live.get(_LIVE)
    if held is not None and held[0] == _key(settings, state):
        trainer: Trainer = held[1]
        return trainer
    context.live.pop(_LIVE, None)
    with context.starting():
        trainer = _recovered(job, settings, plan_recovery(job, settings, state), context)
    context.live[_LIVE] = (_key(settings, state), trainer)
    return trainer


def _recovered(job: Job, settings: UpdateSettings, plan: Recovery, context: Context) -> Trainer:
    context.progress("loading trainer", 0, 1 + len(plan.redo))
    trainer = Trainer(job, settings, plan.origin)
    if plan.snapshot is not None:
        trainer.load(open_artifact(job.store, plan.snapshot))
    for done, redo in enumerate(plan.redo):
        context.progress("redoing updates", done, len(plan.redo))
        update(redo.job, trainer, replace(context))
        _require_the_committed_policy(redo, trainer, job, context)
    return trainer


def advance_resident_trainer(job: UpdatePolicy, settings: UpdateSettings, trainer: Trainer, context: Context) -> None:
    """Say that the live trainer now stands at the state that `job` makes."""
    critic = job.ref if trainer.critic is not None else None
    context.live[_LIVE] = (_key(settings, TrainerState(policy=job.ref, critic=critic)), trainer)


def drop_resident_trainer(context: Context) -> None:
    """Forget the live trainer: its state is in doubt."""
    context.live.pop(_LIVE, None)


def plan_recovery(job: Job, settings: UpdateSettings, state: TrainerState) -> Recovery:
    """Walk back from `state` to the newest snapshot that is there, and on to where the rounds began.

    Where the ranks or the ZeRO stage are other ones now and cannot read a snapshot, everything is redone from the
    origin. Raises DamagedArtifact if a manifest on the way is missing or damaged.
    """
    redo: list[Redo] = []
    snapshot: ArtifactRef | None = None
    while not state.is_fresh:
        manifest = read_manifest(job.store, state.policy)
        if manifest is None:
            raise damaged(state.policy, state.policy.path(job.store), _NOTHING)
        made_by = UpdatePolicy.model_validate(manifest.job | {"store": job.store})
        if snapshot is None:
            snapshot = _usable_snapshot(made_by, settings.trainer)
            if snapshot is None:
                redo.append(Redo(made_by, manifest))
        state = made_by.inputs.state
    return Recovery(origin=state, snapshot=snapshot, redo=tuple(reversed(redo)))


def _usable_snapshot(made_by: UpdatePolicy, now: TrainerResources) -> ArtifactRef | None:
    """The snapshot after an update, if it is there and can be read: by other ranks too, but not under ZeRO 3."""
    ref, then = SnapshotTrainer.after(made_by).ref, made_by.parameters.settings.trainer
    other_ranks = then.ranks != now.ranks and now.zero_stage == 3
    if then.zero_stage != now.zero_stage or other_ranks or is_released(made_by.store, ref):
        return None
    return ref if read_manifest(made_by.store, ref) is not None else None


def _require_the_committed_policy(redo: Redo, trainer: Trainer, job: Job, context: Context) -> None:
    """Gate: the redone policy has the committed one's bits. Without a promise of bits there is nothing to compare."""
    same = all(
        then.model_copy(update={"gpus": ()}) == now.model_copy(update={"gpus": ()})
        for then, now in (
            (redo.job.compute, job.compute),
            (redo.job.parameters.settings.trainer, trainer.settings.trainer),
        )
    )
    if redo.manifest.determinism != "A" or not same or redo.manifest.libraries != library_versions():
        return
    out = context.out.with_name(f"{context.out.name}.redo")
    trainer.save_policy(out, rank=context.rank)
    if context.rank != 0:
        return
    expected = {n: e.sha256 for n, e in redo.manifest.files.items() if n.startswith(_CHECKED)}
    found = {n: digest_file(Path(out / n)) for n in expected if (out / n).exists()}
    remove(out)
    for name, digest in expected.items():
        if found.get(name) != digest:
            raise GateError(
                f"redo of {redo.job.ref} (round {redo.job.parameters.round_index}) gave another {name}: expected "
                f"sha256 {digest[:16]}…, found {str(found.get(name))[:16]}…. The committed rollouts no longer lead "
                "to the committed policy: were libraries, code or the machine changed since?"
            )


def _key(settings: UpdateSettings, state: TrainerState) -> str:
    return f"{state.policy}|{state.critic}|{settings.model_dump_json()}"
