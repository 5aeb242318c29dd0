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

    # The encoder sees class tokens and visible tokens. A token is named by its raster id, a class token by a word.
    prefix = [f"cls{i}" for i in range(w["cls_token"].shape[1])]
    row_of = {}  # of the tables of positions
    for i, name in enumerate(prefix):
        row_of[name] = i
    for t in [*visible, *retained]:
        row_of[t] = len(prefix) + t
    tokens = {}
    for i, name in enumerate(prefix):
        tokens[name] = w["cls_token"][0, i] + w["pos_embed"][0, i]
    for t in visible:
        tokens[t] = embed(img, t, patch, w) + w["pos_embed"][0, row_of[t]]
    if encode is None:
        tokens = transformer(tokens, w, "blocks", heads)
    else:
        tokens = encode(tokens, w, "blocks", heads)

    # The decoder sees mask tokens at the retained ones, too.
    embedded = {}
    for t, x in tokens.items():
        embedded[t] = linear(norm(x, w, "norm"), w, "decoder_embed")
    for t in retained:
        embedded[t] = w["mask_token"][0, 0]
    for t, x in embedded.items():
        embedded[t] = x + w["decoder_pos_embed"][0, row_of[t]]
    decoded = transformer(embedded, w, "decoder_blocks", decoder_heads)
    for name in prefix:
        del decoded[name]

    supervised = list(retained)
    if aggregation is not None:
        filled = {}
        for t in thrown:
            filled[t] = aggregate(decoded, t, columns, aggregation)
        decoded |= filled
        supervised += thrown

    predictions = {}
    total = 0.0
    for t in supervised:
        predictions[t] = linear(norm(decoded[t], w, "decoder_norm"), w, "decoder_pred")
        target = target_of(pixels_of(img, t, patch), norm_pix)
        total = total + ((predictions[t] - target) ** 2).sum() / len(target)
    return total / len(supervised), predictions


def pixels_of(img, token, patch):
    row, column = divmod(token, img.shape[2] // patch)
    return img[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]


def embed(img, token, patch, w):
    convolved = (w["patch_embed.proj.weight"] * pixels_of(img, token, patch)).sum(dim=(1, 2, 3))
    return convolved + w["patch_embed.proj.bias"]


def target_of(pixels, norm_pix):
    """Returns the values of a patch [C, p, p], row by row, with the channels innermost."""
    values = []
    for i in range(pixels.shape[1]):
        for j in range(pixels.shape[2]):
            values += list(pixels[:, i, j])
    target = torch.stack(values)
    if not norm_pix:
        return target
    mean = target.sum() / len(target)
    variance = ((target - mean) ** 2).sum() / (len(target) - 1)
    return (target - mean) / (variance + 1e-6) ** 0.5


def aggregate(decoded, token, columns, aggregation):
    """Returns the depth-wise convolution at a thrown token. Thrown tokens are zeros for it."""
    kernel = aggregation["weight"].double()
    side = kernel.shape[-1]
    row, column = divmod(token, columns)
    total = aggregation["bias"].double()
    for other, x in decoded.items():
        i = other // columns - row + side // 2
        j = other % columns - column + side // 2
        if 0 <= i < side and 0 <= j < side:
            total = total + kernel[:, 0, i, j] * x
    return total


def transformer(tokens, w, name, heads):
    layer = 0
    while f"{name}.{layer}.norm1.weight" in w:
        tokens = block(tokens, w, f"{name}.{layer}", heads)
        layer += 1
    return tokens


def block(tokens, w, prefix, heads):
    qkv = {}
    for t, x in tokens.items():
        qkv[t] = linear(norm(x, w, f"{prefix}.norm1"), w, f"{prefix}.attn.qkv")
    result = {}
    for t, x in tokens.items():
        x = x + linear(attend(t, qkv, heads), w, f"{prefix}.attn.proj")
        result[t] = x + mlp(norm(x, w, f"{prefix}.norm2"), w, f"{prefix}.mlp")
    return result


def mlp(x, w, name):
    hidden = linear(x, w, f"{name}.fc1")
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    return linear(hidden, w, f"{name}.fc2")


def attend(query, qkv, heads, bias=None):
    """Returns what one token reads from all tokens in `qkv`. bias(token, head) is added to the logit of a key."""
    dim = len(qkv[query]) // 3
    width = dim // heads
    outputs = []
    for head in range(heads):
        start = head * width
        q = qkv[query][start : start + width]
        shares = {}
        for t, x in qkv.items():
            key = x[dim + start : dim + start + width]
            logit = q @ key / math.sqrt(width)
            if bias is not None:
                logit = logit + bias(t, head)
            shares[t] = logit.exp()
        total = sum(shares.values())
        output = 0.0
        for t, x in qkv.items():
            value = x[2 * dim + start : 2 * dim + start + width]
            output = output + shares[t] / total * value
        outputs.append(output)
    return torch.cat(outputs)


def linear(x, w, name):
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def norm(x, w, name, eps=1e-6):
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / (variance + eps) ** 0.5 * w[f"{name}.weight"] + w[f"{name}.bias"]
