"""Which model is trained, and how supervised and reward-model training run. Loads nothing."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.base import Frozen

HEAD_SIZES = (32, 64, 96, 128, 256)


class FromScratch(Frozen):
    """A Llama with random weights and a byte-level BPE tokenizer trained on the run's own text."""

    kind: Literal["from_scratch"] = "from_scratch"
    vocabulary: int = Field(default=384, ge=260, description="tokenizer and embedding size")
    hidden: int = Field(default=192, ge=8)
    layers: int = Field(default=3, ge=1)
    heads: int = Field(default=6, ge=1)
    kv_heads: int | None = Field(default=None, ge=1, description="of keys and values; as many as `heads` if not given")
    mlp: int = Field(default=512, ge=8)
    max_positions: int = Field(default=512, ge=16)
    tied_embeddings: bool = True

    @model_validator(mode="after")
    def _heads_divide(self) -> "FromScratch":
        size, rest = divmod(self.hidden, self.heads)
        if rest or size not in HEAD_SIZES:
            raise ValueError(
                f"expected hidden / heads to be one of {HEAD_SIZES} (what vLLM's kernels have), "
                f"found {self.hidden} / {self.heads}"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"expected kv_heads to divide heads = {self.heads}, found {self.kv_heads}")
        return self


class Pretrained(Frozen):
    """A model directory or hub id holding safetensors weights, a config and a tokenizer."""

    kind: Literal["pretrained"] = "pretrained"
    path: str = Field(min_length=1)
    revision: str | None = None


class Lora(Frozen):
    """Low-rank adapters (peft). They are merged into a copy of the weights for generation."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0.0)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ModelConfig(Frozen):
    """The base model of policy, reference, reward model and critic."""

    base: Annotated[FromScratch | Pretrained, Field(discriminator="kind")] = FromScratch()
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: Lora | None = None
    gradient_checkpointing: bool = False


class Optimizer(Frozen):
    """AdamW and its learning-rate schedule (a pure function of the step, so nothing of it can be lost)."""

    learning_rate: float = Field(gt=0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0, description="of the rate, at the last step")


class SftConfig(Frozen):
    """Supervised fine-tuning on the demonstrations: loss on completion tokens only."""

    steps: int = Field(default=180, ge=1)
    batch_size: int = Field(default=64, ge=1, description="demonstrations per optimizer step")
    optimizer: Optimizer = Optimizer(learning_rate=1.5e-3, schedule="cosine", warmup_steps=10)
    snapshot_every: int = Field(default=100, ge=1, description="optimizer steps: the most that a crash can cost")


class RewardModelConfig(Frozen):
    """Bradley-Terry training on preference pairs."""

    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=64, ge=1, description="pairs per optimizer step")
    optimizer: Optimizer = Optimizer(learning_rate=3e-4, schedule="cosine", warmup_steps=5)
    snapshot_every: int = Field(default=100, ge=1, description="optimizer steps: the most that a crash can cost")
    center_coef: float = Field(default=0.0, ge=0.0, description="weight of mean((chosen + rejected)^2)")
    margin: float = Field(default=0.0, ge=0.0, description="by how much chosen must be above rejected, in scores")
    label_smoothing: float = Field(
        default=0.0, ge=0.0, lt=0.5, description="share of pairs that are taken to be labelled the wrong way round"
    )
    lora: Lora | None = None
