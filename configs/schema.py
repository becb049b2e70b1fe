"""Everything a run may ask for, as one frozen record. Loading it needs neither torch nor Prefect."""

from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from configs.algorithms import Algorithm, Ppo
from configs.base import Frozen, PathText
from configs.critic import FromRewardModel
from configs.models import FromScratch, ModelConfig, RewardModelConfig, SftConfig
from configs.resources import Resources
from configs.rewards import RewardModelSource, RewardSource, VerifierSource
from configs.sources import DataConfig


class Sampling(Frozen):
    """How completions are sampled for training. The loss sees the same temperature."""

    temperature: float = Field(default=1.0, gt=0.0)
    max_completion_tokens: int = Field(default=16, ge=1)
    finish_fraction: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="below 1: once this share of a shard's completions has ended, the rest are cut at that length",
    )


class DynamicSampling(Frozen):
    """Groups whose rewards are all equal teach nothing: they are not trained on, and further prompts take their place.

    After Yu et al. 2025 (DAPO, section 3.2). max_batches: of `prompts_per_round` prompts, the first included, that a
    round may sample; DAPO's recipe has 10. Where they do not suffice, the round trains on the groups that there are.
    min_spread: a group has a signal if its highest and lowest reward are further apart than this.
    """

    max_batches: int = Field(default=10, ge=1)
    min_spread: float = Field(default=0.0, ge=0.0)


class Rounds(Frozen):
    """The loop: generate, score, estimate, update, `count` times."""

    count: int = Field(default=8, ge=1)
    prompts_per_round: int = Field(default=64, ge=1)
    group_size: int = Field(default=1, ge=1, description="rollouts of one prompt in one round")
    prompts_per_shard: int = Field(
        default=64, ge=1, description="prompts per rollout file: the most that a crash can cost"
    )
    dynamic_sampling: DynamicSampling | None = None
    snapshot_every: int = Field(
        default=5, ge=1, description="rounds between snapshots of the full trainer state; it changes no result"
    )
    staleness: Literal[0, 1] = Field(
        default=0,
        description="1: a round is sampled, while the one before it trains, from the policy that this one started from",
    )

    @property
    def shards(self) -> int:
        """Files that a batch of rollouts comes in."""
        return -(-self.prompts_per_round // self.prompts_per_shard)


class Retention(Frozen):
    """What of a run is kept on disk. All rollouts and what was computed from them are kept, always: they are the log
    from which everything else can be made again.

    snapshots: the newest full trainer states. policies: the newest policies, beside the best one; None keeps
    all.
    """

    snapshots: int = Field(default=2, ge=1)
    policies: int | None = Field(default=None, ge=1)


class Evaluation(Frozen):
    """Greedy completions of held-out prompts, before the first round and after every `every` rounds.

    rewards: the sources measured, each reported under its name. metric: the one that picks the best round.
    """

    prompts: int = Field(default=256, ge=1)
    every: int = Field(default=1, ge=1)
    rewards: tuple[RewardSource, ...] = (VerifierSource(verifier="exact_match"),)
    metric: str = "exact_match"
    samples: int = Field(default=8, ge=0, description="completions shown in the report")

    @model_validator(mode="after")
    def _metric_is_measured(self) -> "Evaluation":
        names = [source.name for source in self.rewards]
        if self.metric not in names:
            raise ValueError(f"metric {self.metric!r} is not among the evaluation rewards {names}")
        return self


class Tracking(Frozen):
    """wandb. "auto": online where a key is set, offline otherwise."""

    wandb: Literal["off", "auto", "offline"] = "off"
    project: str = "ratchet"


class RunConfig(Frozen):
    """One run of the flow `rlhf`, complete."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")
    seed: int = Field(default=17, ge=0, lt=2**31)
    store: PathText = Field(default="outputs", description="directory of artifacts and runs")
    data: DataConfig
    model: ModelConfig = ModelConfig()
    sft: SftConfig | None = SftConfig()
    reward_model: RewardModelConfig | None = None
    algorithm: Algorithm
    rewards: tuple[RewardSource, ...] = Field(min_length=1)
    sampling: Sampling = Sampling()
    rounds: Rounds = Rounds()
    evaluation: Evaluation = Evaluation()
    resources: Resources = Resources()
    retention: Retention = Retention()
    tracking: Tracking = Tracking()

    @model_validator(mode="before")
    @classmethod
    def _longest_completion(cls, tree: Any) -> Any:
        """The algorithm learns of sampling's limit, which is another section's."""
        if not isinstance(tree, dict) or not isinstance(tree.get("algorithm"), dict):
            return tree
        try:
            limit = Sampling.model_validate(tree.get("sampling", {})).max_completion_tokens
        except ValidationError:
            return tree  # said where sampling itself is validated
        return tree | {"algorithm": {"max_completion_tokens": limit} | tree["algorithm"]}

    @field_validator("store")
    @classmethod
    def _is_written_out(cls, value: str) -> str:
        if value.startswith("~"):
            raise ValueError(f"expected a path that is written out, found {value!a:.80}; write ${{HOME}} instead of ~")
        return value

    @property
    def uses_reward_model(self) -> bool:
        """Whether any part of the run reads a reward model."""
        sources = (*self.rewards, *self.evaluation.rewards)
        return self._critic_needs_reward_model or any(isinstance(s, RewardModelSource) for s in sources)

    @property
    def _critic_needs_reward_model(self) -> bool:
        return isinstance(self.algorithm, Ppo) and isinstance(self.algorithm.critic.initialize_from, FromRewardModel)

    @model_validator(mode="after")
    def _can_be_stale(self) -> "RunConfig":
        staleness, kept = self.rounds.staleness, self.retention.policies
        if staleness and self.resources.take_turns:
            raise ValueError(
                "rounds.staleness: expected 0 with resources.take_turns, because with 1 generator and trainer work at "
                f"the same time, found {staleness}"
            )
        if staleness and self.rounds.dynamic_sampling is not None:
            raise ValueError(
                "rounds.staleness: expected 0 with rounds.dynamic_sampling, because refills need the generator "
                f"while it samples the next round, found {staleness}"
            )
        if staleness and kept is not None and kept < 2:
            raise ValueError(
                "retention.policies: expected at least 2, because with rounds.staleness 1 the last but one has sampled "
                f"what the next round trains on, found {kept}"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        algorithm, rounds = self.algorithm, self.rounds
        if rounds.group_size < algorithm.MIN_GROUP_SIZE:
            raise ValueError(
                f"rounds.group_size: {algorithm.name} needs at least {algorithm.MIN_GROUP_SIZE} rollouts per prompt, "
                f"found {rounds.group_size}"
            )
        if rounds.dynamic_sampling is not None and algorithm.MIN_GROUP_SIZE < 2:
            raise ValueError(
                f"rounds.dynamic_sampling: expected a method that compares the rollouts of a group, found "
                f"{algorithm.name}, which learns from groups of equal rewards as well; leave it out"
            )
        if algorithm.max_completion_tokens not in (None, self.sampling.max_completion_tokens):
            raise ValueError(
                "algorithm.max_completion_tokens: expected that of sampling, "
                f"{self.sampling.max_completion_tokens}, found {algorithm.max_completion_tokens}; leave it out"
            )
        rollouts = rounds.prompts_per_round * rounds.group_size
        if rollouts < algorithm.num_minibatches:
            raise ValueError(
                f"algorithm.num_minibatches: expected at most {rollouts} (prompts_per_round x group_size), "
                f"found {algorithm.num_minibatches}"
            )
        if self.sft is not None and self.data.demonstrations is None:
            raise ValueError("data.demonstrations: expected a source, because sft is set; found none")
        if self.sft is None and isinstance(self.model.base, FromScratch):
            raise ValueError("sft: a model from scratch must be fine-tuned first; set sft, or model.base.path")
        if isinstance(algorithm, Ppo) and algorithm.critic.warmup_rounds >= rounds.count:
            raise ValueError(
                f"algorithm.critic.warmup_rounds: expected fewer than the {rounds.count} of rounds.count, so that the "
                f"policy is trained at all; found {algorithm.critic.warmup_rounds}"
            )
        if self._critic_needs_reward_model and self.reward_model is None:
            raise ValueError(
                "reward_model: expected settings, because ppo's critic starts from it; found none; without one, set "
                "algorithm.critic.initialize_from.kind to policy or directory"
            )
        if self.uses_reward_model and self.reward_model is None:
            raise ValueError("reward_model: expected settings, because a reward source needs it; found none")
        if self.reward_model is not None and self.data.preferences is None:
            raise ValueError("data.preferences: expected a source, because reward_model is set; found none")
        for where, sources in (("rewards", self.rewards), ("evaluation.rewards", self.evaluation.rewards)):
            names = [source.name for source in sources]
            if len(set(names)) != len(names):
                raise ValueError(f"{where}: expected distinct names, found {names}")
        judge = getattr(self.data.preferences, "judge", ())
        if any(isinstance(source, RewardModelSource) for source in judge):
            raise ValueError("data.preferences.judge: the reward model cannot judge the pairs it is trained on")
        if isinstance(self.model.base, FromScratch):
            need = self.data.max_prompt_tokens + max(
                self.sampling.max_completion_tokens, self.data.max_completion_tokens
            )
            if need > self.model.base.max_positions:
                raise ValueError(
                    f"model.base.max_positions: expected at least {need} (longest prompt + completion), "
                    f"found {self.model.base.max_positions}"
                )
        return self
