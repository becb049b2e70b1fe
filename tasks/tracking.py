"""wandb: the same figures as in the run directory. Off unless the configuration asks; offline unless a key is set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tasks.run import Run


class Tracker:
    """One wandb run per Ratchet run, under the run's own name, so that a resumed run goes on in the same one.

    Offline it lies under the run directory, in wandb/; `wandb sync` sends it later.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._mode = run.config.tracking.wandb
        self._wandb: Any = None

    def log(self, round_index: int, figures: dict[str, Any]) -> None:
        """Log a round's figures. Starts wandb on the first call; if that fails, later calls do nothing."""
        if self._wandb is None and self._mode != "off":
            mode, self._mode = self._mode, "off"
            self._wandb = self._start(offline=mode == "offline")
        if self._wandb is not None and round_index >= self._wandb.starting_step:
            self._wandb.log({name: value for name, value in figures.items() if name != "round"}, step=round_index)

    def finish(self) -> None:
        """Close the wandb run, if one was started."""
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None

    def _start(self, *, offline: bool) -> Any:
        if offline:  # wandb asks its server what telemetry it takes before it reads the mode given to init()
            os.environ["WANDB_MODE"] = "offline"
        import wandb

        offline = offline or not wandb.login(prompt=False)
        started = wandb.init(
            project=self._run.config.tracking.project,
            id=self._run.name,
            name=self._run.name,
            dir=str(self._run.directory),
            mode="offline" if offline else "online",
            resume=None if offline else "allow",
            config=self._run.config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.display.say(f"wandb: {Path(started.dir).parent if offline else started.url}")
        return started
