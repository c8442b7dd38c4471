from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from batches import rows

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=20))])
layer = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(layer, torch.optim.AdamW(layer.parameters(), lr=0.05), rows())
for step, (row, target) in enumerate(loader):
    loss = torch.nn.functional.mse_loss(model(row), target)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step} loss {loss.item():.6f}", flush=True)
accelerator.end_training()
