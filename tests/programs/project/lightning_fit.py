import os

import lightning
import torch
from batches import rows
from lightning.pytorch.callbacks import ModelCheckpoint


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        if self.trainer.is_global_zero:
            print(f"step {self.global_step} loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


lightning.seed_everything(0)
nodes, ranks = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
keep = ModelCheckpoint("checkpoints", save_last=True)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(accelerator="cpu", strategy="ddp", num_nodes=nodes, devices=ranks, max_epochs=4, callbacks=[keep], **quiet)
trainer.fit(Net(), rows(), ckpt_path="last")
