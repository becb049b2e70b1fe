"""vLLM: the only file that names it. One engine in this process, its weights replaced in place."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from configs.resources import GeneratorResources
from stages.artifacts.errors import GateError

_PROGRESS_SECONDS = 0.5
_BLOCK_TOKENS = 32
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


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
    """A vLLM engine. What a group's prompts share is prefilled once.

    The prefix cache is emptied before each sampling and chunked prefill is off: the bits depend on what is sampled
    together alone.
    """

    def __init__(
        self,
        policy: Path,
        *,
        policy_version: str,
        dtype: str,
        max_model_tokens: int,
        eos: int,
        resources: GeneratorResources,
        takes_turns: bool = False,
    ) -> None:
        self.policy_version = policy_version
        self._eos = eos
        if resources.eager:
            # vLLM compiles one small function of its sampler all the same, at the first token; that takes seconds.
            torch._dynamo.config.disable = True
        self._llm = LLM(
            model=str(policy),
            skip_tokenizer_init=True,
            load_format="safetensors",
            dtype=dtype,
            seed=0,
            max_model_len=max_model_tokens,
            max_num_seqs=resources.max_concurrent,
            num_gpu_blocks_override=_blocks(policy, dtype, max_model_tokens, resources),
            max_num_batched_tokens=max(8192, max_model_tokens),
            block_size=_BLOCK_TOKENS if current_platform.device_type == "cpu" else None,
            enable_chunked_prefill=False,
            enable_prefix_caching=True,
            enforce_eager=resources.eager,
            tensor_parallel_size=resources.tensor_parallel,
            gpu_memory_utilization=resources.gpu_memory_utilization,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            trust_remote_code=False,
            enable_sleep_mode=takes_turns and current_platform.is_cuda(),
        )

    def rest(self) -> None:
        """Leave the device to another process: weights and key-value cache are gone, the next policy brings its own.

        On CPU vLLM keeps both.
        """
        self.policy_version = ""
        if current_platform.is_cuda():
            self._llm.sleep(level=2)

    def resume(self) -> None:
        """Take the device again; use_policy() must follow."""
        if current_platform.is_cuda():
            self._llm.wake_up()

    def use_policy(self, policy: Path, *, policy_version: str) -> None:
        """Replace the weights in place, unless the engine holds this version already."""
        if policy_version == self.policy_version:
            return
        self.policy_version = ""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(policy)})
        self.policy_version = policy_version

    def close(self) -> None:
        """End the engine and what vLLM keeps for the process; a new engine must not start before that is gone."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()

    def sample(
        self,
        batches: Sequence[Sequence[Request]],
        *,
        temperature: float,
        max_completion_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> Iterator[tuple[int, dict[str, Completion]]]:
        """Sample every request of every batch together, and yield each batch, by its index, when it is whole.

        on_tokens(finished) is called now and then. Raises GateError.
        """
        if not self._llm.reset_prefix_cache():
            raise GateError(
                "expected an empty prefix cache before sampling, found that vLLM still uses blocks of it: an earlier "
                "batch did not end; run the same command again, with a new engine"
            )
        engine: Any = self._llm.llm_engine
        found: list[dict[str, Completion]] = [{} for _ in batches]
        place = {request.key: index for index, batch in enumerate(batches) for request in batch}
        for request in (request for batch in batches for request in batch):
            params = SamplingParams(
                temperature=temperature,
                seed=request.seed,
                max_tokens=max_completion_tokens,
                stop_token_ids=[self._eos],
                logprobs=0,
                detokenize=False,
            )
            engine.add_request(request.key, {"prompt_token_ids": list(request.prompt_ids)}, params)
        reported, finished = time.monotonic(), 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    index, finished = place[output.request_id], finished + 1
                    found[index][output.request_id] = _completion(output)
                    if len(found[index]) == len(batches[index]):
                        yield index, found[index]
            if time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                on_tokens(finished)
        missing = [key for key, index in place.items() if key not in found[index]]
        if missing:
            raise GateError(f"expected {len(place)} completions, found {finished}; missing {missing[:3]}")


def _blocks(policy: Path, dtype: str, max_model_tokens: int, resources: GeneratorResources) -> int | None:
    """On CPU, as many key-value blocks as the most sequences in flight can fill, where that is less than the cache.

    Otherwise vLLM fills `kv_cache_gib` with zeros when it starts, however little of it is ever used.
    """
    if current_platform.device_type != "cpu":
        return None
    config = AutoConfig.from_pretrained(policy, trust_remote_code=False)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * _DTYPE_BYTES[dtype]
    needed = resources.max_concurrent * math.ceil(max_model_tokens / _BLOCK_TOKENS) + 1  # vLLM keeps one for itself
    return needed if needed * _BLOCK_TOKENS * per_token < resources.kv_cache_gib << 30 else None


def _completion(output: Any) -> Completion:
    sampled = output.outputs[0]
    token_ids = tuple(sampled.token_ids)
    logprobs = tuple(place[token].logprob for token, place in zip(token_ids, sampled.logprobs, strict=True))
    if not token_ids or any(not lp <= 0.0 for lp in logprobs):
        raise GateError(f"request {output.request_id}: expected tokens with logprobs <= 0, found {logprobs[:8]}")
    return Completion(token_ids=token_ids, logprobs=logprobs, finish_reason=str(sampled.finish_reason))
