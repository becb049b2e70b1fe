"""The peer's program, started by bench/peer_trl.py: TRL's GRPOTrainer on the settings of one case. Knows no store.

Appends one JSON line per event (generated, round, evaluated) with the time it happened. Nothing is saved to disk by the
peer, and nothing is hashed or flushed: what that costs is on our side alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

Settings = dict[str, Any]


def main(path: str) -> None:
    """Train as the JSON document at `path` says."""
    settings: Settings = json.loads(Path(path).read_text())
    if settings["use_vllm"]:
        _let_vllm_keep_its_weights()
        _set_engine_dtype(settings["engine_dtype"])
    import torch

    torch.set_num_threads(settings["threads"])
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    tokenizer = AutoTokenizer.from_pretrained(settings["policy"], padding_side="left")
    rows = _rows(settings, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32)
    model.config.use_cache = True
    events = _Events(Path(settings["events"]))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[_reward(settings, events)],
        args=_arguments(settings),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.add_callback(_callback(settings, events, trainer))
    if settings["evaluate"]:
        _evaluate(settings, events, trainer, round_index=-1)
    trainer.train()
    events.add("done")


def _let_vllm_keep_its_weights() -> None:
    """On CPU vLLM packs linear layers for oneDNN and drops the plain weights, which TRL then cannot replace."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm._custom_ops as custom_ops

    custom_ops._supports_onednn = False


def _set_engine_dtype(dtype: str) -> None:
    """TRL leaves its engine's dtype to vLLM, which takes bfloat16 for a float32 model; another one must be forced."""
    if dtype != "auto":
        from trl.generation import vllm_generation  # type: ignore[import-not-found,unused-ignore]

        vllm_generation.LLM = partial(vllm_generation.LLM, dtype=dtype)


class _Events:
    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: str, **figures: Any) -> None:
        line = json.dumps({"event": kind, "at": time.time(), **figures})
        with self.path.open("a") as file:
            file.write(line + "\n")


def _rows(settings: Settings, tokenizer: Any) -> Any:
    """The prompts in the order in which our rounds take them. Raises SystemExit if they are other tokens here."""
    from datasets import Dataset

    rows = [json.loads(line) for line in Path(settings["prompts"]).read_text().splitlines()]
    for row in rows:
        found = tokenizer(row["prompt"])["input_ids"]
        if found != row["prompt_ids"]:
            raise SystemExit(f"prompt {row['prompt']!r}: expected tokens {row['prompt_ids']}, found {found}")
    return Dataset.from_list([{name: row[name] for name in ("prompt", "answer")} for row in rows])


def _rule(settings: Settings) -> Any:
    module, _, name = settings["reward"].partition(":")
    return getattr(importlib.import_module(module), name)


def _reward(settings: Settings, events: _Events) -> Any:
    rule = _rule(settings)

    def reward(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        rewards = [
            rule(prompt=prompt, completion=completion, answer=expected)
            for prompt, completion, expected in zip(prompts, completions, answer, strict=True)
        ]
        events.add(
            "generated",
            reward_mean=sum(rewards) / len(rewards),
            lengths=[len(ids) for ids in completion_ids],
            prompts=list(dict.fromkeys(prompts)),
        )
        return rewards

    return reward


def _arguments(settings: Settings) -> Any:
    """Everything that the recipe fixes is what our side does; everything else is what is fastest for the peer."""
    from trl import GRPOConfig  # type: ignore[import-not-found,unused-ignore]

    per_round = settings["prompts_per_round"] * settings["group_size"]
    per_step = per_round // settings["num_minibatches"]
    microbatch = min(settings["microbatch"], per_step)
    vllm = {
        "vllm_mode": "colocate",
        "vllm_max_model_length": settings["max_prompt_tokens"] + settings["max_completion_tokens"],
        "vllm_importance_sampling_correction": settings["check_weights"],
    }
    return GRPOConfig(
        output_dir=settings["scratch"],
        seed=settings["seed"],
        max_steps=settings["rounds"] * settings["num_minibatches"] * settings["epochs"],
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=per_step // microbatch,
        steps_per_generation=per_round // microbatch,
        num_generations=settings["group_size"],
        num_iterations=settings["epochs"],
        shuffle_dataset=False,
        max_completion_length=settings["max_completion_tokens"],
        temperature=settings["temperature"],
        beta=settings["kl_coef"],
        epsilon=settings["clip_low"],
        epsilon_high=settings["clip_high"],
        loss_type=settings["loss_type"],
        scale_rewards=settings["scale_rewards"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        adam_epsilon=settings["epsilon"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=settings["num_minibatches"],
        use_vllm=settings["use_vllm"],
        **(vllm if settings["use_vllm"] else {}),
    )


def _callback(settings: Settings, events: _Events, trainer: Any) -> Any:
    from transformers import TrainerCallback

    class Rounds(TrainerCallback):  # type: ignore[misc]
        """Notes the end of each round, and evaluates then if asked to."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """An optimizer step is done."""
            done, rest = divmod(state.global_step, settings["num_minibatches"] * settings["epochs"])
            if rest == 0:
                events.add("round", round_index=done - 1)
                if settings["evaluate"]:
                    _evaluate(settings, events, trainer, round_index=done - 1)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            """Figures of the trainer's own."""
            events.add("log", logs={key: value for key, value in (logs or {}).items() if isinstance(value, float)})

    return Rounds()


def _evaluate(settings: Settings, events: _Events, trainer: Any, *, round_index: int) -> None:
    """Greedy completions of the held-out prompts by the peer's own engine, with the newest weights in it."""
    from vllm import SamplingParams

    rows = [json.loads(line) for line in Path(settings["held_out"]).read_text().splitlines()]
    step = trainer.state.global_step
    if step != trainer._last_loaded_step:
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = step
    outputs = trainer.vllm_generation.llm.generate(
        [{"prompt_token_ids": row["prompt_ids"]} for row in rows],
        SamplingParams(temperature=0.0, max_tokens=settings["max_completion_tokens"]),
        use_tqdm=False,
    )
    rule = _rule(settings)
    rewards = [
        rule(prompt=row["prompt"], completion=output.outputs[0].text, answer=row["answer"])
        for row, output in zip(rows, outputs, strict=True)
    ]
    events.add("evaluated", round_index=round_index, mean=sum(rewards) / len(rewards))


if __name__ == "__main__":
    main(sys.argv[1])
