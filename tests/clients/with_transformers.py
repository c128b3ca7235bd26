# SPDX-License-Identifier: BSD-3-Clause
"""transformers: its Trainer on a small random BERT, and what muster exports of it loaded again."""

import pathlib
import tempfile

import common
import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from muster import checkpoint

torch.manual_seed(1)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
generator = torch.Generator().manual_seed(2)
rows = [
    {"input_ids": torch.randint(0, 50, (8,), generator=generator), "labels": torch.tensor(i % 2)}
    for i in range(32)
]
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=4,
            num_train_epochs=1,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=3,
        ),
        train_dataset=rows,
    )
    common.check_engine()
    trainer.train()

    everybodys = [folder]
    dist.broadcast_object_list(everybodys)
    saved, exported = (str(pathlib.Path(*everybodys, name)) for name in ("saved", "exported"))
    checkpoint.save({"model": model}, checkpoint_id=saved)
    if dist.get_rank() == 0:
        checkpoint.export_safetensors(saved, exported, file_bytes=5000)
        model.config.save_pretrained(exported)
        assert len(list(pathlib.Path(exported).glob("model-*.safetensors"))) > 1
        loaded, info = BertForSequenceClassification.from_pretrained(
            exported, output_loading_info=True
        )
        assert not any(info.values()), info
        expected, found = model.state_dict(), loaded.state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    dist.barrier()
common.say(model)
