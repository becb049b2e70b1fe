"""Every path of a store is a function here. Knows names only: reads and writes nothing."""

from pathlib import Path

MANIFEST = "manifest.json"
JOB = "job.json"
RELEASED = "released.json"
SNAPSHOTS = "snapshots"
KEY_ID = "key_id"


def artifact(store: Path, stage: str, fingerprint: str) -> Path:
    """A committed artifact: exists if and only if it was renamed into place whole."""
    return store / "artifacts" / stage / fingerprint


def attempts(store: Path, stage: str, fingerprint: str) -> Path:
    """The unfinished tries of one artifact, `0001`, `0002`, ..."""
    return store / "attempts" / stage / fingerprint


def quarantine(store: Path, stage: str, fingerprint: str) -> Path:
    """Where damaged artifacts are kept for a person to look at."""
    return store / "quarantine" / stage / fingerprint


def lock(store: Path, stage: str, fingerprint: str) -> Path:
    """The lock file of one artifact under construction."""
    return store / "locks" / stage / f"{fingerprint}.lock"


def run_directory(store: Path, run: str) -> Path:
    """What a person looks at: configuration, jobs, logs, metrics, summary of one run."""
    return store / "runs" / run


def run_began(run: Path) -> Path:
    """What the run began with: digests, versions, settings of the machine."""
    return run / "began.json"


def run_kept(run: Path) -> Path:
    """Finished stages that stay as they are although the run's inputs have changed."""
    return run / "kept.json"


def run_job(run: Path, label: str) -> Path:
    """The job.json of one task of a run."""
    return run / "jobs" / f"{label}.json"


def round_of(label: str) -> int:
    """The round that a task's label names, with any number of digits: `round-012-...`, `after-1000-...`; else -1."""
    number = label.partition("-")[2].partition("-")[0]
    return int(number) if number.isdigit() else -1


def run_log(run: Path, worker: str) -> Path:
    """The log of one worker process."""
    return run / "logs" / f"{worker}.log"


def digest_cache(store: Path) -> Path:
    """Digests of the user's own input files by (path, size, mtime, inode)."""
    return store / "digests.json"


def shard(directory: Path, kind: str, index: int) -> Path:
    """The index-th Arrow file of a kind, in canonical order."""
    return directory / f"{kind}-{index:05d}.arrow"
