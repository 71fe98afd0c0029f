"""A byte-level GPT, small enough to train while one waits. Its attention is one name in this file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

scaled_dot_product_attention = F.scaled_dot_product_attention  # the line that the demo swaps

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Attention and a feed-forward layer, each on the normalised stream and added back to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        nn.init.zeros_(self.project.weight)  # a block begins as the identity
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [batch, heads, length, head_dim] each
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_feed(x))))


class GPT(nn.Module):
    """Next-byte logits [batch, length, 256] from bytes [batch, length], length up to `context`."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 3, context: int = 128, near: int = 4) -> None:
        super().__init__()
        self.context = context
        # A byte says little: each place also embeds the bytes just before it, which spares attention finding words.
        self.bytes = nn.ModuleList(nn.Embedding(VOCABULARY, width) for _ in range(near))
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for table in (*self.bytes, self.place):
            nn.init.normal_(table.weight, std=0.2)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.place.weight[: tokens.shape[1]]
        for back, table in enumerate(self.bytes):
            x = x + F.pad(table(tokens), (0, 0, back, -back))
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def continue_greedily(self, tokens: Tensor, steps: int) -> Tensor:
        """The `steps` bytes that follow tokens [length], the likeliest one each time."""
        for _ in range(steps):
            logits = self(tokens[None, -self.context :])[0, -1]
            tokens = torch.cat([tokens, logits.argmax()[None]])
        return tokens[-steps:]
