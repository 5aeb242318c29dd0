"""TEC (Gao et al., 2022: target-enhanced conditional pre-training) with PR-MIM: a student predicts a frozen teacher.

The teacher, a pre-trained ViT, sees the whole image. The student is MAE's encoder with two additions: an MLP on the
class token, and an adapter that fuses the outputs of all blocks. It has two decoders, which share their blocks. One
predicts the teacher's features, the other predicts rows of the teacher's last attention map. PR-MIM applies to both
decoders, which throw the same tokens.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from typing_extensions import Unpack

from encoders.names import is_published_tec
from framework import Flag, Framework, View, ViTArguments
from frameworks.teacher import Teacher, attention_logits, open_teacher
from models_vit import BASE, LARGE, MICRO, MINI, ViTEncoder, init_weights
from prmim import ProgressiveDecoder, TokenOrder
from util.lazy import LazyModule
from util.pictures import principal_colors
from util.run.checkpoint import load_strict

timm_layers = LazyModule("timm.layers")

__all__ = [
    "TECViT",
    "tec_vit_micro_patch4",
    "tec_vit_mini_patch4",
    "tec_vit_base_patch16",
    "tec_vit_large_patch16",
]

# Names in TEC's releases -> our names: of the two decoders, and of the modules inside them.
OFFICIAL_DECODERS = {"forward_fea_decoder": "decoder_fea", "forward_att_decoder": "decoder_att"}
OFFICIAL_NAMES = {"decoder_embed": "embed", "decoder_norm": "norm", "decoder_pred": "pred", "decoder_qk": "pred"}


FLAGS = (
    Flag(
        "teacher",
        "the pre-trained ViT whose outputs are predicted: a checkpoint (this project's, or a release of iBOT, DINO or "
        "MAE), the folder of a run, or the name of a timm model",
        required=True,
        names_file=True,
        changes="nothing",  # the path, while checkpoints record what is in the file
    ),
    Flag("att_topk", "number of patches whose attention is predicted (default: 9, for iBOT; use 15 for MAE)", int),
    Flag(
        "att_tau",
        "temperature of the attention target (default: 1.0, for iBOT; use 1.8 for MAE, 1.4 for MAE's ViT-L)",
        float,
    ),
)


class TECViT(Framework, ViTEncoder):
    """A ViT encoder with adapters that owns two progressive decoders.

    decoder_embed_dim, decoder_depth, decoder_num_heads: the decoders' blocks, with the encoder's `mlp_ratio`.
    teacher: a `Teacher`, or a source that `open_teacher` accepts: a checkpoint, the folder of a run, or the name of a
    timm model. None gives an untrained ViT of the student's size, for tests and for counting costs.
    att_topk: number of patches whose attention is predicted, in addition to the class token's. att_tau: temperature of
    the attention target. The release uses 9 and 1.0 for iBOT, 15 and 1.8 for MAE, 15 and 1.4 for MAE's ViT-L. num_adap:
    number of groups of blocks that the adapter fuses.
    kwargs: the method, see `framework.Framework`, and the encoder's sizes, see `models_vit.ViTEncoder`.
    """

    release = "TEC"
    flags = FLAGS

    def __init__(
        self,
        decoder_embed_dim: int = 512,
        decoder_depth: int = 2,
        decoder_num_heads: int = 16,
        teacher: Teacher | str | Path | None = None,
        att_topk: int = 9,
        att_tau: float = 1.0,
        num_adap: int | None = None,
        **kwargs: Unpack[ViTArguments],
    ) -> None:
        super().__init__(**kwargs)
        embed_dim, depth, mlp_ratio = self.embed_dim, len(self.blocks), self.mlp_ratio
        self.cls_token_mlp = timm_layers.Mlp(embed_dim, int(embed_dim * mlp_ratio))
        self.encoder_adaptor = EncoderAdaptor(embed_dim, depth, num_adap or max(1, depth // 3), 4 * decoder_embed_dim)
        init_weights(self.cls_token_mlp)
        init_weights(self.encoder_adaptor)
        if teacher is None:
            num_heads = self.blocks[0].attn.num_heads
            teacher = Teacher(self.img_size, self.patch_size, self.in_chans, embed_dim, depth, num_heads, mlp_ratio)
        elif not isinstance(teacher, Teacher):
            teacher = open_teacher(teacher, self.img_size, self.patch_size)
        if teacher.in_chans != self.in_chans:
            raise ValueError(
                f"the teacher reads images of {teacher.in_chans} channels, the student of {self.in_chans} (--in_chans)"
            )
        # No submodule, so that checkpoints, optimizers and DDP do not include it. `_apply` moves and casts it.
        object.__setattr__(self, "teacher", teacher)
        self.att_topk, self.att_tau = att_topk, att_tau
        num_keys = self.num_tokens if self.progressive else self.counts.num_kept
        if not 1 <= att_topk <= num_keys or att_tau <= 0:
            raise ValueError(f"att_topk must be from 1 to {num_keys} and att_tau above 0, got {att_topk} and {att_tau}")
        self.num_keys = num_keys
        width = teacher.embed_dim
        options: dict[str, Any] = dict(
            decoder_embed_dim=decoder_embed_dim,
            decoder_num_heads=decoder_num_heads,
            mlp_ratio=mlp_ratio,
        )
        # The attention decoder has no blocks of its own: both decoders use those of the feature decoder.
        self.decoder_fea = ProgressiveDecoder(
            self.grid_size, embed_dim, head=width, decoder_depth=decoder_depth, **options
        )
        self.decoder_att = ProgressiveDecoder(self.grid_size, embed_dim, head=2 * width, decoder_depth=0, **options)
        for decoder in (self.decoder_fea, self.decoder_att):
            decoder.aggregation = self.make_aggregation(decoder_embed_dim)

    def use_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if self.teacher.statistics != (tuple(mean), tuple(std)):
            self.teacher.renormalize(mean, std)

    def forward(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the scalar losses {"feature", "attention"}."""
        order = TokenOrder(ids_shuffle, self.counts)
        # The teacher runs first: its memory is free again before the student's activations are stored.
        features, logits, queries = self.teacher(imgs, order, self.num_keys, self.att_topk)
        fea, att = self.forward_decoders(self.forward_encoder(self.patchify(imgs), order), order)
        return {
            "feature": self.feature_loss(fea, features, order),
            "attention": self.attention_loss(att, logits, queries),
        }

    def forward_encoder(self, patches: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Returns the adapted latent of the visible ones of all patches, [B, 1 + num_visible, D]."""
        return self.encode(self.patch_embed(order.take_visible(patches)) + order.take_visible(self.patch_positions))

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the fused outputs of all blocks on embedded tokens [B, n, D], [B, 1 + n, D], class token first."""
        x, levels = self.prepend_cls_token(tokens), []
        for block in self.blocks:
            x = block(x)
            levels.append(x)
        levels[-1] = self.norm(x)
        return self.encoder_adaptor(levels)

    def forward_decoders(self, latent: torch.Tensor, order: TokenOrder) -> list[torch.Tensor]:
        """Returns the features of both decoders before their norms, two tensors [B, 1 + n, C].

        The class token comes first, without aggregation. All N tokens follow in token order, or only the kept ones in
        plain partial reconstruction. latent: [B, 1 + num_visible, D].
        """
        decoders = self.decoder_fea, self.decoder_att
        # One pass through the shared blocks for both decoders: [2B, 1 + num_kept, C].
        x = torch.cat([decoder.embed_tokens(latent, order) for decoder in decoders])
        for block in self.decoder_fea.blocks:
            x = block(x)
        outputs = zip(decoders, x.chunk(2), strict=True)
        return [torch.cat([x[:, :1], decoder.aggregate(x[:, 1:], order)], dim=1) for decoder, x in outputs]

    @staticmethod
    def feature_target(features: torch.Tensor) -> torch.Tensor:
        """Returns the teacher's features [B, N, T], z-scored over the patches of each image and channel.

        The target has float32 or wider.
        """
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        variance = features.var(dim=1, keepdim=True)
        return (features - features.mean(dim=1, keepdim=True)) / (variance + 1e-6).sqrt()

    def feature_loss(self, x: torch.Tensor, features: torch.Tensor, order: TokenOrder) -> torch.Tensor:
        """Returns the mean squared error over the supervised tokens.

        x: [B, 1 + n, C] in token order. features: [B, N, T] in raster order.
        """
        first = self.counts.num_visible
        target = order.take(self.feature_target(features), order.ids_shuffle[:, first : x.shape[1] - 1])
        pred = self.decoder_fea.predict(x[:, 1 + first :])
        return (pred.to(target.dtype) - target).square().mean()

    def attention_loss(self, x: torch.Tensor, logits: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Returns the cross-entropy between the rows of attention of teacher and student, over visible and masked keys.

        In plain partial reconstruction only the kept tokens are keys and queries.

        x: [B, 1 + n, C] in token order. logits: the teacher's [B, heads, 1 + topk, n], of the class token and of the
        tokens at `queries`. queries: [B, topk], positions in token order.
        """
        x, head = self.decoder_att.norm(x), self.decoder_att.pred
        rows = torch.cat([x[:, :1], TokenOrder.take(x[:, 1:], queries)], dim=1)
        (query_weight, key_weight), (query_bias, key_bias) = head.weight.chunk(2), head.bias.chunk(2)
        q, k = F.linear(rows, query_weight, query_bias), F.linear(x[:, 1:], key_weight, key_bias)
        # The release scales by the width of all heads together.
        ours = attention_logits(q, k, self.teacher.num_heads) * q.shape[-1] ** -0.5
        target = (logits / self.att_tau).softmax(dim=-1)
        return -(target * ours.log_softmax(dim=-1)).sum(dim=-1).mean()

    @torch.no_grad()
    def reconstruct(self, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (predicted features [B, N, T] in raster order, mask of the predicted tokens, bool [B, N])."""
        order = TokenOrder(ids_shuffle, self.counts)
        x, _ = self.forward_decoders(self.forward_encoder(self.patchify(imgs), order), order)
        pred = self.decoder_fea.predict(x[:, 1:])
        return order.restore(pred), self.supervised(order)

    @torch.no_grad()
    def views(
        self, imgs: torch.Tensor, ids_shuffle: torch.Tensor, undo: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[View]:
        """Returns one view: the main components of the teacher's features as colours.

        The mean over the images is subtracted at each place, since features depend on the position most of all. The
        errors are squared errors of the z-scored features, averaged over the channels. A constant prediction has 1.
        """
        pred, _ = self.reconstruct(imgs, ids_shuffle)
        target = self.feature_target(self.teacher.features(imgs))
        errors = (pred - target).square().mean(dim=-1)
        common = target.mean(dim=0) if len(target) > 1 else 0.0
        colors = principal_colors(target - common, target - common, pred - common)
        truth, prediction = (
            F.interpolate(x.transpose(1, 2).unflatten(2, self.grid_size), size=self.img_size) for x in colors
        )
        return [View("predicted", "teacher", truth, prediction, "feature error", errors)]

    def forward_features(self, imgs: torch.Tensor) -> torch.Tensor:
        """Returns the features of the last block without the adapter, [B, 1 + N, D] after the norm."""
        return self.norm(super().encode(self.embed(imgs)))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Moves and casts the teacher together with the model."""
        self.teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def official_names(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the weights of a checkpoint of TEC's pre-training under the names here."""
        renamed: dict[str, torch.Tensor] = {}
        for name, value in weights.items():
            owner, _, rest = name.partition(".")
            if owner == "decoder_pos_embed":  # the release has one table for both decoders
                renamed |= {"decoder_fea.pos_embed": value, "decoder_att.pos_embed": value}
            elif owner == "decoder_blocks":
                renamed[f"decoder_fea.blocks.{rest}"] = value
            elif owner in OFFICIAL_DECODERS:
                module, dot, leaf = rest.partition(".")
                renamed[f"{OFFICIAL_DECODERS[owner]}.{OFFICIAL_NAMES.get(module, module)}{dot}{leaf}"] = value
            else:
                renamed[name] = value
        return renamed

    def load_official(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a checkpoint of TEC's pre-training, see `Framework.load_official`, or one of TEC's published files.

        The latter hold the encoder alone, with the MLP folded into the class token: this model then has no MLP, its
        norm gets weight 1 and bias 0, and a warning says that adapter and decoders keep their values.
        """
        weights = state_dict.get("model", state_dict)
        if not is_published_tec(weights):
            super().load_official(weights)
            return
        encoder, own = ("pos_embed", "patch_embed.", "blocks."), self.state_dict().items()
        others = {name: v for name, v in own if name != "cls_token" and not name.startswith(encoder)}
        load_strict(self, others | weights, "TEC weights")
        self.cls_token_mlp = nn.Identity()
        self.norm.reset_parameters()
        text = "TEC weights: the MLP is folded into the class token; adapter and decoders are not in the file"
        warnings.warn(text, stacklevel=2)


class EncoderAdaptor(nn.Module):
    """Fuses the outputs of all blocks: a linear layer and an MLP for each group of neighbouring blocks, then a sum."""

    def __init__(self, dim: int, depth: int, num_adap: int, hidden_dim: int) -> None:
        super().__init__()
        if depth % num_adap:
            raise ValueError(f"{depth} blocks do not divide into num_adap {num_adap} groups")
        self.adap_before = nn.LayerNorm(depth * dim)  # with torch's epsilon, 1e-5, as in the release
        self.fuse_fcs = nn.ModuleList(nn.Linear(depth // num_adap * dim, dim) for _ in range(num_adap))
        self.adap_mlps = nn.ModuleList(timm_layers.Mlp(dim, hidden_dim) for _ in range(num_adap))
        self.adap_after = nn.LayerNorm(dim)

    def forward(self, levels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fuses the outputs of the blocks, [B, n, D] each, to [B, n, D]."""
        fused = 0
        groups = self.adap_before(torch.cat(levels, dim=-1)).chunk(len(self.fuse_fcs), dim=-1)
        for group, linear, mlp in zip(groups, self.fuse_fcs, self.adap_mlps, strict=True):
            x = linear(group)
            fused = fused + x + mlp(x)
        return self.adap_after(fused)


tec_vit_micro_patch4 = partial(TECViT, **MICRO, decoder_embed_dim=64, decoder_num_heads=2)
tec_vit_mini_patch4 = partial(TECViT, **MINI, decoder_embed_dim=128, decoder_num_heads=4)
tec_vit_base_patch16 = partial(TECViT, **BASE)
tec_vit_large_patch16 = partial(TECViT, **LARGE, decoder_embed_dim=768)
