# ruff: noqa
# fmt: off
# mypy: ignore-errors
"""When does throwing pay? Trains all arms x rates x seeds of PR-MIM's nano model AT ONCE, stacked, on one GPU.

See the flags (--help), and study_gpu_report.py for the tables.
Model index: m = (arm, rate, seed), the seed fastest. Shapes below: A arms of a group, R rates, S seeds, B images a model.

Registration: throwing, 32 models at once on one GPU (written on 2026-11-26 before any run with its seeds)

Script: `study_gpu.py` beside this file: stacked models whose losses and gradients equal the project's to 1e-14 in float64 (weights after three AdamW steps to 1.3e-11); crops, masks and initial weights are addressed by the seed as the project's. CIFAR-10 at 32 px (its images as JPEGs, in ImageFolder layout), 64 tokens, `mae_vit_nano_patch4`, mask .75, `norm_pix_loss`, crops .6 to 1, batches of 256, cosine with a tenth of warm-up, ρ_d .5. Arms: MAE, plain, progressive (random), PR-MIM (furthest). Seeds 2000 to 2007, paired.

**One rate for all arms**: .005, which the slot pilot chose on an H100 (4 passes, seeds 900 and 901, mean of the frozen score of all arms: .0025 41.2, .005 41.4, .01 40.6, .02 36.9).
**Length**: the largest of 32, 24, 16, 8 passes that fits the time; shorter ones after it if they fit.
**Outcomes**: A, fine-tuned (3 passes, all labels); B, frozen (mean of kNN and ridge).
**Primary**: A at the greatest length, PR-MIM − MAE, 95 % interval against ±0.5. **Secondary** (unadjusted, 95 %): plain − MAE, progressive − plain, PR-MIM − progressive, each for A and B. All finite results count; nothing is repeated or dropped.

```bash
python3 study_gpu.py --selfcheck --same_shapes                                   # 100 s cold beside other work; fills the compiler's cache
python3 study_gpu.py --data cifar10.tar.xz --cache c.npz --rates .005 --seeds 2000 2001 2002 2003 2004 2005 2006 2007 \
    --passes 32 24 16 8 --budget SECONDS --out study.csv
python3 study_gpu_report.py study.csv
```
On the H100: 24 throwing models 8.8 ms a step, 8 of MAE 5.4 ms (700,000 and 376,000 images/s over all models); 32 passes 94 s, preparation 50 s with a filled cache, fine-tuning about 15 s.

The pilot's frozen scores at 4 passes (two seeds, each arm at its best rate): MAE 42.8 (.0025), plain 41.4 (.005), progressive 41.2 (.01), PR-MIM 41.2 (.005 and .01). A pilot, not a result.
"""
import argparse, csv, functools, io, math, os, sys, time, tarfile
from concurrent.futures import ProcessPoolExecutor
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

N, GRID, D, H, HD, PIX, NV = 64, 8, 64, 2, 32, 48, 16   # tokens, side, width, heads, head width, pixels, visible
ENC, DEC, HID, CLASSES, EPS = 3, 2, 256, 10, 1e-6
ARMS = ("mae", "plain50", "progressive50", "prmim50")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)   # the project's default, ImageNet's
T0 = time.time()


def say(*a):
    print(f"[{time.time() - T0:7.1f}s]", *a, flush=True)


# ---------------------------------------------------------------------------------------------------- data
def _decode(blob):
    from PIL import Image
    return np.asarray(Image.open(io.BytesIO(blob)).convert("RGB"))


def _decode_many(blobs):
    return np.stack([_decode(b) for b in blobs])


def read_data(path, cache=None, workers=None):
    """Returns Xtrain, ytrain, Xval, yval (uint8 [n,3,32,32], int64). path: .npz, or the ImageFolder as .tar.xz."""
    if cache and os.path.exists(cache):
        path = cache
    if path.endswith(".npz"):
        z = np.load(path)
        out = [z["Xtrain"], z["ytrain"], z["Xval"], z["yval"]]
    else:
        files = []
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isfile() and member.name.lower().endswith((".jpg", ".jpeg", ".png")):
                    split, label, name = member.name.split("/")[-3:]
                    files.append((split, label, name, tar.extractfile(member).read()))
        files.sort(key=lambda f: f[:3])
        classes = sorted({f[1] for f in files})
        blobs = [f[3] for f in files]
        parts = [blobs[i:i + 1000] for i in range(0, len(blobs), 1000)]
        with ProcessPoolExecutor(workers or os.cpu_count()) as pool:
            X = np.concatenate(list(pool.map(_decode_many, parts)))
        y = np.array([classes.index(f[1]) for f in files], np.int64)
        train = np.array([f[0] == "train" for f in files])
        out = [X[train], y[train], X[~train], y[~train]]
        if cache:
            np.savez(cache + ".tmp.npz", Xtrain=out[0], ytrain=out[1], Xval=out[2], yval=out[3])
            os.replace(cache + ".tmp.npz", cache)
    X, y, Xv, yv = (torch.from_numpy(np.ascontiguousarray(a)) for a in out)
    return X.permute(0, 3, 1, 2).contiguous(), y, Xv.permute(0, 3, 1, 2).contiguous(), yv


# ---------------------------------------- addressed random numbers (the project's util/addressed.py, on the device)
SHUFFLE, AUGMENT, MASK, DROP = 1, 2, 3, 99
_S = lambda v: v - 2**64 if v >= 2**63 else v   # as signed int64
INC, F1, F2 = _S(0x9E3779B97F4A7C15), _S(0xBF58476D1CE4E5B9), _S(0x94D049BB133111EB)


def _shr(z, k):
    return (z >> k) & ((1 << (64 - k)) - 1)


def _mix(z):
    z = (z ^ _shr(z, 30)) * F1
    z = (z ^ _shr(z, 27)) * F2
    return z ^ _shr(z, 31)


def addressed53(stream, seed, epoch, indices, num):
    """53-bit integers [n, num]; times 2^-53 they are the project's uniform numbers."""
    key = torch.zeros_like(indices)
    for part in (stream, seed, epoch, indices):
        key = _mix((key ^ part) + INC)
    counter = torch.arange(1, num + 1, device=indices.device) * INC
    return _shr(_mix(key[:, None] + counter), 11)


def permutation(seed, epoch, n, device):
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return addressed53(SHUFFLE, seed, epoch, zero, n)[0].argsort()


def boxes(seed, epoch, indices, scale):
    """The project's RandomResizedCropFlip on 32 px: (top, left, height, width, flip), int64 [n] each."""
    u = addressed53(AUGMENT, seed, epoch, indices, 23).double() * 2.0**-53
    lo, hi = math.log(3 / 4), math.log(4 / 3)
    area = 1024 * (scale[0] + u[:, 0:20:2] * (scale[1] - scale[0]))
    ratio = torch.exp(lo + u[:, 1:20:2] * (hi - lo))
    w, h = torch.round((area * ratio).sqrt()).long(), torch.round((area / ratio).sqrt()).long()
    ok = (w > 0) & (w <= 32) & (h > 0) & (h <= 32)
    first = torch.where(ok, torch.arange(10, device=u.device), 10).amin(1)
    none = first == 10
    at = first.clamp(max=9)[:, None]
    w = torch.where(none, 32, w.gather(1, at)[:, 0])
    h = torch.where(none, 32, h.gather(1, at)[:, 0])
    top = torch.where(none, 0, (u[:, -3] * (33 - h)).long())
    left = torch.where(none, 0, (u[:, -2] * (33 - w)).long())
    return top, left, h, w, u[:, -1] < 0.5


def resize_tables(device):
    """Antialiased bicubic resize of a slice (length, first) of 32 pixels to 32, as matrices [2 * 33 * 33, 32, 32]."""
    W = torch.zeros(2, 33, 33, 32, 32)
    for length in range(1, 33):
        eye = torch.eye(length)[None, None]                                   # [1,1,length,length]
        M = F.interpolate(eye, (32, length), mode="bicubic", antialias=True)[0, 0] if length < 32 else eye[0, 0]
        for first in range(33 - length):
            W[0, length, first, :, first:first + length] = M
            W[1, length, first, :, first:first + length] = M.flip(0)
    return W.view(-1, 32, 32).to(device)


def furthest(masked, num):
    """Algorithm 1. masked: raster ids in shuffled order [n, 48]. Returns positions [n, num]. Ties: lowest position."""
    n, m = masked.shape
    r, c = (masked // GRID).to(torch.int32), (masked % GRID).to(torch.int32)
    near = torch.full((n, m), 1000, dtype=torch.int32, device=masked.device)
    back = torch.arange(m - 1, -1, -1, dtype=torch.int32, device=masked.device)
    pick = torch.zeros(n, 1, dtype=torch.int64, device=masked.device)
    picks = []
    for _ in range(num):
        picks.append(pick)
        d = (r - r.gather(1, pick)).square_() + (c - c.gather(1, pick)).square_()
        near = torch.minimum(near, d)
        pick = (m - 1 - (near * 64 + back).amax(1, keepdim=True) % 64).long()
    return torch.cat(picks, 1)


def by_state(visible, retained):
    """[visible | retained | thrown], ascending inside each, uint8 [n, 64]."""
    n = len(visible)
    state = torch.full((n, N), 2 * N, dtype=torch.int16, device=visible.device)
    state.scatter_(1, visible, 0)
    state.scatter_(1, retained, N)
    keys = state + torch.arange(N, dtype=torch.int16, device=visible.device)
    return (keys.sort(1).values % N).to(torch.uint8)


def token_orders(seed, epoch, indices):
    """Returns ids_shuffle uint8 [n, 64] of MAE, of random sampling and of furthest sampling."""
    shuffled = addressed53(MASK, seed, epoch, indices, N).argsort(1)
    visible, masked = shuffled[:, :NV], shuffled[:, NV:]
    return (by_state(visible, masked), by_state(visible, masked[:, :16]),
            by_state(visible, masked.gather(1, furthest(masked, 16))))


class Tables:
    """What a pass over the images needs, on the device: order, crops and masks (pre-training) or drops (fine-tuning)."""

    def __init__(self, seeds, n, device, masks=True, scale=(0.6, 1.0)):
        self.seeds, self.n, self.masks, self.scale, self.device = seeds, n, masks, scale, device
        S = len(seeds)
        self.order = torch.zeros(S, n, dtype=torch.int64, device=device)
        self.wy = torch.zeros(S, n, dtype=torch.int64, device=device)
        self.wx = torch.zeros(S, n, dtype=torch.int64, device=device)
        if masks:
            self.ids = torch.zeros(3, S, n, N, dtype=torch.uint8, device=device)
        else:
            self.drop = torch.zeros(S, n, 4, device=device)

    def fill(self, epoch):
        for s, seed in enumerate(self.seeds):
            order = permutation(seed, epoch, self.n, self.device)
            top, left, h, w, flip = boxes(seed, epoch, order, self.scale)
            self.order[s] = order
            self.wy[s] = h * 33 + top
            self.wx[s] = (flip.long() * 33 + w) * 33 + left
            if self.masks:
                for k, ids in enumerate(token_orders(seed, epoch, order)):
                    self.ids[k, s] = ids
            else:
                self.drop[s] = (addressed53(DROP, seed, epoch, order, 4).double() * 2.0**-53).float()


class Images:
    def __init__(self, X, y, device):
        self.X, self.y, self.W = X.to(device), y.to(device), resize_tables(device)
        self.mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1) * 255
        self.std = torch.tensor(STD, device=device).view(1, 3, 1, 1) * 255

    def crops(self, order, wy, wx):
        """Normalised patches [S, B, 64, 48] of cropped images [S, B]."""
        S, B = order.shape
        x = self.X[order.flatten()].float()
        Wy, Wx = self.W[wy.flatten()][:, None], self.W[wx.flatten()][:, None]
        x = (x @ Wx.transpose(-1, -2)).round().clamp(0, 255)   # in two passes that round, as torch's uint8 kernel
        x = (Wy @ x).round().clamp(0, 255)
        return patchify((x - self.mean) / self.std).view(S, B, N, PIX)


def patchify(x):
    x = x.view(len(x), 3, GRID, 4, GRID, 4).permute(0, 2, 4, 3, 5, 1)
    return x.reshape(len(x), N, PIX)


# ---------------------------------------------------------------------------------------------------- parameters
def block_spec(pre):
    return [(pre + "norm1.weight", (D,)), (pre + "norm1.bias", (D,)), (pre + "attn.qkv.weight", (3 * D, D)),
            (pre + "attn.qkv.bias", (3 * D,)), (pre + "attn.proj.weight", (D, D)), (pre + "attn.proj.bias", (D,)),
            (pre + "norm2.weight", (D,)), (pre + "norm2.bias", (D,)), (pre + "mlp.fc1.weight", (HID, D)),
            (pre + "mlp.fc1.bias", (HID,)), (pre + "mlp.fc2.weight", (D, HID)), (pre + "mlp.fc2.bias", (D,))]


STEM = [("cls_token", (1, D)), ("patch_embed.proj.weight", (D, PIX)), ("patch_embed.proj.bias", (D,))]
ENCODER = STEM + [e for i in range(ENC) for e in block_spec(f"blocks.{i}.")]
NORM = [("norm.weight", (D,)), ("norm.bias", (D,))]
DECODER = ([("decoder.mask_token", (1, D)), ("decoder.embed.weight", (D, D)), ("decoder.embed.bias", (D,))]
           + [e for i in range(DEC) for e in block_spec(f"decoder.blocks.{i}.")]
           + [("decoder.norm.weight", (D,)), ("decoder.norm.bias", (D,)), ("decoder.pred.weight", (PIX, D)),
              ("decoder.pred.bias", (PIX,))])
CONV = [("decoder.aggregation.operator.weight", (D, 49)), ("decoder.aggregation.operator.bias", (D,))]
FT = [("pos_embed", (N + 1, D))] + ENCODER + [("fc_norm.weight", (D,)), ("fc_norm.bias", (D,)),
                                               ("head.weight", (CLASSES, D)), ("head.bias", (CLASSES,))]


def sincos():
    omega = 10000.0 ** (-torch.arange(D // 4, dtype=torch.float64) / (D / 4))
    row, col = torch.meshgrid(*[torch.arange(GRID, dtype=torch.float64)] * 2, indexing="ij")
    parts = []
    for axis in (col, row):
        a = axis.reshape(-1, 1) * omega
        parts += [a.sin(), a.cos()]
    return torch.cat(parts, 1).float()   # [64, D]


def to_stack(name, value):
    """A tensor of the project's state dict in the layout used here."""
    if name == "patch_embed.proj.weight":
        return value.permute(0, 2, 3, 1).flatten(1)
    if name.endswith("operator.weight"):
        return value.flatten(1)
    if value.ndim == 3:
        return value[0]
    return value


class _Block(nn.Module):   # constructed in the project's order, so that a seed gives the project's weights
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(D)
        self.attn = nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm2 = nn.LayerNorm(D)
        self.mlp = nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(D, HID), nn.Linear(HID, D)


def _xavier(module):
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Conv2d) and layer.groups == 1:
            nn.init.xavier_uniform_(layer.weight.view(D, -1))


@functools.lru_cache(None)
def initial(seed, conv=True, head=False):
    """The project's initial weights of a seed (torch.manual_seed(seed); mae_vit_nano_patch4 or vit_nano_patch4)."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        m = nn.Module()
        m.patch_embed = nn.Module()
        m.patch_embed.proj = nn.Conv2d(3, D, 4, stride=4)
        m.cls_token = nn.Parameter(torch.zeros(1, 1, D))
        m.blocks = nn.ModuleList(_Block() for _ in range(ENC))
        m.norm = nn.LayerNorm(D)
        _xavier(m)
        nn.init.normal_(m.cls_token, std=0.02)
        if head:
            m.head = nn.Linear(D, CLASSES)
            nn.init.trunc_normal_(m.head.weight, std=2e-5)
            nn.init.zeros_(m.head.bias)
        else:
            d = nn.Module()
            d.embed = nn.Linear(D, D)
            d.mask_token = nn.Parameter(torch.zeros(1, 1, D))
            d.blocks = nn.ModuleList(_Block() for _ in range(DEC))
            d.norm = nn.LayerNorm(D)
            d.pred = nn.Linear(D, PIX)
            _xavier(d)
            nn.init.normal_(d.mask_token, std=0.02)
            if conv:
                d.aggregation = nn.Module()
                d.aggregation.operator = nn.Conv2d(D, D, 7, padding=3, groups=D)
            m.decoder = d
        return {k: v.detach().clone() for k, v in m.state_dict().items()}


def decays(name, shape, finetuning):
    if name == "cls_token":
        return not finetuning
    if name == "decoder.mask_token":
        return True
    return not (len(shape) == 1 or name == "pos_embed")


def layer_of(name):
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return 0 if name.startswith(("cls_token", "pos_embed", "patch_embed")) else ENC + 1


class Params:
    """Stacked parameters: one flat tensor [M, P], of which `leaves` are views, with AdamW's moments.

    A convolution belongs to the last `num_conv` models only; the others' slots stay unused (zero gradient).
    """

    def __init__(self, spec, M, device, dtype, betas, num_conv=0, finetuning=False, layer_decay=1.0, wd=0.05):
        self.spec, self.M, self.num_conv, self.betas = spec, M, num_conv, betas
        sizes = [math.prod(s) for _, s in spec]
        self.at = np.cumsum([0] + sizes).tolist()
        self.theta = torch.zeros(M, self.at[-1], device=device, dtype=dtype)
        self.m, self.v = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
        self.leaves = {}
        self.wd = torch.zeros(self.at[-1], device=device, dtype=dtype)
        self.scale = torch.ones(self.at[-1], device=device, dtype=dtype)
        for i, (name, shape) in enumerate(spec):
            part = self.theta[self.first(name):, self.at[i]:self.at[i + 1]]
            self.leaves[name] = part.detach().view(len(part), *shape).requires_grad_()
            if decays(name, shape, finetuning):
                self.wd[self.at[i]:self.at[i + 1]] = wd
            if finetuning:
                self.scale[self.at[i]:self.at[i + 1]] = layer_decay ** (ENC + 1 - layer_of(name))

    def first(self, name):
        return self.M - self.num_conv if "aggregation" in name else 0

    def load(self, m, weights):
        with torch.no_grad():
            for i, (name, shape) in enumerate(self.spec):
                if m >= self.first(name):
                    self.theta[m, self.at[i]:self.at[i + 1]] = to_stack(name, weights[name]).flatten().to(self.theta)

    def reset(self):
        self.m.zero_()
        self.v.zero_()

    def flat(self, grads):
        out = []
        for name, g in zip(self.leaves, grads):
            g = g.reshape(len(g), -1)
            if len(g) < self.M:
                g = F.pad(g, (0, 0, self.M - len(g), 0))
            out.append(g)
        return torch.cat(out, 1)

    def state(self):
        return [self.theta, self.m, self.v]


def adamw(theta, m, v, g, lr, wd, t, b1, b2, scale=1.0):
    """torch.optim.AdamW's step number t (a float tensor, from 1), in place. lr * scale and wd broadcast to [M, P]."""
    lr = lr * scale
    m_new = m + (g - m) * (1 - b1)
    v_new = v * b2 + g * g * (1 - b2)
    denom = v_new.sqrt() / (1 - b2**t).sqrt() + 1e-8
    theta.copy_(theta * (1 - lr * wd) - lr / (1 - b1**t) * (m_new / denom))
    m.copy_(m_new)
    v.copy_(v_new)


# ---------------------------------------------------------------------------------------------------- model
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:
    @triton.jit
    def _attn_load(qkv, bias, b, h, m, T, TP: tl.constexpr, HN: tl.constexpr, d: tl.constexpr, part: tl.constexpr):
        t = tl.arange(0, TP)[:, None]
        c = tl.arange(0, d)[None, :]
        x = tl.load(qkv + b * T * 3 * HN * d + t * (3 * HN * d) + part * HN * d + h * d + c, mask=t < T, other=0.0)
        return x + tl.load(bias + m * 3 * HN * d + part * HN * d + h * d + c)

    @triton.jit
    def _attn_probs(q, k, T, scale, TP: tl.constexpr):
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(tl.arange(0, TP)[None, :] < T, s, float("-inf"))
        p = tl.exp(s - tl.max(s, 1)[:, None])
        return p / tl.sum(p, 1)[:, None]

    @triton.jit
    def _attn_fwd(qkv, bias, out, T, per_model, scale, TP: tl.constexpr, HN: tl.constexpr, d: tl.constexpr):
        pid = tl.program_id(0).to(tl.int64)
        b, h = pid // HN, pid % HN
        m = b // per_model
        q = _attn_load(qkv, bias, b, h, m, T, TP, HN, d, 0)
        k = _attn_load(qkv, bias, b, h, m, T, TP, HN, d, 1)
        v = _attn_load(qkv, bias, b, h, m, T, TP, HN, d, 2)
        p = _attn_probs(q, k, T, scale, TP)
        o = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        t = tl.arange(0, TP)[:, None]
        c = tl.arange(0, d)[None, :]
        tl.store(out + b * T * HN * d + t * (HN * d) + h * d + c, o.to(out.dtype.element_ty), mask=t < T)

    @triton.jit
    def _attn_bwd(qkv, bias, grad, dqkv, T, per_model, scale, TP: tl.constexpr, HN: tl.constexpr, d: tl.constexpr):
        pid = tl.program_id(0).to(tl.int64)
        b, h = pid // HN, pid % HN
        m = b // per_model
        q = _attn_load(qkv, bias, b, h, m, T, TP, HN, d, 0)
        k = _attn_load(qkv, bias, b, h, m, T, TP, HN, d, 1)
        v = _attn_load(qkv, bias, b, h, m, T, TP, HN, d, 2)
        t = tl.arange(0, TP)[:, None]
        c = tl.arange(0, d)[None, :]
        g = tl.load(grad + b * T * HN * d + t * (HN * d) + h * d + c, mask=t < T, other=0.0)
        p = _attn_probs(q, k, T, scale, TP)
        dp = tl.dot(g, tl.trans(v), input_precision="ieee")
        ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * scale
        at = dqkv + b * T * 3 * HN * d + t * (3 * HN * d) + h * d + c
        ty = dqkv.dtype.element_ty
        dv = tl.dot(tl.trans(p).to(v.dtype), g, input_precision="ieee")
        tl.store(at + 2 * HN * d, dv.to(ty), mask=t < T)
        ds = ds.to(q.dtype)
        tl.store(at, tl.dot(ds, k, input_precision="ieee").to(ty), mask=t < T)
        tl.store(at + HN * d, tl.dot(tl.trans(ds), q, input_precision="ieee").to(ty), mask=t < T)

    def _attn_sizes(qkv, bias, T):
        images = qkv.shape[0] * qkv.shape[1] // T
        TP = max(16, triton.next_power_of_2(T))
        return images, (T, images // len(bias), HD**-0.5), dict(TP=TP, HN=H, d=HD, num_warps={16: 1, 32: 1, 64: 4}.get(TP, 8))

    @torch.library.custom_op("study::attn", mutates_args=())
    def attn(qkv: torch.Tensor, bias: torch.Tensor, T: int) -> torch.Tensor:
        """qkv [M, B * T, 3 * D] without its bias [M, 3 * D]: attention, [M, B * T, D]."""
        qkv, bias = qkv.contiguous(), bias.contiguous()
        out = qkv.new_empty(*qkv.shape[:2], D)
        images, args, sizes = _attn_sizes(qkv, bias, T)
        _attn_fwd[(images * H,)](qkv, bias, out, *args, **sizes)
        return out

    @attn.register_fake
    def _(qkv, bias, T):
        return qkv.new_empty(*qkv.shape[:2], D)

    @torch.library.custom_op("study::attn_backward", mutates_args=())
    def attn_backward(qkv: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor, T: int) -> torch.Tensor:
        qkv, bias, grad = qkv.contiguous(), bias.contiguous(), grad.contiguous()
        out = torch.empty_like(qkv)
        images, args, sizes = _attn_sizes(qkv, bias, T)
        _attn_bwd[(images * H,)](qkv, bias, grad, out, *args, **sizes)
        return out

    @attn_backward.register_fake
    def _(qkv, bias, grad, T):
        return qkv.new_empty(qkv.shape)

    def _attn_setup(ctx, inputs, output):
        qkv, bias, ctx.T = inputs
        ctx.save_for_backward(qkv, bias)

    def _attn_grad(ctx, grad):
        qkv, bias = ctx.saved_tensors
        g = torch.ops.study.attn_backward(qkv, bias, grad, ctx.T)
        return g, g.sum(1), None

    attn.register_autograd(_attn_grad, setup_context=_attn_setup)


def lin(x, W, b):
    """[M, n, in] by W [M, out, in] in x's type, with the bias in x's type."""
    return torch.bmm(x, W.to(x.dtype).transpose(1, 2)) + b.to(x.dtype).unsqueeze(1)


def ln(x, w, b, dtype):
    return (F.layer_norm(x, (D,), None, None, EPS) * w.unsqueeze(1) + b.unsqueeze(1)).to(dtype)


def attend(h, W, b, BB, T, impl):
    M = len(h)
    if impl == "triton":
        qkv = torch.bmm(h, W.to(h.dtype).transpose(1, 2))
        return torch.ops.study.attn(qkv, b.to(h.dtype), T)
    q, k, v = lin(h, W, b).view(M * BB, T, 3, H, HD).unbind(2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if impl == "math":
        s = (q * HD**-0.5) @ k.transpose(-1, -2)
        o = s.to(torch.promote_types(s.dtype, torch.float32)).softmax(-1).to(v.dtype) @ v
    else:
        o = F.scaled_dot_product_attention(q, k, v)
    return o.transpose(1, 2).reshape(M, BB * T, D)


def block(x, w, BB, T, dtype, impl, keep1=None, keep2=None):
    """x float [M, BB * T, D]. w: the block's 12 stacked tensors. keep: drop path, [M, BB, 1, 1]."""
    n1w, n1b, qw, qb, pw, pb, n2w, n2b, f1w, f1b, f2w, f2b = w
    y = lin(attend(ln(x, n1w, n1b, dtype), qw, qb, BB, T, impl), pw, pb)
    if keep1 is not None:
        y = (y.view(len(y), BB, T, D) * keep1).view(y.shape)
    x = x + y
    y = lin(F.gelu(lin(ln(x, n2w, n2b, dtype), f1w, f1b)), f2w, f2b)
    if keep2 is not None:
        y = (y.view(len(y), BB, T, D) * keep2).view(y.shape)
    return x + y


class ToGrid(torch.autograd.Function):
    """Kept tokens [..., nk, C] to the grid [..., 64, C], zeros elsewhere. Both directions are gathers."""

    @staticmethod
    def forward(ctx, x, ids_kept, restore):
        nk = x.shape[-2]
        ctx.save_for_backward(ids_kept)
        idx = restore.clamp(max=nk - 1).unsqueeze(-1).expand(*x.shape[:-2], N, x.shape[-1])
        return torch.where((restore < nk).unsqueeze(-1), x.gather(-2, idx), 0.0)

    @staticmethod
    def backward(ctx, g):
        (ids,) = ctx.saved_tensors
        return g.gather(-2, ids.unsqueeze(-1).expand(*g.shape[:-2], ids.shape[-1], g.shape[-1])), None, None


class FromGrid(torch.autograd.Function):
    """The grid's tokens at the thrown ids [..., nt]."""

    @staticmethod
    def forward(ctx, x, ids_thrown, restore):
        ctx.save_for_backward(restore)
        return x.gather(-2, ids_thrown.unsqueeze(-1).expand(*x.shape[:-2], ids_thrown.shape[-1], x.shape[-1]))

    @staticmethod
    def backward(ctx, g):
        (restore,) = ctx.saved_tensors
        first = N - g.shape[-2]
        idx = (restore - first).clamp(min=0).unsqueeze(-1).expand(*g.shape[:-2], N, g.shape[-1])
        return torch.where((restore >= first).unsqueeze(-1), g.gather(-2, idx), 0.0), None, None


def toeplitz_basis(device):
    """E [49, 64 * 64]: weight k connects input cell i to output cell j (out = in @ T)."""
    E = torch.zeros(49, N, N)
    for i in range(N):
        for j in range(N):
            dr, dc = i // GRID - j // GRID, i % GRID - j % GRID
            if abs(dr) <= 3 and abs(dc) <= 3:
                E[(dr + 3) * 7 + dc + 3, i, j] = 1
    return E.view(49, -1).to(device)


def stem(patches, ids_visible, pos, K, w_cls, w, b, dtype):
    """Embeds visible patches of S seeds for K * S models. Returns float [M, B * 17, D]."""
    S, B, n = ids_visible.shape
    vis = patches.gather(2, ids_visible.unsqueeze(-1).expand(S, B, n, PIX)).to(dtype)
    vis = vis.view(1, S, B * n, PIX).expand(K, S, B * n, PIX).reshape(K * S, B * n, PIX)
    x = lin(vis, w, b).view(K, S, B, n, D) + pos[ids_visible]
    cls = w_cls.view(K, S, 1, 1, D).expand(K, S, B, 1, D)
    return torch.cat([cls.to(x.dtype), x], 3).view(K * S, B * (n + 1), D)


def dec_in(x, nw, nb, ew, eb, mask_token, ids_kept, pos, R, dtype):
    """Final norm of the encoder, embedding, mask tokens and positions. Returns float [M, B * (1 + nk), D]."""
    A, S, B, nk = ids_kept.shape
    M = A * R * S
    z = lin(ln(x, nw, nb, dtype), ew, eb).view(A, R, S, B, NV + 1, D).to(pos.dtype)
    masks = mask_token.view(A, R, S, 1, 1, D).expand(A, R, S, B, nk - NV, D)
    tokens = torch.cat([z[..., 1:, :], masks], -2) + pos[ids_kept].unsqueeze(1)
    return torch.cat([z[..., :1, :], tokens], -2).view(M, B * (1 + nk), D)


def errors(h, w, b, pw, pb, targets, R, dtype):
    """Sum of squared errors [M] of features h [M, B, n, D] against targets [A, S, B, n, 48]."""
    M, B, n, _ = h.shape
    A, S = targets.shape[:2]
    pred = lin(ln(h.reshape(M, B * n, D), w, b, dtype), pw, pb).view(A, R, S, B, n, PIX)
    return (pred.to(targets.dtype) - targets.unsqueeze(1)).square().sum((-1, -2, -3)).view(M)


def convolve(feats, cw, cb, ids_kept, ids_thrown, restore, E, R, dtype):
    """feats [Mc, B, nk, D] to the thrown tokens' [Mc, B, nt, D], by the depth-wise convolution as banded matrices."""
    A, S, B, nk = ids_kept.shape
    M = A * R * S
    x = feats.to(dtype).view(A, R, S, B, nk, D)
    grid = ToGrid.apply(x, ids_kept.unsqueeze(1), restore.unsqueeze(1)).view(M, B, N, D)
    T = (cw.to(dtype).reshape(M * D, 49) @ E.to(dtype)).view(M * D, N, N)
    out = torch.bmm(grid.permute(0, 3, 1, 2).reshape(M * D, B, N), T).view(M, D, B, N).permute(0, 2, 3, 1)
    out = (out + cb.to(dtype).view(M, 1, 1, D)).reshape(A, R, S, B, N, D)
    return FromGrid.apply(out, ids_thrown.unsqueeze(1), restore.unsqueeze(1)).reshape(M, B, N - nk, D)


def patch_targets(patches):
    return (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()


def pick_targets(t, ids):
    """t [S, B, 64, 48], ids [A, S, B, n]: [A, S, B, n, 48]."""
    A, S, B, n = ids.shape
    return t.unsqueeze(0).expand(A, S, B, N, PIX).gather(3, ids.unsqueeze(-1).expand(A, S, B, n, PIX))


class Fns:
    """The pieces, compiled one by one (all encoder blocks share one graph), or plain."""
    def __init__(self, compiled):
        def targets(patches, ids):
            return pick_targets(patch_targets(patches), ids)
        table = dict(block=block, stem=stem, dec_in=dec_in, errors=errors, convolve=convolve, adamw=adamw,
                     targets=targets, ft_head=ft_head, ft_in=ft_in)
        for name, fn in table.items():
            setattr(self, name, torch.compile(fn, dynamic=False, fullgraph=True, backend=os.environ.get("H6_BACKEND", "inductor")) if compiled else fn)


def weights_of(p, pre):
    return tuple(p[name] for name, _ in block_spec(pre))


def mae_loss(p, patches, ids, restore, pos, E, A_plain, R, dtype, fns, impl):
    """Losses [M] of a group. patches [S, B, 64, 48]; ids, restore int64 [A, S, B, 64]; A_plain: the first arms, which
    supervise retained tokens only (mae has only such). pos [64, D]."""
    A, S, B, _ = ids.shape
    mae = E is None
    nk = N if mae else 32
    x = fns.stem(patches, ids[0, :, :, :NV], pos, A * R, p["cls_token"], p["patch_embed.proj.weight"],
                 p["patch_embed.proj.bias"], dtype)
    for i in range(ENC):
        x = fns.block(x, weights_of(p, f"blocks.{i}."), B, NV + 1, dtype, impl[NV + 1])
    x = fns.dec_in(x, p["norm.weight"], p["norm.bias"], p["decoder.embed.weight"], p["decoder.embed.bias"],
                   p["decoder.mask_token"], ids[..., :nk], pos, R, dtype)
    for i in range(DEC):
        x = fns.block(x, weights_of(p, f"decoder.blocks.{i}."), B, nk + 1, dtype, impl[nk + 1])
    feats = x.view(A * R * S, B, nk + 1, D)[:, :, 1:]
    head = [p["decoder.norm.weight"], p["decoder.norm.bias"], p["decoder.pred.weight"], p["decoder.pred.bias"]]
    loss = fns.errors(feats[:, :, NV:], *head, fns.targets(patches, ids[..., NV:nk]), R, dtype)
    n_plain = A_plain * R * S
    plain = loss[:n_plain] / (B * (nk - NV) * PIX)
    if A_plain == A:
        return plain
    late = ids[A_plain:]
    thrown = fns.convolve(feats[n_plain:], p["decoder.aggregation.operator.weight"],
                          p["decoder.aggregation.operator.bias"], late[..., :nk], late[..., nk:], restore[A_plain:],
                          E, R, dtype)
    extra = fns.errors(thrown, *[h[n_plain:] for h in head], fns.targets(patches, late[..., nk:]), R, dtype)
    return torch.cat([plain, (loss[n_plain:] + extra) / (B * (N - NV) * PIX)])


def ft_in(patches, pos, w_cls, w, b, K, dtype):
    S, B = patches.shape[:2]
    x = patches.to(dtype).view(1, S, B * N, PIX).expand(K, S, B * N, PIX).reshape(K * S, B * N, PIX)
    x = lin(x, w, b).view(K * S, B, N, D) + pos[:, None, 1:]
    cls = (w_cls + pos[:, :1]).view(K * S, 1, 1, D).expand(K * S, B, 1, D)
    return torch.cat([cls, x], 2).view(K * S, B * (N + 1), D)


def ft_head(x, nw, nb, hw, hb, B):
    """Mean of the patch tokens, fc_norm and head in float. Returns logits [M, B, classes]."""
    h = x.view(len(x), B, N + 1, D)[:, :, 1:].mean(2)
    return lin(ln(h, nw, nb, h.dtype), hw, hb)


def ft_logits(p, patches, K, dtype, fns, impl, keep=None):
    """keep [S, B, 4] or None: drop path's factors of the blocks 1 and 2, attention and MLP."""
    S, B = patches.shape[:2]
    x = fns.ft_in(patches, p["pos_embed"], p["cls_token"], p["patch_embed.proj.weight"], p["patch_embed.proj.bias"],
                  K, dtype)
    for i in range(ENC):
        k = [None, None]
        if keep is not None and i:
            factors = keep.unsqueeze(0).expand(K, S, B, 4).reshape(K * S, B, 4)
            k = [factors[..., 2 * i - 2 + j].reshape(K * S, B, 1, 1).to(dtype) for j in (0, 1)]
        x = fns.block(x, weights_of(p, f"blocks.{i}."), B, N + 1, dtype, impl[N + 1], *k)
    return fns.ft_head(x, p["fc_norm.weight"], p["fc_norm.bias"], p["head.weight"], p["head.bias"], B)


def ft_loss(logits, labels):
    """Cross entropy with label smoothing .1: [M]. labels [S, B]."""
    M, B, C = logits.shape
    y = labels.unsqueeze(0).expand(M // len(labels), *labels.shape).reshape(M * B)
    return F.cross_entropy(logits.reshape(M * B, C), y, label_smoothing=0.1, reduction="none").view(M, B).mean(1)


# ---------------------------------------------------------------------------------------------------- training
def schedule(steps, warm, floor=0.0):
    """MAE's: linear warm-up from 0, half cosine to the floor; as (factor, floor's factor): rate = lr * a + floor * b."""
    t = torch.arange(steps, dtype=torch.float64)
    c = 0.5 * (1 + torch.cos(math.pi * (t - warm) / max(steps - warm, 1e-9)))
    a = torch.where(t < warm, t / max(warm, 1e-9), c)
    b = torch.where(t < warm, torch.zeros_like(t), 1 - c)
    return torch.stack([a, b]).float()


class Stage:
    """One stacked program: buffers, a step, and its capture. A subclass implements `losses(batch)` and `batch(rows)`."""

    def __init__(self, params, tables, images, B, lr, floor, max_steps, fns):
        dev = params.theta.device
        max_steps = max(max_steps, 32)   # prepare() runs up to ten
        self.p, self.tables, self.images, self.B, self.fns, self.floor = params, tables, images, B, fns, floor
        self.t = torch.zeros(1, dtype=torch.int64, device=dev)
        self.lr = torch.as_tensor(lr, dtype=params.theta.dtype, device=dev).view(-1, 1)
        self.sched = torch.zeros(2, max_steps, device=dev)
        self.log = torch.zeros(max_steps, params.M, device=dev)
        self.per_pass = tables.n // B
        self.rows = torch.arange(B, device=dev)
        self.graph = None

    def step(self):
        rows = (self.t % self.per_pass) * self.B + self.rows
        loss = self.losses(rows)
        grads = torch.autograd.grad(loss.sum(), list(self.p.leaves.values()))
        with torch.no_grad():
            a, b = self.sched.index_select(1, self.t).to(self.lr.dtype)
            self.fns.adamw(self.p.theta, self.p.m, self.p.v, self.p.flat(grads), self.lr * a + self.floor * b, self.p.wd,
                           (self.t + 1).to(self.lr.dtype), *self.p.betas, self.p.scale)
            self.log.index_copy_(0, self.t, loss.detach().float()[None])
            self.t += 1

    def state(self):
        return [*self.p.state(), self.t, self.log]

    def prepare(self, mode):
        """Warms up and captures; the state is as before. Returns seconds per step."""
        saved = [x.clone() for x in self.state()]
        cuda = self.t.is_cuda
        t0 = time.time()
        run = self.step
        if cuda:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            if mode.startswith("graph"):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.step()
                self.graph, run = graph, graph.replay
        elif mode != "eager":
            self.step()
        first = time.time() - t0
        n = 5 if cuda else 1
        run()
        if cuda:
            torch.cuda.synchronize()
        t0 = time.time()
        for _ in range(n):
            run()
        if cuda:
            torch.cuda.synchronize()
        self.run, self.sec = run, (time.time() - t0) / n
        with torch.no_grad():
            for x, y in zip(self.state(), saved):
                x.copy_(y)
        return first

    def start(self, steps, warm):
        self.p.reset()
        self.t.zero_()
        self.log.zero_()
        self.sched[:, :steps] = schedule(steps, warm, self.floor).to(self.sched)

    def last_losses(self, steps):
        return self.log[max(0, steps - 50):steps].mean(0)


class Pretraining(Stage):
    """A group of arms: {mae}, or those that throw, plain first."""

    def __init__(self, arms, rates, seeds, images, tables, B, max_steps, dtype, fns, impl, device, fdt=torch.float32):
        self.arms, self.R, self.S, self.dtype, self.impl = arms, len(rates[arms[0]]), len(seeds), dtype, impl
        self.seeds = seeds
        mae = arms == ["mae"]
        self.A_plain = 1 if arms[0] in ("mae", "plain50") else 0
        M = len(arms) * self.R * self.S
        num_conv = M - self.A_plain * self.R * self.S
        spec = ENCODER + NORM + DECODER + (CONV if num_conv else [])
        lr = [rates[a][r] for a in arms for r in range(self.R) for _ in seeds]
        self.index = [(a, rates[a][r], s) for a in arms for r in range(self.R) for s in seeds]
        params = Params(spec, M, device, fdt, (0.9, 0.95), num_conv)
        super().__init__(params, tables, images, B, lr, 0.0, max_steps, fns)
        self.pos = sincos().to(device, fdt)
        self.E = None if mae else toeplitz_basis(device)
        self.kind = torch.tensor([{"mae": 0, "prmim50": 2}.get(a, 1) for a in arms], device=device)
        self.raster = torch.arange(N, device=device)

    def load_initial(self):
        for m, (_, _, seed) in enumerate(self.index):
            self.p.load(m, initial(seed))

    def batch(self, rows):
        t = self.tables
        patches = self.images.crops(t.order[:, rows], t.wy[:, rows], t.wx[:, rows])
        ids = t.ids.index_select(2, rows).index_select(0, self.kind).long()
        return patches, ids

    def losses(self, rows):
        with torch.no_grad():
            patches, ids = self.batch(rows)
        return self.losses_of(patches, ids)

    def losses_of(self, patches, ids):
        with torch.no_grad():
            restore = torch.empty_like(ids).scatter_(-1, ids, self.raster.expand_as(ids))
        return mae_loss(self.p.leaves, patches, ids, restore, self.pos, self.E, self.A_plain, self.R, self.dtype,
                        self.fns, self.impl)


class Finetuning(Stage):
    """All blocks with all labels, as in the registered study. index: of the models, (arm, rate, seed), seed fastest."""

    def __init__(self, index, seeds, images, tables, B, max_steps, dtype, fns, impl, device, blr=0.032,
                 layer_decay=0.65, drop_path=0.1, fdt=torch.float32):
        self.index, self.S, self.K, self.dtype, self.impl = index, len(seeds), len(index) // len(seeds), dtype, impl
        params = Params(FT, len(index), device, fdt, (0.9, 0.999), 0, True, layer_decay)
        super().__init__(params, tables, images, B, [blr * B / 256] * len(index), 1e-6, max_steps, fns)
        rates = [drop_path * i / (ENC - 1) for i in range(ENC)]
        self.keep = torch.tensor([1 - rates[1]] * 2 + [1 - rates[2]] * 2, device=device)
        self.heads = {s: initial(s, head=True) for s in seeds}

    def load_encoders(self, thetas):
        """thetas: of each model, {name: tensor in the layout used here}."""
        pos = torch.cat([torch.zeros(1, D), sincos()])
        for m, (_, _, seed) in enumerate(self.index):
            head = self.heads[seed]
            w = {**thetas[m], "pos_embed": pos, "head.weight": head["head.weight"], "head.bias": head["head.bias"],
                 "fc_norm.weight": torch.ones(D), "fc_norm.bias": torch.zeros(D)}
            with torch.no_grad():
                self.p.theta[m] = torch.cat([w[name].flatten().to(self.p.theta) for name, _ in FT])

    def losses(self, rows):
        t = self.tables
        with torch.no_grad():
            order = t.order[:, rows]
            patches = self.images.crops(order, t.wy[:, rows], t.wx[:, rows])
            keep = (t.drop[:, rows] < self.keep).float() / self.keep
        logits = ft_logits(self.p.leaves, patches, self.K, self.dtype, self.fns, self.impl, keep)
        return ft_loss(logits, self.images.y[order])

    @torch.no_grad()
    def top1(self, Xv, yv, plain, chunk=250):
        hits = torch.zeros(self.p.M, device=yv.device)
        impl = {N + 1: "sdpa"}
        for x, y in zip(Xv.split(chunk), yv.split(chunk)):
            patches = patchify((x.float() - self.images.mean) / self.images.std)[None]
            patches = patches.expand(self.S, *patches.shape[1:])
            logits = ft_logits(self.p.leaves, patches, self.K, torch.float32, plain, impl)
            hits += (logits.argmax(-1) == y).sum(1)
        return 100 * hits / len(yv)


@torch.no_grad()
def frozen_features(p, images, X, plain, chunk=250):
    """Mean patch token after the final norm, [M, n, D], float32. Images are resized to 36 px and cropped to 32, as in
    the project's evaluation."""
    M = len(p["cls_token"])
    eye = torch.eye(32, device=X.device)[None, None]
    W = F.interpolate(eye, (36, 32), mode="bicubic", antialias=True)[0, 0, 2:34]   # of which the middle 32 rows
    pos = torch.cat([torch.zeros(1, D), sincos()]).to(X.device).expand(M, N + 1, D)
    out = []
    for x in X.split(chunk):
        x = (x.float() @ W.T).round().clamp(0, 255)
        x = (W @ x).round().clamp(0, 255)
        patches = patchify((x.contiguous() - images.mean) / images.std)[None]
        B = patches.shape[1]
        h = ft_in(patches.float(), pos, p["cls_token"], p["patch_embed.proj.weight"], p["patch_embed.proj.bias"], M,
                  torch.float32)
        for i in range(ENC):
            h = block(h, weights_of(p, f"blocks.{i}."), B, N + 1, torch.float32, "sdpa")
        h = ln(h, p["norm.weight"], p["norm.bias"], torch.float32)
        out.append(h.view(M, B, N + 1, D)[:, :, 1:].mean(2))
    return torch.cat(out, 1)


@torch.no_grad()
def knn_ridge(A, B, la, lb):
    """kNN (k 20) and ridge (.01) of bank A [n, D] and test B [q, D], as in tools/length_study.py. Percent, tensors."""
    if not (A.isfinite().all() & B.isfinite().all()):
        return float("nan"), float("nan")
    A, B = A.double(), B.double()
    mu, sd = A.mean(0), A.std(0, correction=0) + 1e-6
    A, B = (A - mu) / sd, (B - mu) / sd
    s, i = (F.normalize(B, dim=1).float() @ F.normalize(A, dim=1).float().T).topk(20, 1)
    votes = torch.zeros(len(B), CLASSES, device=A.device).scatter_add_(1, la[i], ((s - s[:, :1]) / 0.07).exp())
    knn = (votes.argmax(1) == lb).double().mean() * 100
    Y = F.one_hot(la, CLASSES).double()
    mean = Y.mean(0)
    gram = A.T @ A / len(A) + 0.01 * torch.eye(D, dtype=torch.float64, device=A.device)
    W = torch.linalg.solve(gram, A.T @ (Y - mean) / len(A))
    ridge = ((B @ W + mean).argmax(1) == lb).double().mean() * 100
    return knn.item(), ridge.item()


# ---------------------------------------------------------------------------------------------------- program
def choose_attention(want, M, B, Ts, dtype, device):
    """{T: implementation}: the wanted one, or the fastest that agrees with the reference."""
    if device.type != "cuda":
        return {T: ("sdpa" if want == "auto" else want) for T in Ts}
    chosen = {}
    for T in Ts:
        best = None
        for impl in (["sdpa", "math"] + (["triton"] if triton is not None else []) if want == "auto" else [want]):
            try:
                torch.manual_seed(0)
                h = torch.randn(M, B * T, D, device=device, dtype=dtype)
                W = torch.randn(M, 3 * D, D, device=device) / 4
                b = torch.randn(M, 3 * D, device=device)
                h.requires_grad_(), W.requires_grad_(), b.requires_grad_()
                def both(f=h, t=dtype, i=impl):
                    o = attend(f, W, b, B, T, i)
                    return (o, *torch.autograd.grad(o.float().square().sum(), (f, W, b)))
                got = both()
                if best is None:
                    ref = got   # of sdpa
                err = max(((g.float() - r.float()).norm() / r.float().norm()).item() for g, r in zip(got, ref))
                for _ in range(2):
                    both()
                torch.cuda.synchronize()
                t0 = time.time()
                for _ in range(5):
                    both()
                torch.cuda.synchronize()
                ms = (time.time() - t0) / 5 * 1e3
                say(f"attention T={T} {impl}: {ms:.2f} ms fwd+bwd with qkv, relative difference from sdpa {err:.1e}")
                if err < 0.03 and (best is None or ms < best[0]):
                    best = (ms, impl)
            except Exception as e:   # noqa: BLE001
                say(f"attention T={T} {impl} failed: {type(e).__name__}: {str(e)[:200]}")
        chosen[T] = best[1] if best else "sdpa"
    return chosen


MODES = {"graph": ["graph", "graph_eager", "compile", "eager"], "graph_eager": ["graph_eager", "eager"],
         "compile": ["compile", "eager"], "eager": ["eager"]}


def prepare(make, mode, name):
    """make(fns) -> stage. Tries the mode, then simpler ones."""
    for m in MODES[mode]:
        try:
            stage = make(Fns(m in ("graph", "compile")))
            first = stage.prepare(m)
            say(f"{name}: mode {m}, {stage.p.M} models x {stage.B}, prepared in {first:.1f} s, "
                f"{stage.sec * 1e3:.2f} ms/step, {stage.p.M * stage.B / stage.sec:,.0f} images/s over all models")
            return stage, m
        except Exception as e:   # noqa: BLE001
            say(f"{name}: mode {m} failed: {type(e).__name__}: {str(e)[:1500]}")
            stage = None
            if torch.cuda.is_available():
                try:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                except Exception as e:   # noqa: BLE001
                    say("  the device does not recover:", str(e)[:200])
    raise SystemExit(f"{name}: no mode works")


def parse_rates(args):
    rates = {a: list(args.rates) for a in args.arms}
    for item in args.arm_rates:
        arm, values = item.split("=")
        rates[arm] = [float(v) for v in values.split(",")]
    if len({len(rates[a]) for a in args.arms}) > 1:
        raise SystemExit("all arms need the same number of rates")
    return rates


FIELDS = ("arm", "rate", "seed", "passes", "steps", "batch", "loss", "knn", "ridge", "frozen", "finetuned", "finite",
          "seconds", "mode", "device")


class Rows:
    def __init__(self, path):
        self.path, self.rows = path, {}
        if path and os.path.exists(path):
            with open(path, newline="") as f:
                for r in csv.DictReader(f):
                    self.rows[r["arm"], float(r["rate"]), int(r["seed"]), float(r["passes"]), int(r["batch"])] = r

    def put(self, key, **values):
        self.rows.setdefault(key, dict.fromkeys(FIELDS, "")).update(values)

    def write(self):
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        with open(self.path + ".tmp", "w", newline="") as f:
            w = csv.DictWriter(f, FIELDS)
            w.writeheader()
            w.writerows(self.rows.values())
        os.replace(self.path + ".tmp", self.path)


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--data", default="cifar.npz", help=".npz, or cifar10.tar.xz (ImageFolder)")
    p.add_argument("--cache", default="", help="where to keep the decoded images of a .tar.xz as .npz")
    p.add_argument("--out", default="study.csv")
    p.add_argument("--passes", type=float, nargs="+", default=[8, 32])
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--rates", type=float, nargs="+", default=[0.01], help="peak rates of AdamW (not base rates)")
    p.add_argument("--arm_rates", nargs="*", default=[], help="other rates of single arms, e.g. mae=.01 prmim50=.005")
    p.add_argument("--seeds", type=int, nargs="+", default=list(range(1000, 1008)))
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    p.add_argument("--mode", choices=MODES, default="graph")
    p.add_argument("--attn", choices=("auto", "sdpa", "math", "triton"), default="auto")
    p.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    p.add_argument("--budget", type=float, default=0, help="seconds from the start; 0: none")
    p.add_argument("--chunk", type=int, default=0, help="most models in one stacked program; 0: all")
    p.add_argument("--ft_batch", type=int, default=64)
    p.add_argument("--ft_passes", type=float, default=3, help="0: no fine-tuning")
    p.add_argument("--ft_blr", type=float, default=0.032)
    p.add_argument("--limit", type=int, default=0, help="use the first images only (tests)")
    p.add_argument("--pilot", action="store_true", help="4 rates, seed 900, 8 passes")
    p.add_argument("--slot_pilot", type=float, nargs="+", default=[], metavar="X", help="passes, then rates that divide the seeds: chooses one rate for all arms, with seeds 900, 901, ...")
    p.add_argument("--selfcheck", action="store_true")
    p.add_argument("--same_shapes", action="store_true", help="selfcheck with the seeds and batch of the study, which also fills the compiler's cache for it")
    p.add_argument("--curve", action="store_true", help="print the losses along the way (at the end of a stage)")
    args = p.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32, "bfloat16": torch.bfloat16,
             "float32": torch.float32}[args.dtype]
    torch._dynamo.config.cache_size_limit = 64
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}, {dtype}")
    if args.selfcheck:
        return selfcheck(args, device, dtype)
    if args.pilot:
        args.seeds, args.passes = [900], [8] if args.passes == p.get_default("passes") else args.passes
        if args.rates == p.get_default("rates"):
            args.rates = [0.0025, 0.005, 0.01, 0.02]
    study(args, device, dtype)


def groups_of(args, rates):
    """[(arms, {arm: rates})]: mae and the arms that throw, split by rates if --chunk asks for it."""
    out = []
    throw = [a for a in ("plain50", "progressive50", "prmim50") if a in args.arms]
    for arms in ([throw] if throw else []) + ([["mae"]] if "mae" in args.arms else []):
        R, per = len(rates[arms[0]]), len(arms) * len(args.seeds)
        take = R if not args.chunk else max(1, args.chunk // per)
        for r in range(0, R, take):
            out.append((arms, {a: rates[a][r:r + take] for a in arms}))
    return out


def attention_of(args, groups, device, dtype):
    """The implementation per group and number of tokens, and that of fine-tuning."""
    out = []
    for arms, rs in groups:
        M = len(arms) * len(rs[arms[0]]) * len(args.seeds)
        out.append(choose_attention(args.attn, M, args.batch, (NV + 1, N + 1 if arms == ["mae"] else 33), dtype, device))
    M = sum(len(a) * len(r[a[0]]) * len(args.seeds) for a, r in groups)
    return out, choose_attention(args.attn, M, args.ft_batch, (N + 1,), dtype, device)


def slot_pilot(stages, tables, grid, steps, per, images, bank, Xv, yv, plain):
    """Trains with pilot seeds in the seeds' places, each place with a rate of its own. Returns the rate that has the
    highest frozen score, averaged over all arms and pilot seeds."""
    t0 = time.time()
    true = tables.seeds
    S = len(true)
    slots = [900 + i // len(grid) for i in range(S)]
    rates = [grid[i % len(grid)] for i in range(S)]
    tables.seeds = slots
    for s in stages:
        with torch.no_grad():
            s.lr.copy_(torch.tensor(rates * len(s.arms)).view(-1, 1).to(s.lr))
        kept, s.index = s.index, [(a, r, seed) for a in s.arms for r, seed in zip(rates, slots)]
        s.load_initial()
        s.index = kept
        s.start(steps, steps / 10)
    for epoch in range(math.ceil(steps / per)):
        tables.fill(epoch)
        for s in stages:
            for _ in range(min(per, steps - epoch * per)):
                s.run()
    sync(stages[0].t.device)
    score = {}
    for s in stages:
        A = frozen_features(s.p.leaves, images, images.X[bank], plain)
        T = frozen_features(s.p.leaves, images, Xv, plain)
        for m in range(s.p.M):
            knn, ridge = knn_ridge(A[m], T[m], images.y[bank], yv)
            score.setdefault(s.arms[m // S], {}).setdefault(rates[m % S], []).append(float(knn + ridge) / 2)
    tables.seeds = true
    mean = {r: sum(sum(score[a][r]) / len(score[a][r]) for a in score) / len(score) for r in grid}
    for a in score:
        say(f"slot pilot {a:>13} " + "  ".join(f"{r:g}: " + " ".join(f"{v:.2f}" for v in score[a][r]) for r in grid))
    best = max(mean, key=lambda r: mean[r] if math.isfinite(mean[r]) else -1)
    say(f"slot pilot means {mean} -> {best:g}, {time.time() - t0:.1f} s")
    return best


def study(args, device, dtype):
    X, y, Xv, yv = read_data(args.data, args.cache)
    if args.limit:
        keep = torch.cat([torch.where(y == c)[0][:args.limit // 10] for c in range(CLASSES)])
        X, y, Xv, yv = X[keep], y[keep], Xv[::max(1, 50000 // args.limit)].contiguous(), yv[::max(1, 50000 // args.limit)]
    say(f"data: {len(X)} + {len(Xv)} images")
    rates, seeds, B = parse_rates(args), args.seeds, args.batch
    images = Images(X, y.to(device), device)
    Xv, yv = Xv.to(device), yv.to(device)
    bank = torch.cat([torch.where(y == c)[0][:500] for c in range(CLASSES)]).sort().values.to(device)
    plain = Fns(False)
    tables = Tables(seeds, len(X), device)
    tables.fill(0)
    sync(device)
    t0 = time.time()
    tables.fill(0)
    sync(device)
    sec_table = time.time() - t0
    say(f"tables of a pass: {sec_table:.3f} s")
    groups = groups_of(args, rates)
    impls, ft_impl = attention_of(args, groups, device, dtype)
    per = len(X) // B
    lengths = [(L, max(1, round(L * per))) for L in args.passes]
    most = max(s for _, s in lengths)
    stages, modes = [], []
    for (arms, rs), impl in zip(groups, impls):
        make = lambda fns: Pretraining(arms, rs, seeds, images, tables, B, most, dtype, fns, impl, device)
        stage, m = prepare(make, args.mode, "+".join(arms))
        stages.append(stage)
        modes.append(m)
    index = [i for s in stages for i in s.index]
    ft_per = len(X) // args.ft_batch
    ft_steps = round(args.ft_passes * ft_per)
    ft = []
    if ft_steps:
        ft_tables = Tables(seeds, len(X), device, masks=False, scale=(0.3, 1.0))
        ft_tables.fill(0)
        take = len(index) if not args.chunk else max(len(seeds), args.chunk // len(seeds) * len(seeds))
        for i in range(0, len(index), take):
            part = index[i:i + take]
            make = lambda fns: Finetuning(part, seeds, images, ft_tables, args.ft_batch, ft_steps, dtype, fns, ft_impl,
                                          device, args.ft_blr)
            ft.append(prepare(make, args.mode, "fine-tuning")[0])
    sec_frozen, sec_top1 = len(index) * 0.1 if device.type == "cuda" else 0.0, 2.0
    rows = Rows(args.out)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    fits = lambda need: not args.budget or time.time() - T0 + need <= args.budget

    if args.slot_pilot:
        passes, grid = args.slot_pilot[0], args.slot_pilot[1:]
        rate = slot_pilot(stages, tables, grid, max(1, round(passes * per)), per, images, bank, Xv, yv, plain)
        for s in stages:
            s.lr.fill_(rate)
            s.index = [(a, rate, seed) for a, _, seed in s.index]
        index = [i for s in stages for i in s.index]
    for L, steps in lengths:
        need = steps * sum(s.sec for s in stages) + math.ceil(steps / per) * sec_table + sec_frozen
        if not fits(need):
            say(f"SKIPPED {L:g} passes: needs {need:.0f} s, {args.budget - (time.time() - T0):.0f} s are left")
            continue
        say(f"{L:g} passes, {steps} steps, warm-up {steps / 10:.1f}: {need:.0f} s expected")
        t0 = time.time()
        for s in stages:
            s.load_initial()
            s.start(steps, steps / 10)
        for epoch in range(math.ceil(steps / per)):
            tables.fill(epoch)
            for s in stages:
                for _ in range(min(per, steps - epoch * per)):
                    s.run()
        sync(device)
        sec = time.time() - t0
        say(f"  pre-training: {sec:.1f} s, {len(index) * B * steps / sec:,.0f} images/s over all models")
        t0 = time.time()
        losses = torch.cat([s.last_losses(steps) for s in stages])
        finite = torch.cat([s.p.theta.isfinite().all(1) for s in stages]) & losses.isfinite()
        k = 0
        for s in stages:
            A = frozen_features(s.p.leaves, images, images.X[bank], plain)
            T = frozen_features(s.p.leaves, images, Xv, plain)
            for m, (arm, rate, seed) in enumerate(s.index):
                knn, ridge = knn_ridge(A[m], T[m], images.y[bank], yv)
                rows.put((arm, rate, seed, float(L), B), arm=arm, rate=rate, seed=seed, passes=f"{L:g}", steps=steps,
                         batch=B, loss=f"{losses[k].item():.6f}", knn=f"{knn:.2f}", ridge=f"{ridge:.2f}",
                         frozen=f"{(knn + ridge) / 2:.3f}", finite=bool(finite[k]), seconds=f"{sec:.1f}",
                         mode=modes[0], device=where)
                k += 1
        rows.write()
        sec_frozen = time.time() - t0
        say(f"  frozen evaluation: {sec_frozen:.1f} s; mean loss {losses.nanmean().item():.4f}, "
            f"{int((~finite).sum())} of {len(index)} not finite")
        if args.curve:
            for s in stages:
                n = max(1, steps // 10)
                for a, arm in enumerate(s.arms):
                    part = s.log[:steps, a * s.R * s.S:(a + 1) * s.R * s.S].mean(1)
                    print("   ", arm, *[f"{c.mean().item():.4f}" for c in part.split(n)])
        if not ft:
            continue
        need = sum(s.sec for s in ft) * ft_steps + sec_top1 + sec_table * math.ceil(args.ft_passes)
        if not fits(need):
            say(f"  SKIPPED fine-tuning after {L:g} passes: needs {need:.0f} s")
            continue
        t0 = time.time()
        thetas = []
        for s in stages:
            for m in range(s.p.M):
                thetas.append({name: s.p.leaves[name].detach()[m] for name, _ in ENCODER})
        k = 0
        for s in ft:
            s.load_encoders(thetas[k:k + s.p.M])
            s.start(ft_steps, 0.1 * ft_steps)
            k += s.p.M
        for epoch in range(math.ceil(args.ft_passes)):
            ft_tables.fill(epoch)
            for s in ft:
                for _ in range(min(ft_per, ft_steps - epoch * ft_per)):
                    s.run()
        sync(device)
        t1 = time.time()
        top1 = torch.cat([s.top1(Xv, yv, plain) for s in ft])
        ok = torch.cat([s.p.theta.isfinite().all(1) for s in ft])
        for m, (arm, rate, seed) in enumerate(index):
            rows.put((arm, rate, seed, float(L), B), finetuned=f"{top1[m].item():.2f}" if ok[m] else "nan",
                     seconds=f"{sec + time.time() - t0:.1f}")
            if not ok[m]:
                rows.put((arm, rate, seed, float(L), B), finite=False)
        rows.write()
        sec_top1 = time.time() - t1
        say(f"  fine-tuning: {t1 - t0:.1f} s, evaluation {sec_top1:.1f} s; mean top-1 {top1.nanmean().item():.2f}")
    if device.type == "cuda":
        say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB allocated, "
            f"{torch.cuda.max_memory_reserved() / 2**30:.1f} reserved")
    say("done")


def selfcheck(args, device, dtype):
    """20 steps in --mode against eager mode, on synthetic images; and the attention kernels."""
    small = not args.same_shapes
    seeds, B = (args.seeds[:2], 64) if small else (args.seeds, args.batch)
    g = torch.Generator().manual_seed(0)
    low = torch.rand(4000, 3, 8, 8, generator=g) * 255
    X = F.interpolate(low, (32, 32), mode="bicubic").clamp(0, 255).round().to(torch.uint8)
    y = torch.randint(0, 10, (4000,), generator=g)
    images = Images(X, y.to(device), device)
    tables = Tables(seeds, len(X), device)
    tables.fill(0)
    ft_tables = Tables(seeds, len(X), device, masks=False, scale=(0.3, 1.0))
    ft_tables.fill(0)
    rates = {a: [0.005] for a in ARMS}
    args.seeds, args.batch, args.arms = seeds, B, list(ARMS)
    groups = groups_of(args, rates)
    impls, ft_impl = attention_of(args, groups, device, dtype)
    bad = False
    makes = [("+".join(arms), lambda fns, dt, im, arms=arms, rs=rs: Pretraining(arms, rs, seeds, images, tables, B, 20, dt, fns, im, device), impl)
             for (arms, rs), impl in zip(groups, impls)]
    index = [(a, 0.005, s) for a in ARMS for s in seeds]
    makes.append(("fine-tuning", lambda fns, dt, im: Finetuning(index, seeds, images, ft_tables, 64, 20, dt, fns, im, device), ft_impl))
    for name, make, impl in makes:
        plain_impl = {T: "sdpa" for T in impl}
        runs = {"eager float32": ("eager", torch.float32, plain_impl)}
        if dtype != torch.float32:
            runs["eager"] = ("eager", dtype, plain_impl)
        if device.type == "cuda":
            runs["graph_eager"] = ("graph_eager", dtype, impl)
        runs[args.mode] = (args.mode, dtype, impl)
        ref = None
        for label, (mode, dt, im) in runs.items():
            stage, used = prepare(lambda fns: make(fns, dt, im), mode, f"{name} [{label}]")
            if isinstance(stage, Pretraining):
                stage.load_initial()
            else:
                stage.load_encoders([{k: to_stack(k, v).to(device) for k, v in initial(s).items() if k in dict(ENCODER)} for _, _, s in index])
            stage.start(20, 2)
            start = stage.p.theta.clone()
            for _ in range(20):
                stage.run()
            sync(device)
            log, moved = stage.log[:20].clone(), stage.p.theta - start
            if ref is None:
                ref = log, moved
            diff = ((log - ref[0]).abs() / ref[0]).max().item()
            first = ((log[0] - ref[0][0]).abs() / ref[0][0]).max().item()
            far = ((moved - ref[1]).norm() / ref[1].norm()).item()
            limit = 1e-3 if dt == torch.float32 else 3e-2
            ok = diff < limit and bool(log.isfinite().all()) and used == mode
            bad |= not ok
            say(f"  {name:32s} {label:14s} loss {log[0].mean():.4f} -> {log[-1].mean():.4f}, losses differ by {first:.1e} in "
                f"step 1, {diff:.1e} at most; weights' way differs by {far:.1e} {'ok' if ok else 'BAD (used ' + used + ')'}")
            del stage
    if device.type == "cuda":
        say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    say("SELFCHECK", "BAD" if bad else "OK")
    return bad


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
