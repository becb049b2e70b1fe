"""generate_rollouts: sample completions shard by shard; each shard is durable as soon as it is whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from transformers import AutoTokenizer

from stages.artifacts import layout, schemas
from stages.artifacts.durable import read_json
from stages.artifacts.errors import InputError
from stages.artifacts.seals import adopt, seal
from stages.artifacts.seeds import seed_at
from stages.artifacts.shards import read_table, read_tables, write_table
from stages.artifacts.store import earlier_attempts, open_artifact
from stages.decoding import DTYPE_BYTES, Decoding, weights_read
from stages.engines.vllm_engine import GenerationEngine, Request
from stages.generate_rollouts.job import GenerateRollouts
from stages.generate_rollouts.prompts import batch_indices, deal_shards
from stages.program import Context, Metrics

Row = dict[str, Any]
_ENGINE_LIVE = "generation_engine"


def run(job: GenerateRollouts, context: Context) -> Metrics:
    """Write this engine's shards of the batch; shards that an earlier attempt finished are taken over.

    Its figures are those of all shards, whoever sampled them: a resumed batch has the figures of an undisturbed one.
    """
    parameters = job.parameters
    prompts = _select_prompts(job, context)
    size = parameters.prompts_per_shard
    shards = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    earlier = earlier_attempts(context.out)
    missing = []
    # A completion is taken to be as long as it may be; a prompt is computed once for its group.
    longest = parameters.group_size * parameters.max_completion_tokens
    tokens = [sum(len(prompt["prompt_ids"]) + longest for prompt in shard) for shard in shards]
    mine = deal_shards(tokens, engines=context.world_size)[context.rank]
    for index in mine:
        if not adopt(layout.shard(context.out, "rollouts", index), earlier=earlier):
            missing.append(index)
    if missing:
        engine, tokenizer = _engine(job, context), _tokenizer(job, context)
        together = 1 if job.promises_bits else len(missing)  # the bits depend on what is sampled together
        done = 0
        for start in range(0, len(missing), together):
            turn = {index: shards[index] for index in missing[start : start + together]}
            for _ in _generate(job, context, engine, tokenizer, turn):
                done += 1
                context.progress("rollout shards", done, len(missing))
    lengths = {index: _lengths(layout.shard(context.out, "rollouts", index)) for index in mine}
    if missing:
        context.decoding = _decoding(job, context, [row for index in missing for row in lengths[index]])
    prompts_done = sum(len(shards[index]) for index in mine)
    generated = sum(completion for rows in lengths.values() for _, completion in rows)
    weights = engine.weights if missing else weights_read(open_artifact(job.store, job.inputs.policy) / "policy")
    return {
        "prompts": float(prompts_done),
        "generated_tokens": float(generated),
        "model_flops": 2.0 * weights * generated,
    }


def _lengths(shard: Path) -> list[tuple[int, int]]:
    """Tokens of prompt and completion of each rollout of a shard."""
    columns = ("prompt_ids", "completion_ids")
    table = read_table(shard, schemas.ROLLOUTS, columns=columns)
    prompts, completions = (pc.list_value_length(table[name]).to_pylist() for name in columns)
    return list(zip(prompts, completions, strict=True))


def _decoding(job: GenerateRollouts, context: Context, lengths: Sequence[tuple[int, int]]) -> Decoding:
    """What this engine has decoded."""
    (_, engine), devices = context.live[_ENGINE_LIVE], job.parameters.generator.tensor_parallel
    return Decoding(
        lengths,
        concurrent=job.parameters.generator.max_concurrent,
        weights=engine.weights // devices,
        kv_bytes=engine.kv_bytes // devices,
        dtype_bytes=DTYPE_BYTES[job.parameters.dtype],
    )


def _select_prompts(job: GenerateRollouts, context: Context) -> list[Row]:
    """The job's prompts, in canonical order: stages/generate_rollouts/prompts.py says which.

    The prompts stay in memory as Arrow, in canonical order, from job to job; only the batch becomes Python objects.
    Raises InputError if the training part holds fewer prompts than a batch.
    """
    parameters = job.parameters
    key = ("prompts", job.inputs.data.fingerprint, parameters.split)
    if key not in context.live:
        directory = open_artifact(job.store, job.inputs.data)
        context.live[key] = read_tables(directory, f"prompts_{parameters.split}", schemas.PROMPTS).sort_by("prompt_id")
    prompts = context.live[key]
    count = parameters.num_prompts
    if count > len(prompts):
        if parameters.purpose == "training":
            raise InputError(
                f"rounds.prompts_per_round: expected at most {len(prompts)} (prompts in the training part), "
                f"found {count}"
            )
        count = len(prompts)
    indices = batch_indices(
        len(prompts),
        count=count,
        window=parameters.window,
        batch=parameters.batch,
        split=parameters.split,
        seed=job.seed,
    )
    rows: list[Row] = prompts.take(indices).to_pylist()
    return rows


def _engine(job: GenerateRollouts, context: Context) -> GenerationEngine:
    """The resident engine with the job's policy in it; started on the first call."""
    parameters = job.parameters
    policy = open_artifact(job.store, job.inputs.policy) / "policy"
    version = job.inputs.policy.fingerprint
    shape = (
        {k: v for k, v in read_json(policy / "config.json").items() if k != "transformers_version"},
        parameters.dtype,
        parameters.max_prompt_tokens + parameters.max_completion_tokens,
    )
    held = context.live.get(_ENGINE_LIVE)
    if held is not None and held[0] == shape:
        engine: GenerationEngine = held[1]
        engine.use_policy(policy, policy_version=version)
        return engine
    if held is not None:
        context.live.pop(_ENGINE_LIVE)[1].close()
        del held
    context.progress("starting vLLM", 0, 1)
    with context.starting():
        engine = GenerationEngine(
            policy,
            policy_version=version,
            dtype=parameters.dtype,
            max_model_tokens=parameters.max_prompt_tokens + parameters.max_completion_tokens,
            eos=_tokenizer(job, context).eos_token_id,
            resources=parameters.generator,
            takes_turns=context.takes_turns,
        )
    context.live[_ENGINE_LIVE] = (shape, engine)
    return engine


def _tokenizer(job: GenerateRollouts, context: Context) -> Any:
    key = ("tokenizer", job.inputs.data.fingerprint)
    if key not in context.live:
        directory: Path = open_artifact(job.store, job.inputs.data) / "tokenizer"
        context.live[key] = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return context.live[key]


def _generate(
    job: GenerateRollouts, context: Context, engine: GenerationEngine, tokenizer: Any, shards: Mapping[int, list[Row]]
) -> Iterator[int]:
    """Sample shards together; write and seal each as soon as it is whole, and yield its index."""
    parameters = job.parameters
    keys = {
        index: [(prompt, sample) for prompt in prompts for sample in range(parameters.group_size)]
        for index, prompts in shards.items()
    }
    requests = {index: [_request(job, prompt, sample) for prompt, sample in pairs] for index, pairs in keys.items()}
    total, names = sum(map(len, requests.values())), ", ".join(map(str, shards))
    order = list(shards)
    for place, completions in engine.sample(
        [requests[index] for index in order],
        temperature=parameters.temperature,
        max_completion_tokens=parameters.max_completion_tokens,
        finish_fraction=parameters.finish_fraction,
        on_tokens=lambda finished: context.progress(f"completions of shard {names}", finished, total),
    ):
        index = order[place]
        sampled = [completions[request.key] for request in requests[index]]
        texts = tokenizer.batch_decode([list(one.token_ids) for one in sampled], skip_special_tokens=True)
        rows = [
            _row(job, prompt, sample, completion, text)
            for (prompt, sample), completion, text in zip(keys[index], sampled, texts, strict=True)
        ]
        path = layout.shard(context.out, "rollouts", index)
        write_table(path, rows, schemas.ROLLOUTS)
        seal(path)
        yield index


def _request(job: GenerateRollouts, prompt: Row, sample: int) -> Request:
    parameters, name = job.parameters, prompt["prompt_id"]
    seed = seed_at(job.seed, job.STAGE, parameters.purpose, parameters.round_index, name, sample)
    return Request(key=f"{name}/{sample}", prompt_ids=tuple(prompt["prompt_ids"]), seed=seed)


def _row(job: GenerateRollouts, prompt: Row, sample: int, completion: Any, text: str) -> Row:
    round_index = job.parameters.round_index
    return {
        "round_index": round_index,
        "prompt_id": prompt["prompt_id"],
        "sample_index": sample,
        "group_id": f"{round_index}/{prompt['prompt_id']}",
        "policy_version": job.inputs.policy.fingerprint,
        "prompt_ids": prompt["prompt_ids"],
        "completion_ids": list(completion.token_ids),
        "rollout_logprobs": list(completion.logprobs),
        "finish_reason": completion.finish_reason,
        "prompt": prompt["prompt"],
        "completion": text,
        "answer": prompt["answer"],
    }


if __name__ == "__main__":
    from stages.program import main

    main("generate_rollouts")
