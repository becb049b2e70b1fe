"""What a completion can be rewarded by. Knows nothing of how a reward is computed."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from configs.base import Frozen

VerifierName = Literal["exact_match", "numeric_answer", "countdown", "position_match", "length", "keywords"]


class RewardModelSource(Frozen):
    """The run's reward model. normalize: (score - mean) / std with the model's own stored statistics."""

    kind: Literal["reward_model"] = "reward_model"
    name: str = "reward_model"
    weight: float = 1.0
    normalize: bool = True
    clip: float | None = Field(default=None, gt=0.0, description="clip to [-clip, clip] after normalising")


class VerifierSource(Frozen):
    """A built-in rule. The reward is in [0, 1] unless the verifier says otherwise.

    options: the verifier's own keywords, as `stages/rewards/verifiers.py` documents them.
    """

    kind: Literal["verifier"] = "verifier"
    verifier: VerifierName
    name: str = ""
    weight: float = 1.0
    options: dict[str, str | int | float | bool | tuple[str, ...]] = Field(default_factory=dict)

    def model_post_init(self, _context: object) -> None:
        """Name the source after its verifier unless the user named it."""
        if not self.name:
            object.__setattr__(self, "name", self.verifier)


class FunctionSource(Frozen):
    """A user's own rule: `module:function`, called as function(prompt=, completion=, answer=) -> float."""

    kind: Literal["function"] = "function"
    function: str
    name: str = ""
    weight: float = 1.0

    @field_validator("function")
    @classmethod
    def _module_and_function(cls, value: str) -> str:
        module, _, name = value.partition(":")
        if not (all(part.isidentifier() for part in module.split(".")) and name.isidentifier()):
            raise ValueError(f"expected module:function, found {value!r}")
        return value

    def model_post_init(self, _context: object) -> None:
        """Name the source after its function unless the user named it."""
        if not self.name:
            object.__setattr__(self, "name", self.function.partition(":")[2])


RewardSource = Annotated[RewardModelSource | VerifierSource | FunctionSource, Field(discriminator="kind")]
