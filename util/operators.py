"""Declares the operators that `util.short_attention` implements with Triton, whose import takes long."""

from contextlib import suppress

import torch

with suppress(RuntimeError):  # another copy of this project in the process, as of torch.hub, has declared them
    torch.library.define("prmim::short_attention", "(Tensor qkv, int num_heads) -> Tensor")
    torch.library.define("prmim::short_attention_backward", "(Tensor qkv, Tensor grad, int num_heads) -> Tensor")
