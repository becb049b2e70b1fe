"""initialize_critic: a body and a head become critic_0; what was taken over is checked by hash."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer

from configs.critic import FromDirectory, FromPolicy, FromRewardModel
from stages.artifacts.errors import InputError
from stages.artifacts.model_directory import refuse_unsafe_model
from stages.artifacts.seeds import seed_at
from stages.artifacts.store import open_artifact
from stages.initialize_critic.job import InitializeCritic
from stages.models.language import write_model
from stages.models.scalar import load_scalar_model, require_same_body, require_same_head
from stages.program import Context, Metrics


def run(job: InitializeCritic, context: Context) -> Metrics:
    """Write critic/. Gates: its body is that of its source, and so is its head, where that is kept."""
    if context.rank != 0:
        return {}
    start, dtype = job.parameters.start, job.parameters.dtype
    target = context.out / "critic"
    source = _source(job)
    if isinstance(start, FromRewardModel):
        shutil.copytree(source, target)
    else:
        tokenizer = _policy(job)
        torch.manual_seed(seed_at(job.seed, job.STAGE, "head"))
        model = load_scalar_model(source, dtype=dtype, head=start.head)
        write_model(model.state_dict(), like=model, tokenizer=tokenizer, directory=target)
    require_same_body(source, target, dtype=dtype)
    if isinstance(start, FromRewardModel) or start.head == "keep":
        require_same_head(source, target, dtype=dtype)
    return {}


def _source(job: InitializeCritic) -> Path:
    """The directory of the model that the critic starts from. Raises InputError for a user's that cannot be used."""
    match job.parameters.start:
        case FromRewardModel():
            assert job.inputs.reward_model is not None, "the task gives it"
            return open_artifact(job.store, job.inputs.reward_model) / "reward_model"
        case FromPolicy():
            return _policy(job)
        case FromDirectory(path=path):
            directory = Path(path).expanduser()
            refuse_unsafe_model(directory)
            _require_same_tokens(_policy(job), directory)
            return directory


def _policy(job: InitializeCritic) -> Path:
    assert job.inputs.policy is not None, "the task gives it"
    return open_artifact(job.store, job.inputs.policy) / "policy"


def _require_same_tokens(policy: Path, directory: Path) -> None:
    """Raise InputError unless a token id means the same text to both: the critic reads what the policy writes."""
    expected = AutoTokenizer.from_pretrained(policy, trust_remote_code=False).get_vocab()
    try:
        found = AutoTokenizer.from_pretrained(directory, trust_remote_code=False).get_vocab()
    except (OSError, ValueError) as error:
        raise InputError(
            f"model {directory}: expected the policy's tokenizer beside the weights, found none that opens: "
            f"{' '.join(str(error).split())[:100]}"
        ) from None
    for token, index in expected.items():
        if found.get(token) != index:
            raise InputError(
                f"model {directory}: expected the policy's tokenizer, in which {token!a} is {index}, found "
                f"{found.get(token, 'no such token')}; a critic must read the policy's token ids"
            )


if __name__ == "__main__":
    from stages.program import main

    main("initialize_critic")
