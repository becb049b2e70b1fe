"""Safe defaults for Prefect and its friends, set before Prefect is imported. A user's own settings win."""

import os

DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)


def quiet_prefect_console() -> None:
    """Keep Prefect's own log lines off the terminal, before Prefect is imported; its database still gets them."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
