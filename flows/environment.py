"""Safe settings for Prefect and its friends, set before Prefect is imported."""

import logging
import os

DEFAULTS = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120"}
"""A user's own settings win."""

FIXED = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""No setting of the user's may change these: nothing is pickled, and nothing phones home."""

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
os.environ.update(FIXED)


def quiet_prefect_console() -> None:
    """Keep Prefect's own log lines off the terminal, before Prefect is imported; its database still gets them.

    The second line is for a server that is gone: every event that cannot be sent would be printed, and every log line.
    """
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")
    logging.raiseExceptions = False
