# SPDX-License-Identifier: BSD-3-Clause
"""Lightning: a Trainer with DDPStrategy, whose option names the backend."""

import common
import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = common.model()

    def on_train_start(self):
        common.check_engine()

    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


net = Net()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=common.NAMED),
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, torch.utils.data.DataLoader(common.data(), batch_size=4))
common.say(net)
