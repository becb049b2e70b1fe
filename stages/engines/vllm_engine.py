"""vLLM: the only file that names it. One engine in this process, its weights replaced in place."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from configs.resources import GeneratorResources
from stages.artifacts.errors import GateError

_PROGRESS_SECONDS = 0.5


@dataclass(frozen=True)
class Request:
    """One completion to sample. seed: of this request alone, whatever else is in flight."""

    key: str
    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """What the engine sampled. logprobs: of each sampled token after temperature, nats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


class GenerationEngine:
    """A vLLM engine. Prefix caching and chunked prefill are off: a request's bits depend on itself alone."""

    def __init__(
        self,
        policy: Path,
        *,
        policy_version: str,
        dtype: str,
        max_model_tokens: int,
        eos: int,
        resources: GeneratorResources,
    ) -> None:
        self.policy_version = policy_version
        self._eos = eos
        self._llm = LLM(
            model=str(policy),
            skip_tokenizer_init=True,
            load_format="safetensors",
            dtype=dtype,
            seed=0,
            max_model_len=max_model_tokens,
            max_num_seqs=resources.max_concurrent,
            max_num_batched_tokens=max(8192, max_model_tokens),
            enable_chunked_prefill=False,
            enable_prefix_caching=False,
            enforce_eager=resources.eager,
            tensor_parallel_size=resources.tensor_parallel,
            gpu_memory_utilization=resources.gpu_memory_utilization,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            trust_remote_code=False,
        )

    def use_policy(self, policy: Path, *, policy_version: str) -> None:
        """Replace the weights in place, unless the engine holds this version already."""
        if policy_version == self.policy_version:
            return
        self.policy_version = ""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(policy)})
        self._llm.reset_prefix_cache()
        self.policy_version = policy_version

    def close(self) -> None:
        """End the engine and what vLLM keeps for the process; a new engine must not start before that is gone."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()

    def sample(
        self,
        requests: Sequence[Request],
        *,
        temperature: float,
        max_completion_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> dict[str, Completion]:
        """Sample every request to its end. on_tokens(finished) is called now and then. Raises GateError."""
        engine: Any = self._llm.llm_engine
        for request in requests:
            params = SamplingParams(
                temperature=temperature,
                seed=request.seed,
                max_tokens=max_completion_tokens,
                stop_token_ids=[self._eos],
                logprobs=0,
                detokenize=False,
            )
            engine.add_request(request.key, {"prompt_token_ids": list(request.prompt_ids)}, params)
        found: dict[str, Completion] = {}
        reported = time.monotonic()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = _completion(output)
            if time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                on_tokens(len(found))
        missing = [request.key for request in requests if request.key not in found]
        if missing:
            raise GateError(f"expected {len(requests)} completions, found {len(found)}; missing {missing[:3]}")
        return found


def _completion(output: Any) -> Completion:
    sampled = output.outputs[0]
    token_ids = tuple(sampled.token_ids)
    logprobs = tuple(place[token].logprob for token, place in zip(token_ids, sampled.logprobs, strict=True))
    if not token_ids or any(not lp <= 0.0 for lp in logprobs):
        raise GateError(f"request {output.request_id}: expected tokens with logprobs <= 0, found {logprobs[:8]}")
    return Completion(token_ids=token_ids, logprobs=logprobs, finish_reason=str(sampled.finish_reason))
