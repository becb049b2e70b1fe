"""Every Arrow schema, as a constant with a line per column and a version. Knows no stage."""

from __future__ import annotations

import pyarrow as pa

_IDS = pa.list_(pa.field("item", pa.int32(), nullable=False))
_FLOATS = pa.list_(pa.field("item", pa.float32(), nullable=False))
_KEY = [("prompt_id", pa.string(), "content hash of the prompt"), ("sample_index", pa.int32(), "0 .. group_size-1")]


def _schema(name: str, version: int, columns: list[tuple[str, pa.DataType, str]]) -> pa.Schema:
    fields = [pa.field(n, t, nullable=False, metadata={"doc": doc}) for n, t, doc in columns]
    return pa.schema(fields, metadata={"ratchet.schema": name, "ratchet.version": str(version)})


PROMPTS = _schema(
    "prompts",
    1,
    [
        ("prompt_id", pa.string(), "first 16 hex digits of the sha256 of the prompt's text"),
        ("prompt", pa.string(), "text as the policy sees it, chat template applied, without BOS"),
        ("prompt_ids", _IDS, "token ids, one BOS at most"),
        ("answer", pa.string(), "reference for verifiers; empty if the source has none"),
    ],
)
"""Prompts to sample from. One row per distinct prompt."""

DEMONSTRATIONS = _schema(
    "demonstrations",
    1,
    [
        ("prompt_id", pa.string(), "as in prompts"),
        ("prompt", pa.string(), "text, without BOS"),
        ("completion", pa.string(), "text, without EOS"),
        ("prompt_ids", _IDS, "token ids, one BOS at most"),
        ("completion_ids", _IDS, "token ids, ending in EOS"),
    ],
)
"""Supervised examples."""

PAIRS = _schema(
    "pairs",
    1,
    [
        ("prompt_id", pa.string(), "as in prompts"),
        ("prompt", pa.string(), "text, without BOS"),
        ("chosen", pa.string(), "the preferred completion, text"),
        ("rejected", pa.string(), "the other completion, text"),
        ("prompt_ids", _IDS, "token ids, one BOS at most"),
        ("chosen_ids", _IDS, "token ids, ending in EOS"),
        ("rejected_ids", _IDS, "token ids, ending in EOS"),
    ],
)
"""Preference pairs."""

ROLLOUTS = _schema(
    "rollouts",
    1,
    [
        ("round_index", pa.int32(), "from 0; -1 outside the training rounds"),
        *_KEY,
        ("group_id", pa.string(), "<round_index>/<prompt_id>: the rollouts of one prompt in one round"),
        ("policy_version", pa.string(), "fingerprint of the weights that sampled"),
        ("prompt_ids", _IDS, "token ids"),
        ("completion_ids", _IDS, "sampled token ids, the EOS included where it was sampled"),
        ("rollout_logprobs", _FLOATS, "of completion_ids, by the generator, after temperature; nats"),
        ("finish_reason", pa.dictionary(pa.int8(), pa.string()), "stop (EOS sampled) or length (cut)"),
        ("prompt", pa.string(), "text, for people"),
        ("completion", pa.string(), "text, for people and verifiers, without special tokens"),
        ("answer", pa.string(), "reference for verifiers; empty if there is none"),
    ],
)
"""One prompt, one completion and what was recorded while sampling."""

REWARDS = _schema(
    "rewards",
    1,
    [
        *_KEY,
        ("source", pa.string(), "name of the reward source; `total` is the weighted sum"),
        ("reward", pa.float32(), "after the source's normalising and clipping, before its weight"),
    ],
)
"""Rewards in long form: a row per rollout and source."""

GROUPS = _schema(
    "groups",
    1,
    [
        ("prompt_id", pa.string(), "the group's prompt"),
        ("batch", pa.int32(), "in which the round sampled it: 0, then the refills"),
        ("lowest", pa.float32(), "least total reward of the group"),
        ("highest", pa.float32(), "greatest total reward of the group"),
        ("fate", pa.dictionary(pa.int8(), pa.string()), "selected, no_signal or not_needed"),
    ],
)
"""What dynamic sampling made of each group of a round."""

LOGPROBS = _schema(
    "logprobs",
    1,
    [
        *_KEY,
        (
            "old_logprobs",
            _FLOATS,
            "of completion_ids, by the policy that sampled them, as the trainer computes it; nats",
        ),
        ("ref_logprobs", _FLOATS, "by the frozen reference; empty lists where no KL is asked for"),
        (
            "values",
            _FLOATS,
            "critic output before each completion token (first_pad: and after the last); empty without a critic",
        ),
    ],
)
"""What the trainer's models say of the rollouts before the update."""

ADVANTAGES = _schema(
    "advantages",
    1,
    [
        *_KEY,
        (
            "token_rewards",
            _FLOATS,
            "per completion token (first_pad: and after the last, where room is left), KL shaping included",
        ),
        ("advantages", _FLOATS, "per completion token, as the loss takes them"),
        ("returns", _FLOATS, "value targets, as many as token_rewards; empty lists without a critic"),
    ],
)
"""Credit per completion token."""

METRICS = _schema(
    "metrics",
    1,
    [
        ("round_index", pa.int32(), "-1 before the rounds"),
        ("stage", pa.string(), "which stage measured it"),
        ("step", pa.int32(), "optimizer step inside the stage; -1 for the stage as a whole"),
        ("metric", pa.string(), "name, with its unit"),
        ("value", pa.float64(), "the figure"),
    ],
)
"""Figures in long form."""

LEDGER = _schema(
    "ledger",
    4,
    [
        ("round_index", pa.int32(), "-1 before the rounds"),
        ("stage", pa.string(), "label of the stage within the run"),
        ("seconds", pa.float64(), "wall time from the end of the stage before to the end of this one; parts follow"),
        ("waiting_seconds", pa.float64(), "orchestration: Prefect, leases, lookups, the report, lost attempts"),
        (
            "start_seconds",
            pa.float64(),
            "until its workers were there, and in which they made, loaded or woke engines and models",
        ),
        ("work_seconds", pa.float64(), "in the stage itself"),
        ("commit_seconds", pa.float64(), "hashing, flushing, signing and naming the artifact"),
        ("ahead_seconds", pa.float64(), "before all that, beside the sampling of its rollouts (tasks/ahead.py)"),
        ("bytes", pa.int64(), "of the artifact"),
        ("tokens", pa.int64(), "sampled by a generator, or computed by a trainer's models"),
        ("padding_fraction", pa.float64(), "of the computed tokens"),
        (
            "model_flops",
            pa.float64(),
            "floating-point operations of the models' passes, forward and backward, or of decoding",
        ),
        ("least_seconds", pa.float64(), "the least work_seconds that the devices' measured limits allow; 0 if unknown"),
        ("tokens_per_second", pa.float64(), "of work_seconds and ahead_seconds"),
        ("limit_share", pa.float64(), "least_seconds of work_seconds and ahead_seconds; 0 if unknown"),
    ],
)
"""What each stage of a run cost, in the start that made it; zeros where an artifact of another run was used."""

ALL: dict[str, pa.Schema] = {
    "prompts": PROMPTS,
    "demonstrations": DEMONSTRATIONS,
    "pairs": PAIRS,
    "rollouts": ROLLOUTS,
    "rewards": REWARDS,
    "groups": GROUPS,
    "logprobs": LOGPROBS,
    "advantages": ADVANTAGES,
    "metrics": METRICS,
    "ledger": LEDGER,
}
