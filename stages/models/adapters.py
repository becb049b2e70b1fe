"""LoRA through peft: adding adapters, and weights as if they were merged, without touching the live model."""

from __future__ import annotations

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from configs.models import Lora
from stages.artifacts.errors import InputError


def add_adapters(model: PreTrainedModel, lora: Lora, *, trainable: tuple[str, ...] = ()) -> None:
    """Put adapters into `model` in place; everything else is frozen but the modules named in `trainable`."""
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.target_modules)
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise InputError(f"lora.target_modules {list(lora.target_modules)}: {error}") from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.split(".")[0] in trainable)


def merged_state(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` (of a model with adapters, by its own names) with the adapters' products added to their bases.

    The model itself stays as it is: merging and unmerging in place would change its last bits.
    """
    merged = {name.replace(".base_layer", ""): t for name, t in state.items() if ".lora_" not in name}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            scale = module.scaling["default"]
            a = state[f"{path}.lora_A.default.weight"].float()
            b = state[f"{path}.lora_B.default.weight"].float()
            base = state[f"{path}.base_layer.weight"]
            merged[f"{path}.weight"] = (base.float() + (b @ a) * scale).to(base.dtype)
    return merged
