"""The flow `rlhf`, and `python -m flows.rlhf`. Loads neither torch nor any engine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import flows.environment

if __name__ == "__main__":
    flows.environment.quiet_prefect_console()
from httpx import HTTPError
from prefect import flow
from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from pydantic import Field

from configs.load import ConfigError, load_config
from configs.schema import RunConfig
from configs.secrets import redact
from flows.changes import OnChange, begin, refuse_changes
from flows.machine import machine_warnings
from flows.pipeline import Until, pipeline
from flows.preflight import check_store, preflight
from flows.report import Report
from flows.server import leave_at_once, prefect_server, server_answers, stop_asking
from stages.artifacts import layout, store
from stages.artifacts.errors import DamagedArtifact, InputError, RatchetError, ReleasedArtifact, StaleArtifact
from stages.artifacts.private import keep_files_private
from stages.artifacts.reference import ArtifactRef
from stages.artifacts.room import room_for
from tasks.display import Console, Lines, hide_expected_tracebacks
from tasks.run import NotDone, Run, run_name

_REBUILDS = 8


def _flow_run_name() -> str:
    """The run's own name, under which its directory lies in the store; and where it stops, if not at the policy."""
    given = flow_run.parameters
    until = "" if given["until"] == "policy" else f"-until-{given['until']}"
    try:
        config = resolve(given["config"], overrides=given["overrides"], rounds=given["rounds"], seed=given["seed"])
    except ConfigError:  # the flow is about to say so itself
        return f"{os.path.splitext(os.path.basename(str(given['config'])))[0]}{until}"
    return f"{run_name(config)}{until}"


@flow(name="rlhf", flow_run_name=_flow_run_name, persist_result=False)
def rlhf(
    config: str = "configs/quickstart.yaml",
    overrides: dict[str, Any] | None = None,
    until: Until = "policy",
    rounds: Annotated[int | None, Field(ge=1, description="how many rounds, instead of the configuration's")] = None,
    seed: Annotated[int | None, Field(ge=0, lt=2**31, description="instead of the configuration's")] = None,
    on_change: Annotated[OnChange, Field(description="what happens if an input has changed since the run began")] = (
        "refuse"
    ),
    take_over: Annotated[bool, Field(description="from an owner that is stopped or out of reach")] = False,
) -> None:
    """Demonstrations -> SFT -> reward model -> critic -> rounds of generation and optimisation.

    config: a YAML file. overrides: dotted keys and values, such as {"algorithm.kl_coef": 0.02}. until: where to
    stop. on_change: if data, base model, libraries or the machine's settings have changed since the run began:
    refuse; rebuild what depends on them; or keep what is finished and go on with the new ones. Running it again does
    only what is not done yet.
    """
    keep_files_private()
    hide_expected_tracebacks()
    resolved = resolve(config, overrides=overrides, rounds=rounds, seed=seed)
    try:
        if _watched is None:
            run_pipeline(resolved, until=until, on_change=on_change, take_over=take_over, print_lines=False)
        else:
            _watched.run(resolved, until=until, on_change=on_change, take_over=take_over)
    except RatchetError:
        again = f"prefect flow-run retry {flow_run.id}"
        get_run_logger().info(f"what was finished is kept; once the cause is gone, this goes on: {again}")
        raise


@dataclass
class _Watched:
    """A run from the command line, and what it came to, whatever Prefect makes of it."""

    is_done: bool = False
    error: BaseException | None = None
    has_lost_view: bool = False

    def run(self, config: RunConfig, *, until: Until, on_change: OnChange, take_over: bool) -> None:
        """Run what is not done yet; this process prints the run's lines itself."""
        try:
            run_pipeline(config, until=until, on_change=on_change, print_lines=True, take_over=take_over)
            self.is_done = True
        except BaseException as error:
            self.error = error
            raise
        finally:
            stop_asking()


_watched: _Watched | None = None


def resolve(config: str, *, overrides: dict[str, Any] | None, rounds: int | None, seed: int | None) -> RunConfig:
    """The configuration with everything that was asked for on top. Raises ConfigError."""
    pairs = dict(overrides or {})
    pairs |= {} if rounds is None else {"rounds.count": rounds}
    pairs |= {} if seed is None else {"seed": seed}
    return load_config(config, overrides=pairs)


def run_pipeline(
    config: RunConfig, *, until: Until, on_change: OnChange, print_lines: bool, take_over: bool = False
) -> Report:
    """Run what is not done yet. A damaged artifact is put aside and made again, a released one made again."""
    preflight(config, until=until)
    display = Console(print_lines=print_lines)
    with room_for(Path(config.store)), Run(config, display=display, take_over=take_over) as run:
        run.display.say(f"run {run.name}: {run.directory}")
        if run.lease.fenced is not None:
            run.display.say(f"taken over from {run.lease.fenced}: it can commit nothing any more")
        begin(run, on_change=on_change)
        for line in machine_warnings(config):
            run.display.say(line)
        rebuilds = 0
        while rebuilds < _REBUILDS:
            try:
                return pipeline(run, until=until)
            except DamagedArtifact as damaged:
                run.lease.require()
                ref = ArtifactRef(stage=damaged.stage, fingerprint=damaged.fingerprint)
                kept = store.put_aside(run.store, ref, take_over=take_over)
                run.display.say(f"{damaged}; " + (f"moved to {kept}; making it again" if kept else "it is whole again"))
                run.outcomes.clear()
                last = damaged
                rebuilds += not isinstance(damaged, (ReleasedArtifact, StaleArtifact))
            except OSError:
                run.lease.require()  # who was taken over from may find its files gone
                raise
    raise DamagedArtifact(
        f"{_REBUILDS} damaged artifacts in one run, so {run.store} is on no disk to be trusted; the last: {last}",
        stage=last.stage,
        fingerprint=last.fingerprint,
    )


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


def _already_done(config: RunConfig, *, until: Until) -> bool:
    """Whether a replay finds everything. What keeps it from looking is for preflight to tell, with all other faults."""
    try:
        check_store(config)
        return replay(config, until=until) is not None
    except InputError:
        return False


_EXIT_CODES = """\
exit codes: 0 done; 2 configuration or data that cannot be used; 3 a check between stages failed; 4 an artifact is
damaged; 5 another process holds the run; 69 a reward server stays away; 74 no room to write; 75 workers were lost again
and again; 130, 143 interrupted (SIGINT, SIGTERM); 1 anything else. Whatever the code, what was finished is kept, and
the same command goes on from there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the flow from the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.rlhf", description="Run the RLHF pipeline.", epilog=_EXIT_CODES
    )
    parser.add_argument("--config", default="configs/quickstart.yaml", help="YAML file (default: %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="algorithm.kl_coef=0.02"
    )
    parser.add_argument("--until", choices=["sft", "reward_model", "policy"], default="policy", help="where to stop")
    parser.add_argument("--rounds", type=int, help="how many rounds, instead of the configuration's")
    parser.add_argument("--seed", type=int, help="instead of the configuration's")
    parser.add_argument(
        "--on-change",
        choices=["refuse", "rebuild", "keep"],
        default="refuse",
        help="if data, base model, libraries or machine settings have changed since the run began: refuse (default); "
        "make again what depends on them; or keep what is finished and go on with the new ones, not bit-identical",
    )
    parser.add_argument(
        "--take-over", action="store_true", help="take the run from an owner that is stopped or out of reach"
    )
    asked = parser.parse_args(arguments)
    keep_files_private()
    signal.signal(signal.SIGTERM, _raise_signal)
    try:
        config = load_config(asked.config, overrides=_overrides(asked))
        with room_for(Path(config.store)):
            if _already_done(config, until=asked.until):
                return 0
            preflight(config, until=asked.until)
            if asked.on_change == "refuse":
                refuse_changes(config)
        _run_flow(asked, config)
    except (ConfigError, InputError) as error:
        print("\n".join(f"error: {line}" for line in redact(str(error)).splitlines()), file=sys.stderr)
        return 2
    except RatchetError as error:
        print(f"error: {redact(str(error))}\n{_GO_ON}", file=sys.stderr)
        return error.exit_code
    except BaseException as error:
        number = _signal_behind(error)
        if number is None:
            raise
        print(f"interrupted by {signal.Signals(number).name}\n{_GO_ON}", file=sys.stderr)
        return 128 + number
    return 0


_GO_ON = "what was finished is kept; run the same command again to go on"


def _overrides(asked: argparse.Namespace) -> list[str]:
    extra = {"rounds.count": asked.rounds, "seed": asked.seed}
    overrides: list[str] = asked.overrides
    return overrides + [f"{key}={value}" for key, value in extra.items() if value is not None]


def _run_flow(asked: argparse.Namespace, config: RunConfig) -> None:
    """Run under Prefect, or, where its server is lost on the way, to the end without it."""
    global _watched
    _watched = watched = _Watched()
    pairs = dict(text.partition("=")[::2] for text in asked.overrides)
    directory = layout.run_directory(Path(config.store).resolve(), run_name(config))
    with prefect_server(log=layout.run_log(directory, "prefect")):
        try:
            rlhf(
                config=asked.config,
                overrides=pairs,
                until=asked.until,
                rounds=asked.rounds,
                seed=asked.seed,
                on_change=asked.on_change,
                take_over=asked.take_over,
            )
        except Exception as error:
            watched.has_lost_view = isinstance(error, HTTPError)  # it answers, but can write nothing, for one
            if error is watched.error or (server_answers() and not watched.has_lost_view):
                raise
            if watched.error is not None:
                raise watched.error from None
            print(f"Prefect's server is lost ({type(error).__name__}); its view of this run is incomplete", flush=True)
        finally:
            watched.has_lost_view = watched.has_lost_view or not server_answers()
        if not watched.is_done:
            watched.run(config, until=asked.until, on_change=asked.on_change, take_over=asked.take_over)


def _raise_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise TerminationSignal(number)


def _signal_behind(error: BaseException | None) -> int | None:
    """The signal that ended the run, wherever it is in the chain: Prefect may fail while it handles one."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return signal.SIGINT
        if isinstance(error, TerminationSignal):
            return error.signal
        error = error.__cause__ or error.__context__
    return None


if __name__ == "__main__":
    code = main()
    if _watched is not None and _watched.has_lost_view:
        leave_at_once(code)
    sys.exit(code)
