"""Small models and data of training frameworks, and their training in the ranks of a trial, for tests of callbacks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from services.extras import needed
from shadho_celery.objective.context import LocalContext

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
#: sequences for `bert`
SEQUENCES = [{"input_ids": [i % 7, i % 3, 1], "attention_mask": [1, 1, 1], "labels": i % 2} for i in range(16)]


def lightning_module() -> Any:
    """Return a new module, always with the same weights."""
    torch, lightning = needed("torch"), needed("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", self.training_step(batch, number), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return Module()


def lightning_data() -> Any:
    torch = needed("torch")
    return torch.utils.data.DataLoader([(torch.tensor(x), torch.tensor(y)) for x, y in zip(X, Y, strict=True)], 16)


def bert() -> Any:
    """Return a new model with random weights."""
    transformers = needed("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=10, **sizes))


def with_lightning(context: Any, group: Any, folder: Path) -> tuple[int, bool]:
    """Return the number of epochs that this rank has trained, and whether it began with a checkpoint."""
    from lightning.pytorch import Trainer

    from shadho_celery.integrations.lightning import ShadhoCallback

    callback = ShadhoCallback("val_loss", context)
    how = {"accelerator": "cpu", "strategy": "ddp", "devices": group.size, "logger": False}
    trainer = Trainer(max_epochs=8, callbacks=[callback], enable_progress_bar=False, **how)
    checkpoint = callback.checkpoint
    trainer.fit(lightning_module(), lightning_data(), lightning_data(), ckpt_path=checkpoint)
    return trainer.current_epoch, checkpoint is not None


def with_transformers(context: Any, group: Any, folder: Path) -> tuple[int, bool]:
    """Return the number of steps that this rank has trained, and whether it began with a checkpoint."""
    from transformers import Trainer, TrainingArguments

    from shadho_celery.integrations.transformers import ShadhoCallback

    callback = ShadhoCallback("eval_loss", context)
    how = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 1}
    arguments = TrainingArguments(output_dir=folder, max_steps=8, save_strategy="no", **how)
    assert arguments.world_size == group.size
    trainer = Trainer(bert(), arguments, train_dataset=SEQUENCES, eval_dataset=SEQUENCES, callbacks=[callback])
    checkpoint = callback.checkpoint
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.state.global_step, checkpoint is not None


def train_in_ranks(context: Any, folder: Path) -> float:
    """Train in the process group of `context`, where should_stop is that of rank 0, and as in a `process_group`."""
    warnings.simplefilter("ignore")
    found = []
    for framework in (with_lightning, with_transformers):
        own = folder / framework.__name__
        context.checkpoints = own / "launch"
        found += [framework(None, context, own / "launch") for _ in range(2)]
        # There, each rank has a context of its own, and only that of the first slot hears of a pruned trial.
        each = LocalContext(checkpoints=own / "group", slots=2, stopped=lambda: context.rank == 0)
        found.append(framework(each, context, own / "group"))
    (folder / f"rank-{context.rank}").write_text(repr(found))
    return 0.0
