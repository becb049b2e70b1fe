"""What a completion can be rewarded by. Knows nothing of how a reward is computed."""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from configs.base import Frozen
from configs.secrets import is_secret_name

LARGEST_REWARD = 3.4e38
"""float32, in which rewards are stored, holds no more."""

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


class HttpSource(Frozen):
    """A server that is asked for rewards (docs/reward_server.md). Named after its host where that is one plain word.

    timeout_seconds: for one whole request, its answer included. budget_seconds: how long the server may bring no
    reward before the run stops, to be gone on with later. token_env: the environment variable that holds a bearer
    token; the token itself is written nowhere. send_token_ids: send prompt_ids and completion_ids besides the texts.
    """

    kind: Literal["http"] = "http"
    url: str
    name: str = ""
    weight: float = 1.0
    clip: float | None = Field(default=None, gt=0.0, description="clip to [-clip, clip]")
    send_token_ids: bool = False
    batch_size: int = Field(default=32, ge=1, description="rollouts per request; it changes no reward")
    timeout_seconds: float = Field(default=60.0, gt=0.0)
    budget_seconds: float = Field(default=600.0, gt=0.0)
    token_env: str | None = None

    # Neither of the two says what it found: it may be a secret.
    @field_validator("url")
    @classmethod
    def _plain_address(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            known = False
        if not known or not re.fullmatch(r"[!-~]+", value):
            raise ValueError("expected a URL such as http://127.0.0.1:8000/score, found something else")
        if "@" in parts.netloc:
            raise ValueError(
                "expected a URL without user name or password, found one with; put the secret into an environment "
                "variable and its name into token_env"
            )
        if "?" in value or "#" in value:
            raise ValueError(
                "expected a URL without ? and #, because manifests keep it, found one with; a secret belongs into an "
                "environment variable, whose name goes into token_env"
            )
        return value

    @field_validator("token_env")
    @classmethod
    def _name_of_a_variable(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch("[A-Z][A-Z0-9_]*", value):
            raise ValueError(
                "expected the name of an environment variable in capitals, such as REWARD_TOKEN, found something else; "
                "never put the token itself here"
            )
        if value is not None and not is_secret_name(value):
            raise ValueError(
                f"expected a name that says that it is a secret, such as REWARD_TOKEN, found {value}; by that word its "
                "value is kept out of logs"
            )
        return value

    def model_post_init(self, _context: object) -> None:
        """Name the source after its server unless the user named it."""
        if not self.name:
            host = urlsplit(self.url).hostname or ""
            object.__setattr__(self, "name", host if re.fullmatch("[a-z][a-z0-9-]*", host) else "http")


SETTINGS_OF_ASKING = ("batch_size", "timeout_seconds", "budget_seconds", "token_env")
"""Fields of a source that say how it is asked, and so cannot change a reward."""

RewardSource = Annotated[RewardModelSource | VerifierSource | FunctionSource | HttpSource, Field(discriminator="kind")]
