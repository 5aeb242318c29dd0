"""An independent MAE with partial reconstruction, from the papers alone: float64, image by image, token by token.

It shares no code with the project. Weights have the names of MAE's releases. `aggregation` holds the depth-wise kernel
of PR-MIM ("weight" [C, 1, k, k], "bias" [C]). `encode` replaces the encoder's blocks.
"""

import math

import torch


def slow_loss(
    weights, img, visible, retained, thrown, patch, heads, decoder_heads, norm_pix, aggregation=None, encode=None
):
    """Returns (mean over supervised tokens of each token's mean squared error, {token: prediction}).

    img: [C, H, W]. visible, retained, thrown: lists of raster ids. Without `aggregation`, thrown tokens are not
    supervised.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    img = img.double()
    columns = img.shape[2] // patch

    def pixels(token):
        r, c = divmod(token, columns)
        return img[:, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch]

    kernel = w["patch_embed.proj.weight"]
    prefix = ["cls", *(f"cls{i}" for i in range(1, w["cls_token"].shape[1]))]
    tokens = {name: w["cls_token"][0, i] + w["pos_embed"][0, i] for i, name in enumerate(prefix)}
    for t in visible:
        convolved = (kernel * pixels(t)).sum(dim=(1, 2, 3)) + w["patch_embed.proj.bias"]
        tokens[t] = convolved + w["pos_embed"][0, len(prefix) + t]
    tokens = (encode or transformer)(tokens, w, "blocks", heads)
    tokens = {t: norm(x, w, "norm") for t, x in tokens.items()}

    embedded = {t: linear(x, w, "decoder_embed") for t, x in tokens.items()}
    for t in retained:
        embedded[t] = w["mask_token"][0, 0]
    positions = w["decoder_pos_embed"][0]
    rows = {t: prefix.index(t) if t in prefix else len(prefix) + t for t in embedded}
    embedded = {t: x + positions[rows[t]] for t, x in embedded.items()}
    decoded = transformer(embedded, w, "decoder_blocks", decoder_heads)
    decoded = {t: x for t, x in decoded.items() if t not in prefix}

    if aggregation is not None:
        side = aggregation["weight"].shape[-1]
        filled = dict(decoded)
        for t in thrown:
            r, c = divmod(t, columns)
            total = aggregation["bias"].double()
            for other, x in decoded.items():
                i, j = other // columns - r + side // 2, other % columns - c + side // 2
                if 0 <= i < side and 0 <= j < side:
                    total = total + aggregation["weight"][:, 0, i, j].double() * x
            filled[t] = total
        decoded = filled

    errors, predictions = [], {}
    for t in [*retained, *(thrown if aggregation is not None else [])]:
        predictions[t] = linear(norm(decoded[t], w, "decoder_norm"), w, "decoder_pred")
        patch_pixels = pixels(t)
        target = torch.stack(
            [patch_pixels[ch, i, j] for i in range(patch) for j in range(patch) for ch in range(img.shape[0])]
        )
        if norm_pix:
            mean = target.sum() / len(target)
            variance = ((target - mean) ** 2).sum() / (len(target) - 1)
            target = (target - mean) / (variance + 1e-6) ** 0.5
        errors.append(((predictions[t] - target) ** 2).sum() / len(target))
    return sum(errors) / len(errors), predictions


def transformer(tokens, w, name, heads):
    depth = 1 + max(int(key.removeprefix(name + ".").split(".")[0]) for key in w if key.startswith(name + "."))
    for layer in range(depth):
        tokens = block(tokens, w, f"{name}.{layer}", heads)
    return tokens


def block(tokens, w, prefix, heads):
    qkv = {t: linear(norm(x, w, f"{prefix}.norm1"), w, f"{prefix}.attn.qkv") for t, x in tokens.items()}
    attended = {t: _attend(t, qkv, heads) for t in tokens}
    tokens = {t: x + linear(attended[t], w, f"{prefix}.attn.proj") for t, x in tokens.items()}
    for t, x in tokens.items():
        hidden = linear(norm(x, w, f"{prefix}.norm2"), w, f"{prefix}.mlp.fc1")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        tokens[t] = x + linear(hidden, w, f"{prefix}.mlp.fc2")
    return tokens


def _attend(query, qkv, heads):
    dim = len(qkv[query]) // 3
    width, out = dim // heads, []
    for h in range(heads):
        span = slice(h * width, (h + 1) * width)
        scores = {t: (qkv[query][:dim][span] @ x[dim : 2 * dim][span]) / math.sqrt(width) for t, x in qkv.items()}
        total = sum(s.exp() for s in scores.values())
        out.append(sum(s.exp() / total * qkv[t][2 * dim :][span] for t, s in scores.items()))
    return torch.cat(out)


def linear(x, w, name):
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def norm(x, w, name, eps=1e-6):
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / (variance + eps) ** 0.5 * w[f"{name}.weight"] + w[f"{name}.bias"]
