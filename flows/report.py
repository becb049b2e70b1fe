"""What a run came to: a line per round, a summary, Arrow metrics, Prefect artifacts. Computes nothing but means."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from prefect.context import FlowRunContext
from prefect.runtime import deployment

from configs.rewards import RewardModelSource
from flows.changes import not_bit_identical
from flows.ledger import Ledger, summary_table
from flows.round import RoundResult
from flows.view import PrefectView
from stages.artifacts import layout
from stages.artifacts.durable import read_json, write_bytes, write_json
from stages.artifacts.reference import ArtifactRef
from tasks.run import Outcome, Run
from tasks.tracking import Tracker

Row = dict[str, Any]
_PUBLISHED_ROUNDS = 50
_COLUMNS = (
    *("round", "held_out", "proxy", "reward", "kl", "entropy", "clip", "tokens"),
    *("gen_tok/s", "train_tok/s", "seconds", "waiting"),
)


class Report:
    """Collects what the rounds came to and shows it as it comes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows: list[Row] = []
        self.evaluations: list[tuple[int, Outcome]] = []
        self.states: dict[int, ArtifactRef] = {}
        self._view = PrefectView(run)
        self._tracker = Tracker(run)
        self._ledger = Ledger(run)

    def start(self, evaluation: Outcome) -> None:
        """The policy before the first round."""
        self.evaluations.append((-1, evaluation))
        if not self.run.replay:
            self._ledger.write()
        self.run.display.say(table_line(_COLUMNS))
        self._show(round_row(-1, None, evaluation, self.run))

    def add_round(self, result: RoundResult, evaluation: Outcome | None) -> None:
        """A finished round."""
        if evaluation is not None:
            self.evaluations.append((result.round_index, evaluation))
        self.states[result.round_index] = result.update.ref
        self._show(round_row(result.round_index, result, evaluation, self.run))
        if not self.run.replay:
            self._ledger.write()
            self._link_policies()
            figures = self.rows[-1] | self._ledger.of_round(result.round_index)
            self._try("wandb", lambda: self._tracker.log(result.round_index, figures))
            self._try("Prefect artifacts", lambda: self._view.add_round(result, self._shown()))

    def finish(self, *, policy: Outcome, reward_model: Outcome | None) -> None:
        """The summary: what got better, where everything lies, what to type next."""
        lines = summary_lines(self, policy=policy, reward_model=reward_model)
        if not self.run.replay:
            self._ledger.write()
            write_bytes(self.run.directory / "summary.md", ("\n".join(lines) + "\n").encode())
            write_json(self.run.directory / "summary.json", self.summary())
            self._try("wandb", self._tracker.finish)
            self._try("Prefect artifacts", lambda: self._view.finish(lines))
        for line in lines:
            self.run.display.say(line)

    @property
    def costs(self) -> list[Row]:
        """What each stage cost so far."""
        return self._ledger.rows

    def best(self) -> tuple[int, Outcome] | None:
        """Round and evaluation with the best figure of `evaluation.metric`; the earliest of equals."""
        name = f"{self.run.config.evaluation.metric}_mean"
        return max(self.evaluations, key=lambda e: (e[1].metrics[name], -e[0]), default=None)

    def policy_of(self, round_index: int) -> Path:
        """The directory of the policy after a round."""
        return self.states[round_index].path(self.run.store) / "policy"

    def summary(self) -> Row:
        """The run's figures as one JSON document."""
        best = self.best()
        return {
            "run": self.run.name,
            "rounds": self.rows,
            "best_round": best[0] if best else None,
            "final_policy": str(self.policy_of(max(self.states))) if self.states else None,
            "final_policy_sha256": policy_digest(self.policy_of(max(self.states))) if self.states else None,
            "bit_reproducible": not not_bit_identical(self.run.directory),
            "not_bit_identical": not_bit_identical(self.run.directory),
        }

    def _shown(self) -> list[dict[str, str]]:
        """The newest rounds as text: Prefect keeps the table of every time, and a table of all would grow with each."""
        return [shown_row(row) for row in self.rows[-_PUBLISHED_ROUNDS:]]

    def _show(self, row: Row) -> None:
        self.rows.append(row)
        self.run.display.say(table_line(shown_row(row).values()))

    def _link_policies(self) -> None:
        """`best` and `last` in the run directory point at the policies' directories."""
        best = self.best()
        targets = {"last": max(self.states, default=None), "best": best[0] if best else None}
        for name, index in targets.items():
            if index is None or index not in self.states:
                continue
            link, temporary = self.run.directory / name, self.run.directory / f".{name}.tmp"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(self.policy_of(index))
            os.replace(temporary, link)

    def _try(self, what: str, publish: Callable[[], None]) -> None:
        """Show something in a view of the run. The run goes on without it: a view's server may be away."""
        try:
            publish()
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            self.run.display.say(f"{what} not published: {type(error).__name__}: {reason}")


def table_line(cells: Iterable[str]) -> str:
    """Cells under one another."""
    return " ".join(f"{cell:>{max(8, len(name))}}" for name, cell in zip(_COLUMNS, cells, strict=True))


def shown_row(row: Row) -> dict[str, str]:
    """A line of the table, as text."""
    cells = {name: row.get(name) for name in _COLUMNS}
    shown = {
        name: "-" if cell is None else f"{cell:.4f}" if isinstance(cell, float) and abs(cell) < 100 else f"{cell:.0f}"
        for name, cell in cells.items()
    }
    return shown | {"round": "before" if row["round"] < 0 else str(row["round"])}


def round_row(index: int, result: RoundResult | None, evaluation: Outcome | None, run: Run) -> Row:
    """One line of the table.

    held_out: the evaluation's metric (gold). proxy: the reward model on the same completions, where it is measured.
    reward: mean over all rollouts of the round, trained on or not. kl: to the reference, per token, nats. tokens: mean
    completion length. seconds: in the round's stages; with rounds.staleness 1 its generation went on beside the round
    before. waiting: between them, orchestration and commits, in this start of the run. With dynamic sampling also
    batches, and dropped: the share of groups without a signal.
    """
    row: Row = {"round": index}
    if evaluation is not None:
        row["held_out"] = evaluation.metrics[f"{run.config.evaluation.metric}_mean"]
        for source in run.config.evaluation.rewards:
            row[f"held_out/{source.name}"] = evaluation.metrics[f"{source.name}_mean"]
            if isinstance(source, RewardModelSource):
                row["proxy"] = evaluation.metrics[f"{source.name}_mean"]
    if result is not None:
        sampling = result.sampling
        tasks = (*sampling.outcomes, result.logprobs, result.advantages, result.update)
        sampled = [batch.rollouts for batch in sampling.batches]
        row |= {
            "reward": fmean(batch.rewards.metrics["total_mean"] for batch in sampling.batches),
            "kl": result.advantages.metrics.get("kl_to_ref_mean"),
            "entropy": result.update.metrics["entropy"],
            "clip": result.update.metrics["clip_fraction"],
            "tokens": result.advantages.metrics["completion_tokens_mean"],
            "gen_tok/s": sum(o.metrics["generated_tokens"] for o in sampled) / sum(o.seconds for o in sampled),
            "train_tok/s": result.update.metrics["completion_tokens"] / result.update.seconds,
            "seconds": sum(task.seconds for task in tasks),
            "waiting": sum(task.costs.waiting_seconds + task.costs.commit_seconds for task in tasks),
        }
        if sampling.selections:
            figures = sampling.selections[-1].metrics
            row |= {"batches": figures["batches"], "dropped": figures["dropped_group_fraction"]}
    return row


def summary_lines(report: Report, *, policy: Outcome, reward_model: Outcome | None) -> list[str]:
    """The end of a run, as a person reads it."""
    run, lines = report.run, [""]
    fresh = [outcome for outcome in run.outcomes if not outcome.reused]
    lines.append(
        f"run {run.name}: {len(run.outcomes)} stages, {len(fresh)} run now, {len(run.outcomes) - len(fresh)} already "
        f"done, {time.monotonic() - run.started:.1f} s"
    )
    if reasons := not_bit_identical(run.directory):
        lines.append(f"not bit-identical: {'; '.join(reasons)}")
    if reward_model is not None:
        exam = reward_model.metrics
        lines.append(
            f"reward model: held-out pair accuracy {exam['held_out_accuracy']:.3f} "
            f"[{exam['held_out_accuracy_low']:.3f}, {exam['held_out_accuracy_high']:.3f}] "
            f"on {exam['held_out_pairs']:.0f} pairs, calibration error {exam['calibration_error']:.3f}"
        )
    best = report.best()
    if report.rows:
        lines += ["", table_line(_COLUMNS), *(table_line(shown_row(row).values()) for row in report.rows), ""]
    if best is not None and len(report.evaluations) > 1:
        lines += _before_and_after(report, best[0])
    if costs := summary_table(report.costs):
        lines += ["", *costs, ""]
    lines += [f"policy after SFT: {policy.path / 'policy'}", f"everything of this run: {run.directory}"]
    if report.states:
        last = max(report.states)
        lines.append(f"last policy: {run.directory / 'last'} -> {report.policy_of(last)}")
        if best is not None and best[0] in report.states:
            lines.append(f"best policy: {run.directory / 'best'} -> {report.policy_of(best[0])}")
        lines.append(f"last policy's sha256: {policy_digest(report.policy_of(last))}")
    return lines + _what_to_type_next()


def _what_to_type_next() -> list[str]:
    context = FlowRunContext.get()
    other = "--set algorithm.kl_coef=0.02"
    if context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None:
        values = """'overrides={"algorithm.kl_coef": 0.02}'"""
        other = f"prefect deployment run rlhf/{deployment.name} --param {values}"
    return [
        "",
        "what to type next:",
        "  the same command again: finds everything done, in seconds",
        f"  {other}: another run that shares every stage that does not depend on it",
    ]


def _before_and_after(report: Report, best: int) -> list[str]:
    (_, before), (_, after) = report.evaluations[0], report.evaluations[-1]
    at_best = dict(report.evaluations)[best]
    metric = report.run.config.evaluation.metric
    lines = [f"{'held-out figures':<28}{'before':>10}{'best':>10}{'last':>10}"]
    for source in report.run.config.evaluation.rewards:
        name = f"{source.name}_mean"
        figures = "".join(f"{outcome.metrics[name]:>10.3f}" for outcome in (before, at_best, after))
        lines.append(f"  {source.name:<26}{figures}")
    first = next(row for row in report.rows if "reward" in row)
    lines.append(
        f"mean training reward: {first['reward']:.3f} in the first round, {report.rows[-1]['reward']:.3f} in the last"
    )
    where = "before the rounds" if best < 0 else f"after round {best}"
    lines.append(f"best by {metric}: {where}")
    return lines


def policy_digest(policy: Path) -> str:
    """sha256 of an update's policy weights, from its manifest (of the first file, where they are in several)."""
    files = read_json(policy.parent / layout.MANIFEST)["files"]
    name = next(name for name in sorted(files) if name.startswith("policy/") and name.endswith(".safetensors"))
    return str(files[name]["sha256"])
