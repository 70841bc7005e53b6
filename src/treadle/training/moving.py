"""Moving a trainer's memory off its device while engines generate, and back."""

from __future__ import annotations

import torch

from treadle.training.worker import Trainer


@torch.no_grad()
def move_trainer(trainer: Trainer, device: torch.device) -> None:
    """Bring weights, masters and AdamW state of policy and critic to `device`; models that are lent move by themselves.

    The parameters stay the same objects, so whoever holds one sees it move. Nothing is copied that is there already.
    """
    models = [trainer.model, *([] if trainer.critic is None else [trainer.critic.model])]
    optimizers = [trainer.optimizer, *([] if trainer.critic is None else [trainer.critic.optimizer])]
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.to(device)
    for optimizer in optimizers:
        for master in optimizer.masters.values():
            master.data = master.data.to(device)
        for state in optimizer.adamw.state.values():
            state.update({name: value.to(device) for name, value in state.items()})
    if trainer.device.type == "cuda" and device.type != "cuda":
        torch.cuda.empty_cache()
