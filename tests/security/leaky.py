"""A user's rule that tells its secrets on every way out that a program has."""

import logging
import os
import sys
import traceback
import warnings


def reward(*, prompt: str, completion: str, answer: str) -> float:
    """The share of digits in the completion."""
    secret = os.environ.get("JUDGE_TOKEN", "")
    print(f"the token is {secret}")
    logging.getLogger(__name__).warning("calling https://judge:%s@judge.example/score", os.environ.get("PGPASSWORD"))
    warnings.warn(f"old token {secret}", stacklevel=1)
    try:
        raise PermissionError(f"403 for Bearer {os.environ.get('OPENAI_API_KEY')}")
    except PermissionError:
        traceback.print_exc()
    print("in pieces:", secret[:5], secret[5:], sep="", file=sys.stderr, flush=True)
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def failing(*, prompt: str, completion: str, answer: str) -> float:
    """Fails, and says what it failed with."""
    raise PermissionError(f"403 for Bearer {os.environ.get('OPENAI_API_KEY')}")
