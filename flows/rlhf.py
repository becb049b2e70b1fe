"""The flow `rlhf`, and `python -m flows.rlhf`. Loads neither torch nor any engine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import flows.environment

if __name__ == "__main__":
    flows.environment.quiet_prefect_console()
from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from configs.load import ConfigError, load_config
from configs.schema import RunConfig
from flows.pipeline import Until, pipeline
from flows.preflight import preflight
from flows.report import Report
from stages.artifacts import store
from stages.artifacts.errors import DamagedArtifact, InputError, RatchetError
from stages.artifacts.store import ArtifactRef
from tasks.display import Console, Lines
from tasks.run import NotDone, Run

_REBUILDS = 8


def _flow_run_name() -> str:
    parameters = flow_run.parameters
    name = os.path.splitext(os.path.basename(str(parameters["config"])))[0]
    seed = parameters.get("seed")
    return f"{name}-{parameters['until']}" + (f"-seed{seed}" if seed is not None else "")


@flow(name="rlhf", flow_run_name=_flow_run_name, persist_result=False)
def rlhf(
    config: str = "configs/quickstart.yaml",
    overrides: dict[str, Any] | None = None,
    until: Until = "policy",
    rounds: Annotated[int | None, Field(ge=1, description="how many rounds, instead of the configuration's")] = None,
    seed: Annotated[int | None, Field(ge=0, lt=2**31, description="instead of the configuration's")] = None,
) -> None:
    """Demonstrations -> SFT -> reward model -> critic -> rounds of generation and optimisation.

    config: a YAML file. overrides: dotted keys and values, such as {"algorithm.kl_coef": 0.02}. until: where to
    stop. Running it again does only what is not done yet.
    """
    resolved = resolve(config, overrides=overrides or {}, rounds=rounds, seed=seed)
    run_pipeline(resolved, until=until, print_lines=_from_command_line)


_from_command_line = False


def resolve(config: str, *, overrides: Any, rounds: int | None, seed: int | None) -> RunConfig:
    """The configuration with everything that was asked for on top. Raises ConfigError."""
    pairs = dict(overrides) if isinstance(overrides, dict) else dict(o.split("=", 1) for o in overrides)
    pairs |= {} if rounds is None else {"rounds.count": rounds}
    pairs |= {} if seed is None else {"seed": seed}
    return load_config(config, overrides=pairs)


def run_pipeline(config: RunConfig, *, until: Until, print_lines: bool) -> Report:
    """Run what is not done yet. A damaged artifact is put aside and made again."""
    preflight(config)
    with Run(config, display=Console(print_lines=print_lines)) as run:
        run.display.say(f"run {run.name}: {run.directory}")
        for _ in range(_REBUILDS):
            try:
                return pipeline(run, until=until)
            except DamagedArtifact as damaged:
                ref = ArtifactRef(stage=damaged.stage, fingerprint=damaged.fingerprint)
                kept = store.move_to_quarantine(run.store, ref)
                run.display.say(f"{damaged}; moved to {kept}; making it again")
                run.outcomes.clear()
    raise RatchetError(f"{_REBUILDS} damaged artifacts in one run; the disk under {run.store} is not to be trusted")


def replay(config: RunConfig, *, until: Until) -> Report | None:
    """Look every artifact of the run up without starting anything. None if something is not done yet."""
    display = Lines()
    with Run(config, display=display, replay=True) as run:
        try:
            report = pipeline(run, until=until)
        except (NotDone, DamagedArtifact):
            return None
        for line in display.lines:
            print(line)
        return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the flow from the command line. Exit codes: 0 done, 2 bad input, others by kind of failure."""
    parser = argparse.ArgumentParser(prog="python -m flows.rlhf", description="Run the RLHF pipeline.")
    parser.add_argument("--config", default="configs/quickstart.yaml", help="YAML file (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--until", choices=["sft", "reward_model", "policy"], default="policy")
    parser.add_argument("--rounds", type=int, help="how many rounds, instead of the configuration's")
    parser.add_argument("--seed", type=int, help="instead of the configuration's")
    asked = parser.parse_args(arguments)
    try:
        config = load_config(asked.config, overrides=_overrides(asked))
        if replay(config, until=asked.until) is not None:
            return 0
        _run_flow(asked)
    except (ConfigError, InputError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2
    except RatchetError as error:
        print(f"error: {error}\nwhat was finished is kept; run the same command again to go on", file=sys.stderr)
        return error.exit_code
    return 0


def _overrides(asked: argparse.Namespace) -> list[str]:
    extra = {"rounds.count": asked.rounds, "seed": asked.seed}
    overrides: list[str] = asked.overrides
    return overrides + [f"{key}={value}" for key, value in extra.items() if value is not None]


def _run_flow(asked: argparse.Namespace) -> None:
    """Run under Prefect; this process prints the run's lines itself."""
    global _from_command_line
    _from_command_line = True
    pairs = dict(text.partition("=")[::2] for text in asked.overrides)
    rlhf(config=asked.config, overrides=pairs, until=asked.until, rounds=asked.rounds, seed=asked.seed)


if __name__ == "__main__":
    sys.exit(main())
