"""What a whole run does to the machine that it runs on, seen from outside: code, secrets, ports, modes, network."""

from __future__ import annotations

import base64
import ipaddress
import re
import stat
from pathlib import Path

import pytest

from tests.security.audited import SECRETS, AuditedRun

# Every global that a pickle may name at run time, and why somebody unpickles at all.
PICKLED = {
    r"cloudpickle\.cloudpickle\._\w+": "vLLM asks a child of its own what a model class can do, over a pipe",
    r"vllm\.model_executor\.models\.registry\._(LazyRegisteredModel|ModelInfo)": "the same question and its answer",
    r"torch\._utils\._rebuild_tensor_v2|torch\.\w+Storage|torch\.Size": "DeepSpeed's state: tensors",
    r"collections\.OrderedDict": "DeepSpeed's state: what holds them",
    r"deepspeed\.runtime\.fp16\.loss_scaler\.LossScaler": "DeepSpeed's state: its own classes",
    r"deepspeed\.runtime\.zero\.config\.ZeroStageEnum": "DeepSpeed's state: its own classes",
    r"deepspeed\.utils\.tensor_fragment\.fragment_address": "DeepSpeed's state: its own classes",
}
# Every program that may be started, by its whole command line, and who starts it.
PROGRAMS = {
    r"(/bin/sh -c read -r line \|\| exit 0; exec \"\$@\" sh )?"
    r"\S*python\S* -m (stages\.program|uvicorn|flows\.rlhf|stages\.update_policy\.run) .*": "ourselves, at a gate",
    r"/bin/sh -c read line; kill -KILL -\d+ 2>/dev/null": "the lifeline of a child",
    r"\S*python\S* -m vllm\.model_executor\.models\.registry": "vLLM, see above",
    r"/bin/sh -c lscpu --json --extended=CPU,CORE,NODE --online": "vLLM counts cores",
    r"\S*python\S* -c \nimport sys\n.*cdll\.LoadLibrary.*": "torch tries what vector instructions there are",
    r"\S*(gcc|g\+\+|c\+\+) .*": "torch and DeepSpeed compile kernels",
    r"ninja (-v|--version).*": "torch and DeepSpeed compile kernels",
    r"(uname -p|file -b \S+|\S*ldconfig -p)": "Python's own `platform` and `ctypes`",
    r"git (-C \S+ describe|rev-parse|config --get remote\.origin\.url).*": "which revision this is; wandb asks too",
    r"\S*/wandb-core --no-observability .*": "wandb, without its telemetry",
    r"mount --bind \S+/hosts /etc/hosts": "this test",
}
SHORTEST_RUN_SAMPLES = 20


def unlisted(found: set[str], listed: dict[str, str]) -> list[str]:
    """What no pattern of the list describes."""
    return sorted(item for item in found if not any(re.fullmatch(p, item, re.DOTALL) for p in listed))


def written(run: AuditedRun) -> list[Path]:
    """Every file of the run: store, Prefect's home, caches, temporary files, what it printed, and the audit itself."""
    return [path for path in sorted(run.root.rglob("*")) if path.is_file() and not path.is_symlink()]


def test_s01_only_listed_globals_are_unpickled_and_listed_programs_started(audited: AuditedRun) -> None:
    names = {".".join(event["what"]) for event in audited.of("pickle.find_class")}
    programs = {" ".join(event["what"][1]) for event in audited.of("subprocess.Popen")}
    assert unlisted(names, PICKLED) == []
    assert unlisted(programs, PROGRAMS) == []
    assert audited.of("os.system", "os.exec", "os.posix_spawn") == []
    assert audited.processes >= 8 and any("deepspeed" in name for name in names), "the audit saw the state loaded"
    print(
        f"S01: {audited.processes} processes, {len(names)} unpickled globals and {len(programs)} command lines, "
        f"0 unlisted, 0 os.system"
    )


def test_s02_what_others_planted_in_shared_caches_is_never_opened(audited: AuditedRun) -> None:
    assert len(audited.planted) == 6 and all(path.exists() for path in audited.planted)
    assert not audited.canary.exists()
    print(f"S02: {len(audited.planted)} payloads planted in result storage and caches of a run, 0 run")


def test_s08_no_process_of_a_run_had_a_switch_that_opens_it(audited: AuditedRun) -> None:
    assert len(audited.workers) >= 3 and audited.openers == set()
    print(f"S08: {len(audited.workers)} workers of a run, 0 with a switch that opens them, both switches in the shell")


def test_s05_no_secret_is_written_anywhere(audited: AuditedRun) -> None:
    needles = {name: (value.encode(), base64.b64encode(value.encode())[:-4]) for name, value in SECRETS.items()}
    assert len(SECRETS) == 20
    key = audited.root / "state" / "ratchet" / "key"
    needles["the key that signs manifests"] = (key.read_bytes(), key.read_bytes().hex().encode())
    files = [path for path in written(audited) if path != key]
    hits = [
        f"{name} in {path.relative_to(audited.root)}"
        for path in files
        for data in [path.read_bytes()]
        for name, forms in needles.items()
        if any(form in data for form in forms)
    ]
    assert hits == []
    logs = "".join(path.read_text(errors="replace") for path in audited.store.rglob("logs/trainer-0.log"))
    for expected in ("the token is [JUDGE_TOKEN]", "403 for Bearer [OPENAI_API_KEY]", "in pieces:[JUDGE_TOKEN]"):
        assert expected in logs, "the rule did speak, and was heard without the secret"
    assert "judge.example" in logs
    assert any(path.name == "prefect.db" for path in files) and any(path.suffix == ".wandb" for path in files)
    print(f"S05: {len(needles)} secrets sought in {len(files)} files of a run, 0 hits")


def test_s07_only_loopback_listens(audited: AuditedRun) -> None:
    outside = {found for found in audited.sockets if not ipaddress.ip_address(found[1]).is_loopback}
    bound = {(e["what"][0], str(e["what"][1][0])) for e in audited.of("socket.bind") if isinstance(e["what"][1], list)}
    assert outside == set()
    assert {address for _, address in bound if not ipaddress.ip_address(address).is_loopback} == set()
    assert audited.samples >= SHORTEST_RUN_SAMPLES and any("uvicorn" in program for program, _, _ in audited.sockets)
    print(f"S07: {audited.samples} samples, {len(audited.sockets)} listening sockets, all loopback or Unix")


def test_s09_nothing_that_a_run_makes_is_open_to_others(audited: AuditedRun) -> None:
    folders = [audited.root / name for name in ("store", "prefect", "home", "cache", "state", "tmp")]
    paths = [p for folder in folders if folder.exists() for p in (folder, *folder.rglob("*")) if not p.is_symlink()]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert [f"{mode:04o} {path}" for path, mode in modes.items() if mode & 0o077] == []
    caches = audited.root / "cache" / "ratchet"
    assert list((caches / "vllm").iterdir())
    assert not list((audited.root / "tmp").glob("torchinductor_*/*/*.so")), "compiled code lies in the private cache"
    print(f"S09: {len(paths)} files and directories under umask 022, all 0600 or 0700")


def test_s12_prefect_keeps_no_pickle_and_listens_on_loopback(audited: AuditedRun) -> None:
    files = {path for path in audited.prefect_home.rglob("*") if path.is_file()} - set(audited.planted)
    storage = [path for path in files if "storage" in path.parts]
    assert all(path.read_bytes()[:1] == b"{" for path in storage)
    kept = b"".join(path.read_bytes() for path in sorted(files))
    # How a pickled result looks in the database: its serializer's name, and protocols 4 and 5 in base 64.
    assert not re.search(rb'"type": ?"(compressed/)?pickle"|cloudpickle|"gA[SW]V', kept)
    servers = {address for program, address, _ in audited.sockets if "uvicorn" in program}
    assert servers == {"127.0.0.1"}
    print(
        f"S12: {len(kept) >> 10} KiB of Prefect's home, {len(storage)} stored results, 0 pickles; server on 127.0.0.1"
    )


def test_s14_a_run_without_a_route_completes_and_nothing_tries_to_leave(audited: AuditedRun) -> None:
    if not audited.isolated:
        pytest.skip(f"no network namespace of one's own here: {audited.why_not}")
    asked = [e["what"] for e in audited.of("socket.connect", "socket.sendto") if isinstance(e["what"][1], list)]
    names = [e["what"][0] for e in audited.of("socket.getaddrinfo", "socket.gethostbyname")]
    assert [what for what in asked if not ipaddress.ip_address(what[1][0]).is_loopback] == []
    assert sorted({name for name in names if name not in ("127.0.0.1", "localhost", "::1")}) == []
    assert audited.without_route == 0, "something that is not Python sent a packet that found no way"
    print(f"S14: a full run without a route: {len(asked)} connected address on loopback, 0 elsewhere, 0 packets lost")
