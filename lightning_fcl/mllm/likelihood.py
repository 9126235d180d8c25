"""Log-likelihoods of whole answers, which Fisher information of an image-and-text model is made of."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fcl.mllm.collate import IGNORED


def answer_log_likelihood(module: nn.Module, batch: Any) -> Tensor:
    r"""Log-likelihood of each row's answers, :math:`\sum_t \log p(y_t | y_{<t}, x)`, for ``EWC(log_likelihood=...)``.

    Args:
        module: A :class:`~lightning_fcl.mllm.MultimodalInstructionModule`, or what gives logits of a batch.
        batch: As its collator makes it.

    Returns:
        Shape ``(B,)``, in nats: a sum over the tokens of the answers.
    """
    logits, labels = module(batch)[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2).float(), labels, reduction="none", ignore_index=IGNORED)
    return -losses.sum(dim=1)
