"""The floor of generation: vLLM in this process, no house around it, on the prompts and seeds of a finished run.

Started by bench/floors.py, twice: with vLLM's own defaults and with the settings of our engine. The second must give
the committed tokens again, or the two were not asked for the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def main(path: str) -> None:
    """Generate as the JSON document at `path` says; write its figures beside it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    settings = json.loads(Path(path).read_text())
    rounds = settings["rounds"]
    llm = LLM(
        model=rounds[0]["policy"],
        skip_tokenizer_init=True,
        dtype=settings["dtype"],
        seed=0,
        max_model_len=settings["max_model_tokens"],
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **(settings["engine"] or {}),
    )
    _generate(llm, settings, rounds[0])  # warm-up: compilation, first use of memory
    figures = []
    for found in rounds:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": found["policy"]})
        llm.reset_prefix_cache()
        seconds, completions = _generate(llm, settings, found)
        figures.append(
            {
                "round_index": found["round_index"],
                "seconds": seconds,
                "tokens": sum(len(ids) for ids in completions),
                "same_completions": sum(a == b for a, b in zip(completions, found["completions"], strict=True)),
                "completions": len(completions),
            }
        )
    Path(path).with_suffix(".figures.json").write_text(json.dumps(figures))


def _generate(llm: Any, settings: Row, found: Row) -> tuple[float, list[list[int]]]:
    """Seconds for the whole round at once, and its completions in the order of the requests."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=settings["temperature"],
            seed=seed,
            max_tokens=settings["max_completion_tokens"],
            stop_token_ids=[settings["eos"]],
            logprobs=0,
            detokenize=False,
        )
        for seed in found["seeds"]
    ]
    prompts = [{"prompt_token_ids": ids} for ids in found["prompts"]]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return seconds, [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main(sys.argv[1])
