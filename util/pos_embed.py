"""Fixed sine-cosine position tables."""

import torch


def sincos_pos_embed(dim, grid_size, cls_token=False, device=None):
    """MAE's 2-D table [rows * columns, dim] in raster order, float64; with `cls_token` a row of zeros comes first.

    A cell at (row r, column c) reads [sin(c w), cos(c w), sin(r w), cos(r w)] with w_k = 10000^(-k / (dim / 4)),
    k = 0 .. dim/4 - 1: the column first.
    """
    if dim % 4:
        raise ValueError(f"a 2-D sine-cosine table needs a width that is a multiple of 4, got {dim}")
    rows, columns = grid_size
    omega = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64, device=device) / (dim / 4))
    row, column = torch.meshgrid(
        torch.arange(rows, dtype=torch.float64, device=device),
        torch.arange(columns, dtype=torch.float64, device=device),
        indexing="ij",
    )
    angles = [axis.reshape(-1, 1) * omega for axis in (column, row)]  # 2 x [N, dim/4]
    table = torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1)  # [N, dim]
    return torch.cat([table.new_zeros(1, dim), table]) if cls_token else table
