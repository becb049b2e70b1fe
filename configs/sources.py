"""Where data comes from and how it is read. Knows nothing of models, training or files on disk."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.base import Frozen, PathText
from configs.rewards import RewardSource

Shape = Literal[
    "auto",
    "messages",
    "prompt_completion",
    "preference",
    "transcript_pair",
    "question_answer",
    "pandalm",
    "columns",
]


_HUB_ID = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")


class FileSource(Frozen):
    """Rows in local files, or on the hub, read through `datasets`.

    path: a file, a folder, a glob, or (with `hub: true`) a hub id. JSON Lines, JSON, Parquet, CSV and
    Arrow are told apart by content and suffix; `.gz` is unpacked.
    columns: what each field of a record is made of: a column name (`{"prompt": "question"}`) or a template
    over columns (`{"prompt": "{Body} {Question}"}`). Setting any column selects the shape `columns`.
    """

    kind: Literal["files"] = "files"
    path: PathText
    hub: bool = False
    split: str = "train"
    revision: str | None = None
    shape: Shape = "auto"
    columns: dict[
        Literal["prompt", "completion", "chosen", "rejected", "messages", "answer", "role", "content"], str
    ] = Field(default_factory=dict)
    limit: int | None = Field(default=None, ge=1, description="read at most this many rows")

    @model_validator(mode="after")
    def _hub_id_is_no_path(self) -> "FileSource":
        if self.hub and not _HUB_ID.fullmatch(self.path):
            raise ValueError(f"path: expected a hub id such as owner/name, because hub is set; found {self.path!a:.80}")
        if self.hub and self.revision is not None and not _REVISION.fullmatch(self.revision):
            raise ValueError(f"revision: expected a branch, tag or commit, found {self.revision!a:.80}")
        return self


class SortDigitsSource(Frozen):
    """The embedded task: `Sort the digits 5291.` -> `1259`. Its generator ships with the project.

    lazy_fraction: share of the demonstrations written by a lazy writer who stops one digit early, so that
    supervised fine-tuning imitates a mediocre crowd and reinforcement learning has something to improve.
    """

    kind: Literal["sort_digits"] = "sort_digits"
    rows: int = Field(default=4000, ge=16)
    min_digits: int = Field(default=4, ge=1)
    max_digits: int = Field(default=8, le=32)
    lazy_fraction: float = Field(default=0.5, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _ordered(self) -> "SortDigitsSource":
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits ({self.min_digits}) must not exceed max_digits ({self.max_digits})")
        return self


class PolicySamplesSource(Frozen):
    """Preference pairs made by sampling the SFT policy and ordering its completions by a judge."""

    kind: Literal["policy_samples"] = "policy_samples"
    prompts: int = Field(default=512, ge=8, description="training prompts to sample")
    held_out_prompts: int = Field(default=128, ge=8)
    group_size: int = Field(default=4, ge=2, description="completions sampled per prompt")
    pairs_per_prompt: int = Field(default=2, ge=1)
    judge: tuple[RewardSource, ...] = Field(min_length=1)


DataSource = Annotated[FileSource | SortDigitsSource, Field(discriminator="kind")]
PreferenceSource = Annotated[FileSource | PolicySamplesSource, Field(discriminator="kind")]


class DataConfig(Frozen):
    """The three kinds of data of a run, and how they are cut.

    held_out_fraction: share of *prompts* held out, decided by a hash of the prompt's text, so that no prompt
    is ever in both parts, whichever file it came from.
    chat: whether plain-string prompts are wrapped in the tokenizer's chat template ("auto": only rows that
    come as messages are).
    """

    prompts: DataSource
    demonstrations: DataSource | None = None
    preferences: PreferenceSource | None = None
    held_out_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    max_prompt_tokens: int = Field(default=64, ge=1)
    max_completion_tokens: int = Field(
        default=64, ge=1, description="of demonstrations and preference pairs; longer rows are dropped and counted"
    )
    chat: Literal["auto", "always", "never"] = "auto"
    overlong: Literal["drop", "truncate_left"] = Field(
        default="drop", description="what happens to a prompt over max_prompt_tokens"
    )
