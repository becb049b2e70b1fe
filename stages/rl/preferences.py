"""The losses of a reward model on preference pairs, per pair. Knows scores, not what they are scores of."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(
    chosen_B: Tensor, *, rejected_B: Tensor, margin: float = 0.0, label_smoothing: float = 0.0
) -> Tensor:
    """-(1 - eps) log sigmoid(d) - eps log sigmoid(-d), d = chosen - rejected - margin. Nats; elementwise, [B] -> [B].

    Scores of pairs of one prompt each. Bradley and Terry 1952, as in Ouyang et al. 2022, eq. 1; the margin as in
    Touvron et al. 2023 (Llama 2), eq. 2, in OpenRLHF and in TRL; eps is `label_smoothing`, the share of pairs that
    are taken to be labelled the wrong way round (Mitchell 2023, conservative DPO, eq. 3). Least where chosen -
    rejected = margin + log((1 - eps) / eps), so with eps above 0 no score runs away. Gradient flows to both scores.
    """
    logit_B = chosen_B - rejected_B - margin
    return -(1.0 - label_smoothing) * logsigmoid(logit_B) - label_smoothing * logsigmoid(-logit_B)


def centering_loss(chosen_B: Tensor, *, rejected_B: Tensor) -> Tensor:
    """(chosen + rejected)^2. Elementwise, [B] -> [B].

    Bradley-Terry sees differences alone, so a prompt's scores may lie anywhere; this pulls their middle to zero
    (Eisenstein et al. 2023, section 2; TRL's center_rewards_coefficient). Gradient flows to both scores.
    """
    return (chosen_B + rejected_B).square()
