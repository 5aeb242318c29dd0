"""TEC (Gao et al., 2022: target-enhanced conditional pre-training) with PR-MIM: a student predicts a frozen teacher.

The teacher, a pre-trained ViT, sees the whole image. The student is MAE's encoder with two additions: an MLP on the
class token, and an adapter that fuses the outputs of all blocks. It has two decoders, which share their blocks. One
predicts the teacher's features, the other predicts rows of the teacher's last attention map. PR-MIM applies to both
decoders, which throw the same tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from framework import Framework
from frameworks.teacher import Teacher, attention_logits, open_teacher
from frameworks.views import View, enlarge
from models_vit import BASE, LARGE, MICRO, MINI, ViTEncoder, init_weights
from prmim import Method, ProgressiveDecoder, TokenOrder
from util.flag import Flag
from util.pictures import principal_colors

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
        help="the pre-trained ViT whose outputs are predicted: a checkpoint (this project's, or a release of iBOT, "
        "DINO or MAE), the folder of a run, or the name of a timm model",
        names_file=True,
        per_process=True,
        changes="nothing",  # the path, while checkpoints record what is in the file
    ),
    Flag(
        "att_topk",
        int,
        help="number of patches whose attention is predicted (default: 9, for iBOT; use 15 for MAE)",
        at_least=1,
    ),
    Flag(
        "att_tau",
        float,
        help="temperature of the attention target (default: 1.0, for iBOT; use 1.8 for MAE, 1.4 for MAE's ViT-L)",
        above=0,
    ),
)


class TECViT(Framework, ViTEncoder):
    """A ViT encoder with adapters that owns two progressive decoders.

    decoder_embed_dim, decoder_depth, decoder_num_heads: the decoders' blocks, with the encoder's `mlp_ratio`.
    teacher: a `Teacher`, or a source that `open_teacher` accepts: a checkpoint, the folder of a run, or the name of a
        timm model. None gives an untrained ViT of the student's size, for tests and for counting costs.
    att_topk, att_tau: number of patches whose attention is predicted, in addition to the class token's, and temperature
        of the attention target. The release uses 9 and 1.0 for iBOT, 15 and 1.8 for MAE, 15 and 1.4 for MAE's ViT-L.
    num_adap: number of groups of blocks that the adapter fuses.
    img_size, ..., layer_scale: of the encoder, see `models_vit.ViTEncoder`. norm_pix_loss, ..., has_invalid: see
        `framework.Framework.use_method`. mask_ratio, ..., applies_to: see `prmim.Method`.
    """

    release = "TEC"
    flags = FLAGS
    compiled_methods = ("embed_visible", "feature_loss", "attention_loss")

    def __init__(
        self,
        decoder_embed_dim: int = 512,
        decoder_depth: int = 2,
        decoder_num_heads: int = 16,
        teacher: Teacher | str | Path | None = None,
        att_topk: int = 9,
        att_tau: float = 1.0,
        num_adap: int | None = None,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        layer_scale: bool = False,
        norm_pix_loss: bool = False,
        mask_unit: int = 1,
        has_invalid: bool = False,
        mask_ratio: float = 0.75,
        throw_ratio: float = 0.5,
        progressive: bool = True,
        kernel_size: int = 7,
        aggregation: str = "dwconv",
        applies_to: str = "thrown",
    ) -> None:
        super().__init__(
            img_size,
            patch_size,
            in_chans,
            embed_dim,
            depth,
            num_heads,
            mlp_ratio,
            drop_path_rate,
            layer_scale=layer_scale,
        )
        method = Method(mask_ratio, throw_ratio, progressive, kernel_size, aggregation, applies_to)
        self.use_method(method, norm_pix_loss, mask_unit, has_invalid)
        if num_adap is None:
            num_adap = max(1, depth // 3)
        self.cls_token_mlp = Mlp(embed_dim, int(embed_dim * mlp_ratio))
        self.encoder_adaptor = EncoderAdaptor(embed_dim, depth, num_adap, 4 * decoder_embed_dim)
        init_weights(self.cls_token_mlp)
        init_weights(self.encoder_adaptor)
        teacher = self.make_teacher(teacher)
        # No submodule, so that checkpoints, optimizers and DDP do not include it. `_apply` moves and casts it.
        object.__setattr__(self, "teacher", teacher)
        self.att_topk = att_topk
        self.att_tau = att_tau
        self.num_keys = self.counts.num_kept
        if self.method.progressive:
            self.num_keys = self.num_tokens
        if att_topk > self.num_keys:
            raise ValueError(f"--att_topk {att_topk} is more than the {self.num_keys} tokens of a row of attention")
        self.decoder_fea = ProgressiveDecoder(
            self.grid_size,
            embed_dim,
            head=teacher.embed_dim,
            make_aggregation=self.make_aggregation,
            decoder_embed_dim=decoder_embed_dim,
            decoder_depth=decoder_depth,
            decoder_num_heads=decoder_num_heads,
            mlp_ratio=mlp_ratio,
        )
        self.decoder_att = ProgressiveDecoder(
            self.grid_size,
            embed_dim,
            head=2 * teacher.embed_dim,
            make_aggregation=self.make_aggregation,
            decoder_embed_dim=decoder_embed_dim,
            decoder_depth=0,  # it shares the blocks of the other decoder
        )

    def make_teacher(self, teacher: Teacher | str | Path | None) -> Teacher:
        """Returns the teacher, see the class. ValueError if it reads other images than the student."""
        if teacher is None:
            teacher = Teacher(
                dict(
                    img_size=self.img_size,
                    patch_size=self.patch_size,
                    in_chans=self.in_chans,
                    embed_dim=self.embed_dim,
                    depth=len(self.blocks),
                    num_heads=self.blocks[0].attn.num_heads,
                    mlp_ratio=self.mlp_ratio,
                )
            )
        elif not isinstance(teacher, Teacher):
            teacher = open_teacher(teacher, self.img_size, self.patch_size)
        if teacher.in_chans != self.in_chans:
            raise ValueError(
                f"the teacher reads images of {teacher.in_chans} channels, the student of {self.in_chans} (--in_chans)"
            )
        return teacher

    def forward(self, imgs: Tensor, ids_shuffle: Tensor) -> dict[str, Tensor]:
        """Returns the scalar losses {"feature", "attention"}."""
        order = TokenOrder(ids_shuffle, self.counts)
        # The teacher runs first: its memory is free again before the student's activations are stored.
        features, logits, queries = self.teacher(imgs, order, self.num_keys, self.att_topk)
        latent = self.forward_encoder(self.patchify(imgs), order)
        fea, att = self.forward_decoders(latent, order)
        return {
            "feature": self.feature_loss(fea, features, order),
            "attention": self.attention_loss(att, logits, queries),
        }

    def forward_encoder(self, patches: Tensor, order: TokenOrder) -> Tensor:
        """Returns the adapted latent of the visible ones of all patches, [B, 1 + num_visible, D]."""
        tokens = self.embed_visible(patches, order.ids_visible)
        return self.encode(tokens)

    def encode(self, tokens: Tensor, relative: Tensor | None = None) -> Tensor:
        """Returns the fused outputs of all blocks on embedded tokens [B, n, D], [B, 1 + n, D], class token first."""
        x = self.prepend_cls_token(tokens)
        levels = []
        for block in self.blocks:
            x = block(x)
            levels.append(x)
        levels[-1] = self.norm(x)
        return self.encoder_adaptor(levels)

    def forward_decoders(self, latent: Tensor, order: TokenOrder) -> tuple[Tensor, Tensor]:
        """Returns the features of both decoders before their norms, two tensors [B, 1 + n, C].

        The class token comes first, without aggregation. All N tokens follow in token order, or only the kept ones in
        plain partial reconstruction. latent: [B, 1 + num_visible, D].
        """
        # One pass through the shared blocks for both decoders: [2B, 1 + num_kept, C].
        decoders = (self.decoder_fea, self.decoder_att)
        x = torch.cat([decoder.embed_tokens(latent, order) for decoder in decoders])
        for block in self.decoder_fea.blocks:
            x = block(x)
        fea, att = x.chunk(2)
        fea_tokens = self.decoder_fea.aggregate(fea[:, 1:], order)
        att_tokens = self.decoder_att.aggregate(att[:, 1:], order)
        fea = torch.cat([fea[:, :1], fea_tokens], dim=1)
        att = torch.cat([att[:, :1], att_tokens], dim=1)
        return fea, att

    @staticmethod
    def feature_target(features: Tensor) -> Tensor:
        """Returns the teacher's features [B, N, T], z-scored over the patches of each image and channel.

        The target has float32 or wider.
        """
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        mean = features.mean(dim=1, keepdim=True)
        variance = features.var(dim=1, keepdim=True)
        return (features - mean) / (variance + 1e-6).sqrt()

    def feature_loss(self, x: Tensor, features: Tensor, order: TokenOrder) -> Tensor:
        """Returns the mean squared error over the supervised tokens.

        x: [B, 1 + n, C] in token order. features: [B, N, T] in raster order.
        """
        x = x[:, 1:]  # without the class token
        supervised = slice(self.counts.num_visible, x.shape[1])
        target = order.take(self.feature_target(features), order.ids_shuffle[:, supervised])
        pred = self.decoder_fea.predict(x[:, supervised])
        error = pred.to(target.dtype) - target
        return error.square().mean()

    def attention_loss(self, x: Tensor, logits: Tensor, queries: Tensor) -> Tensor:
        """Returns the cross-entropy between the rows of attention of teacher and student, over visible and masked keys.

        In plain partial reconstruction only the kept tokens are keys and queries.

        x: [B, 1 + n, C] in token order. logits: the teacher's [B, heads, 1 + topk, n], of the class token and of the
        tokens at `queries`. queries: [B, topk], positions in token order.
        """
        x = self.decoder_att.norm(x)
        tokens = x[:, 1:]
        queried = TokenOrder.take(tokens, queries)
        rows = torch.cat([x[:, :1], queried], dim=1)
        head = self.decoder_att.pred
        query_weight, key_weight = head.weight.chunk(2)
        query_bias, key_bias = head.bias.chunk(2)
        q = F.linear(rows, query_weight, query_bias)
        k = F.linear(tokens, key_weight, key_bias)
        scale = q.shape[-1] ** -0.5  # the release scales by the width of all heads together
        pred = attention_logits(q, k, self.teacher.num_heads) * scale
        target = (logits / self.att_tau).softmax(dim=-1)
        cross_entropy = -(target * pred.log_softmax(dim=-1)).sum(dim=-1)
        return cross_entropy.mean()

    @torch.no_grad()
    def reconstruct(self, imgs: Tensor, ids_shuffle: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (predicted features [B, N, T] in raster order, mask of the predicted tokens, bool [B, N])."""
        order = TokenOrder(ids_shuffle, self.counts)
        latent = self.forward_encoder(self.patchify(imgs), order)
        fea, _ = self.forward_decoders(latent, order)
        pred = self.decoder_fea.predict(fea[:, 1:])
        return order.restore(pred), self.supervised(order)

    @torch.no_grad()
    def views(
        self,
        imgs: Tensor,
        ids_shuffle: Tensor,
        undo: Callable[[Tensor], Tensor],
    ) -> list[View]:
        """Returns one view: the main components of the teacher's features as colours.

        The mean over the images is subtracted at each place, since features depend on the position most of all. The
        errors are squared errors of the z-scored features, averaged over the channels. A constant prediction has 1.
        """
        pred, _ = self.reconstruct(imgs, ids_shuffle)
        target = self.feature_target(self.teacher.features(imgs))
        errors = (pred - target).square().mean(dim=-1)
        if len(imgs) > 1:
            mean = target.mean(dim=0)
            target = target - mean
            pred = pred - mean
        truth, prediction = principal_colors(target, target, pred)  # [B, N, 3] each
        return [
            View(
                title="predicted",
                truth_title="teacher",
                truth=enlarge(truth, self),
                prediction=enlarge(prediction, self),
                measure="feature error",
                errors=errors,
            )
        ]

    def forward_features(self, imgs: Tensor) -> Tensor:
        """Returns the features of the last block without the adapter, [B, 1 + N, D] after the norm."""
        return self.norm(super().encode(self.embed(imgs)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Moves and casts the teacher together with the model."""
        self.teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def official_names(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights of a checkpoint of TEC's pre-training under the names here."""
        renamed: dict[str, Tensor] = {}
        for name, value in weights.items():
            owner, _, rest = name.partition(".")
            if owner == "decoder_pos_embed":  # the release has one table for both decoders
                renamed["decoder_fea.pos_embed"] = value
                renamed["decoder_att.pos_embed"] = value
            elif owner == "decoder_blocks":
                renamed[f"decoder_fea.blocks.{rest}"] = value
            elif owner in OFFICIAL_DECODERS:
                decoder = OFFICIAL_DECODERS[owner]
                module, dot, leaf = rest.partition(".")
                module = OFFICIAL_NAMES.get(module, module)
                renamed[f"{decoder}.{module}{dot}{leaf}"] = value
            else:
                renamed[name] = value
        return renamed


class EncoderAdaptor(nn.Module):
    """Fuses the outputs of all blocks: a linear layer and an MLP for each group of neighbouring blocks, then a sum."""

    compiled_methods = ("forward",)

    def __init__(self, dim: int, depth: int, num_adap: int, hidden_dim: int) -> None:
        super().__init__()
        self.adap_before = nn.LayerNorm(depth * dim)  # with torch's epsilon, 1e-5, as in the release
        blocks_of_group = depth // num_adap
        self.fuse_fcs = nn.ModuleList(nn.Linear(blocks_of_group * dim, dim) for _ in range(num_adap))
        self.adap_mlps = nn.ModuleList(Mlp(dim, hidden_dim) for _ in range(num_adap))
        self.adap_after = nn.LayerNorm(dim)

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        """Fuses the outputs of the blocks, [B, n, D] each, to [B, n, D]."""
        fused = 0
        x = self.adap_before(torch.cat(levels, dim=-1))
        groups = x.chunk(len(self.fuse_fcs), dim=-1)
        for group, linear, mlp in zip(groups, self.fuse_fcs, self.adap_mlps, strict=True):
            x = linear(group)
            fused = fused + x + mlp(x)
        return self.adap_after(fused)


tec_vit_micro_patch4 = partial(TECViT, **MICRO, decoder_embed_dim=64, decoder_num_heads=2)
tec_vit_mini_patch4 = partial(TECViT, **MINI, decoder_embed_dim=128, decoder_num_heads=4)
tec_vit_base_patch16 = partial(TECViT, **BASE)
tec_vit_large_patch16 = partial(TECViT, **LARGE, decoder_embed_dim=768)
