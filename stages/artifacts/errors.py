"""The error tree that stages and tasks share, and the exit code of each branch."""

from __future__ import annotations


class RatchetError(Exception):
    """Something that a person can act on. `exit_code` tells the launcher what kind it is."""

    exit_code = 1
    kind = "fatal"


class InputError(RatchetError, ValueError):
    """Configuration or data that cannot be used: the same command fails again until the input changes."""

    exit_code = 2
    kind = "input"


class GateError(RatchetError):
    """A check between stages failed: going on would train on wrong numbers."""

    exit_code = 3
    kind = "gate"


class DamagedArtifact(RatchetError):
    """A committed artifact no longer matches its manifest."""

    exit_code = 4
    kind = "damaged"

    def __init__(self, message: str, *, stage: str, fingerprint: str) -> None:
        super().__init__(message)
        self.stage = stage
        self.fingerprint = fingerprint


class ReleasedArtifact(DamagedArtifact):
    """A committed artifact whose files were deleted by the retention rule; the rollouts give it back."""

    kind = "released"


class StaleArtifact(DamagedArtifact):
    """A committed artifact that was made from another version of its parent than the one that is there now."""

    kind = "stale"


class LeaseHeld(RatchetError):
    """Somebody else is at work on the same run or artifact."""

    exit_code = 5
    kind = "held"


class SourceUnavailable(RatchetError):
    """A reward source stayed away for as long as it was allowed to: the same command goes on once it is back."""

    exit_code = 69
    kind = "unavailable"


class StoreFull(RatchetError):
    """There is no room to write: the same command goes on once there is."""

    exit_code = 74
    kind = "full"


class TransientError(RatchetError):
    """A worker was lost or something outside failed: worth another try."""

    exit_code = 75
    kind = "transient"


class WorkersLost(TransientError):
    """A stage lost its workers as often as it may."""
