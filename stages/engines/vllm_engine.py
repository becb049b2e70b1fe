"""vLLM: the only file that names it. One engine in this process, its weights replaced in place."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from configs.resources import GeneratorResources
from stages.artifacts.errors import GateError
from stages.decoding import kv_bytes_per_token, weights_read

_PROGRESS_SECONDS = 0.5
_BLOCK_TOKENS = 32


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
    """A vLLM engine. What a group's prompts share is prefilled once, by whole blocks.

    The prefix cache is emptied before each sampling and chunked prefill is off: the bits depend on what is sampled
    together alone. weights, kv_bytes: parameters that a decoding step reads, and bytes of a token's keys and values.
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
        self.weights = weights_read(policy)
        self.kv_bytes = kv_bytes_per_token(policy, dtype)
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
            num_gpu_blocks_override=_blocks(self.kv_bytes, max_model_tokens, resources),
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
        finish_fraction: float = 1.0,
    ) -> Iterator[tuple[int, dict[str, Completion]]]:
        """Sample every request of every batch together, and yield each batch, by its index, when it is whole.

        finish_fraction: below 1, a batch does not wait for its longest completions: what is longer than the longest of
        that share is cut there. By length alone, so that it is the same batch whatever else was in flight.
        on_tokens(finished) is called now and then. Raises GateError.
        """
        if not self._llm.reset_prefix_cache():
            raise GateError(
                "expected an empty prefix cache before sampling, found that vLLM still uses blocks of it: an earlier "
                "batch did not end; run the same command again, with a new engine"
            )
        engine: Any = self._llm.llm_engine
        tails = [_Tail(batch, finish_fraction) for batch in batches]
        place = {request.key: index for index, batch in enumerate(batches) for request in batch}
        for request in (request for batch in batches for request in batch):
            params = SamplingParams(
                temperature=temperature,
                seed=request.seed,
                max_tokens=max_completion_tokens,
                stop_token_ids=[self._eos],
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY if finish_fraction == 1.0 else RequestOutputKind.CUMULATIVE,
                skip_clone=True,  # it is this request's alone
            )
            engine.add_request(request.key, {"prompt_token_ids": list(request.prompt_ids)}, params)
        reported, finished = time.monotonic(), 0
        while engine.has_unfinished_requests():
            moved = set()
            for output in engine.step():
                index = place[output.request_id]
                tails[index].take(output)
                finished += output.finished
                moved.add(index)
            for index in sorted(moved):
                if too_long := tails[index].too_long():
                    engine.abort_request(too_long)
                    finished += len(too_long)
                if tails[index].is_whole:
                    yield index, tails[index].completions()
            if time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                on_tokens(finished)
        missing = [key for key, index in place.items() if key not in tails[index]]
        if missing:
            raise GateError(f"expected {len(place)} completions, found {finished}; missing {missing[:3]}")


class _Tail:
    """One batch as it is sampled: what has ended, what is cut, and what still runs.

    The limit is the length of the k-th shortest completion, k the share that is waited for. Whatever has more tokens
    than that is cut there, whether it was stopped or had ended by itself meanwhile.
    """

    def __init__(self, batch: Sequence[Request], finish_fraction: float) -> None:
        self._keys = [request.key for request in batch]
        self._waits_for = math.ceil(Fraction(str(finish_fraction)) * len(batch))
        self._ended: dict[str, Completion] = {}
        self._cut: dict[str, Completion] = {}
        self._running: dict[str, Any] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._ended or key in self._cut

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it still runs."""
        return len(self._ended) + len(self._cut) == len(self._keys)

    def take(self, output: Any) -> None:
        """What the engine says of one request."""
        if output.finished:
            self._running.pop(output.request_id, None)
            self._ended[output.request_id] = _completion(output)
        else:
            self._running[output.request_id] = output

    def too_long(self) -> list[str]:
        """The requests that will be cut wherever they end: to be stopped, and as good as whole."""
        if not self._running or len(self._ended) < self._waits_for:
            return []
        limit = self._limit()
        found = [key for key, output in self._running.items() if len(output.outputs[0].token_ids) >= limit]
        for key in found:
            self._cut[key] = _completion(self._running.pop(key))
        return found

    def completions(self) -> dict[str, Completion]:
        """All of them, by key."""
        limit, whole = self._limit(), self._ended | self._cut
        too_long = self._cut.keys() | {key for key, one in self._ended.items() if len(one.token_ids) > limit}
        return {key: _cut(whole[key], limit) if key in too_long else whole[key] for key in self._keys}

    def _limit(self) -> int:
        return sorted(len(one.token_ids) for one in self._ended.values())[self._waits_for - 1]


def _cut(completion: Completion, tokens: int) -> Completion:
    return Completion(completion.token_ids[:tokens], completion.logprobs[:tokens], finish_reason="length")


def _blocks(kv_bytes: int, max_model_tokens: int, resources: GeneratorResources) -> int | None:
    """On CPU, as many key-value blocks as the most sequences in flight can fill, where that is less than the cache.

    Otherwise vLLM fills `kv_cache_gib` with zeros when it starts, however little of it is ever used.
    """
    if current_platform.device_type != "cpu":
        return None
    needed = resources.max_concurrent * math.ceil(max_model_tokens / _BLOCK_TOKENS) + 1  # vLLM keeps one for itself
    return needed if needed * _BLOCK_TOKENS * kv_bytes < resources.kv_cache_gib << 30 else None


def _completion(output: Any) -> Completion:
    sampled = output.outputs[0]
    token_ids = tuple(sampled.token_ids)
    found = sampled.logprobs  # flat: the sampled token's stands first at each place
    logprobs = tuple(found.logprobs[start] for _, start in zip(token_ids, found.start_indices, strict=True))
    if not token_ids or any(not lp <= 0.0 for lp in logprobs):
        raise GateError(f"request {output.request_id}: expected tokens with logprobs <= 0, found {logprobs[:8]}")
    return Completion(token_ids=token_ids, logprobs=logprobs, finish_reason=str(sampled.finish_reason))
