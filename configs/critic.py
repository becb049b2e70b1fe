"""What PPO's critic starts from, and when the policy begins to learn. Loads nothing."""

from typing import Annotated, Literal

from pydantic import Field

from configs.base import Frozen, PathText

NewHead = Literal["zero", "seeded"]
"""zero: every value is 0 at the start. seeded: normal with deviation 1 / (hidden + 1), as the reward model's."""


class FromRewardModel(Frozen):
    """The run's reward model: its body and its head."""

    kind: Literal["reward_model"] = "reward_model"


class FromPolicy(Frozen):
    """policy_0's body and a new head. The run needs no reward model for it."""

    kind: Literal["policy"] = "policy"
    head: NewHead = "zero"


class FromDirectory(Frozen):
    """A local model directory of the user's, with the policy's tokenizer: safetensors, config, no code.

    head: keep its own (a reward model or critic), or a new one, which a language model needs.
    """

    kind: Literal["directory"] = "directory"
    path: PathText
    head: Literal["keep"] | NewHead = "keep"


CriticStart = Annotated[FromRewardModel | FromPolicy | FromDirectory, Field(discriminator="kind")]


class Critic(Frozen):
    """initialize_from: whose body and head are critic_0. Its optimizer is `critic_optimizer`, beside this."""

    initialize_from: CriticStart = FromRewardModel()
    warmup_rounds: int = Field(
        default=0, ge=0, description="rounds at the start in which the critic learns and the policy stays as it is"
    )
