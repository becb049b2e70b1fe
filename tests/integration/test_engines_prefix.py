"""Prompts that a group shares are prefilled once; what came before leaves no trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from stages.artifacts.reference import ArtifactRef
from stages.workers import PoolSpec, WorkerPool
from tests.integration.stores import House

ROOT = Path(__file__).resolve().parents[2]

# Two groups of four, whose prompts of 50 tokens begin alike: one block of 32 can be shared.
PROGRAM = """
import json, sys
from pathlib import Path
from configs.resources import GeneratorResources
from stages.engines.vllm_engine import GenerationEngine, Request

engine = GenerationEngine(Path(sys.argv[1]), policy_version="a", dtype="float32", max_model_tokens=60, eos=1,
                          resources=GeneratorResources(threads=1))
honest, cached = engine._llm.llm_engine.step, {}

def watched():
    for output in honest():
        cached[output.request_id] = output.num_cached_tokens
        yield output

engine._llm.llm_engine.step = lambda: list(watched())
prompts = [tuple(3 + (place * step) % 50 for place in range(50)) for step in (3, 7)]
prompts[1] = prompts[0][:40] + prompts[1][40:]

def sampled(groups):
    cached.clear()
    each = [(group, sample) for group in groups for sample in range(4)]
    batch = [Request(f"{group}/{sample}", prompts[group], 10 * group + sample) for group, sample in each]
    ((_, found),) = engine.sample([batch], temperature=1.0, max_completion_tokens=8, on_tokens=lambda finished: None)
    return {key: [*one.token_ids, *one.logprobs] for key, one in found.items()}, dict(cached)

turns = [sampled(groups) for groups in ((0, 1), (1,), (0,), (0, 1))]
engine.use_policy(Path(sys.argv[1]), policy_version="b")
turns.append(sampled((0, 1)))
print(json.dumps({"prompts": prompts, "turns": turns}))
"""


def test_a_shared_prompt_is_prefilled_once_and_an_earlier_batch_changes_nothing(
    house: House, policy: ArtifactRef, tmp_path: Path
) -> None:
    directory = policy.path(house.store) / "policy"
    env = WorkerPool(PoolSpec("generator", "cpu", 1, 1), logs=tmp_path)._environment(0, tmp_path / "rendezvous")
    argv = [sys.executable, "-c", PROGRAM, str(directory)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300.0)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    (both, cached), (alone, again), *_ = turns = said["turns"]
    assert turns[0] == turns[3] == turns[4], "the same batch, whatever was sampled before, from the same weights"
    assert [cached[f"0/{sample}"] for sample in range(4)] == [0, 32, 32, 32], "whole blocks"
    assert [cached[f"1/{sample}"] for sample in range(4)] == [32, 32, 32, 32], "what two prompts begin with, too"
    assert again["1/0"] == 0, "nothing is kept from the batch before"
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    for found in (both, alone):
        for key, numbers in found.items():
            tokens, logprobs = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
            prompt = said["prompts"][int(key.partition("/")[0])]
            with torch.no_grad():
                logits_LV = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits_LV, -1)[range(len(tokens)), tokens]
            assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-4)
