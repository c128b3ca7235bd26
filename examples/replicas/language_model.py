# SPDX-License-Identifier: BSD-3-Clause
"""A small transformer that says which byte of a text comes next, and the text."""

import torch
from torch import Tensor, nn

BYTES = 256


class Block(nn.Module):
    """Attention to what came before, then two linear layers; each is added to its input. After
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, normalised first.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.before_mixing = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.before_attention(x))
        # count x length x 3 x heads x size, to three of count x heads x length x size
        queries, keys, values = parts.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.before_mixing(x))))


class LanguageModel(nn.Module):
    def __init__(self, width: int, layers: int, context: int, heads: int = 4) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        self.scores = nn.Linear(width, BYTES)
        with torch.no_grad():
            for table in (self.byte, self.place):
                table.weight.mul_(0.1)

    def forward(self, windows: Tensor) -> Tensor:
        """Count x (context + 1) bytes; the mean of -ln(probability of the next byte)."""
        read, following = windows[:, :-1], windows[:, 1:]
        x = self.byte(read) + self.place.weight[: read.shape[1]]
        scores = self.scores(self.last(self.blocks(x)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


class Text:
    """The last tenth is held out."""

    def __init__(self, text: bytes, context: int) -> None:
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.train, held_out = whole.tensor_split([len(whole) * 9 // 10])
        if len(held_out) <= context:
            raise ValueError(
                f"the text has {len(whole)} bytes; with a context of {context} it needs more than "
                f"{10 * context}"
            )
        self.context = context
        self.held_out = held_out.unfold(0, context + 1, context)

    def windows(self, count: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(self.train) - self.context, (count, 1), generator=generator)
        return self.train[starts + torch.arange(self.context + 1)]
