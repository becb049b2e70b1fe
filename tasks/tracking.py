"""wandb: the same figures as in the run directory. Off unless the configuration asks; offline unless a key is set."""

from __future__ import annotations

from typing import Any

from tasks.run import Run


class Tracker:
    """One wandb run per Ratchet run, under the run's own name, so that a resumed run goes on in the same one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._wandb: Any = None

    def log(self, round_index: int, figures: dict[str, Any]) -> None:
        """Log a round's figures. Starts wandb on the first call."""
        tracking = self._run.config.tracking
        if tracking.wandb == "off":
            return
        if self._wandb is None:
            import wandb

            key = wandb.api.api_key if tracking.wandb == "auto" else None
            self._wandb = wandb.init(
                project=tracking.project,
                id=self._run.name,
                name=self._run.name,
                dir=str(self._run.directory),
                mode="online" if key else "offline",
                resume="allow",
                config=self._run.config.model_dump(mode="json"),
            )
        self._wandb.log({name: value for name, value in figures.items() if name != "round"}, step=round_index)

    def finish(self) -> None:
        """Close the wandb run, if one was started."""
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None
