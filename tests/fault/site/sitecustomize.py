"""On PYTHONPATH of a run under test: installs the fault hook in each of its processes."""

from tests.fault.hook import sign_in_by_environment

sign_in_by_environment()
