"""TEC (Gao et al., 2022: target-enhanced conditional pre-training) with PR-MIM: a student that predicts a frozen teacher.

The teacher, a pre-trained ViT, sees the whole image. The student is MAE's, with an MLP on the class token and an adapter that
fuses the outputs of all blocks; its two decoders, which share their blocks, predict the teacher's features and rows of its
last attention map. PR-MIM works in both, which throw the same tokens.
"""

import torch
from timm.layers import Mlp
from torch import nn
from torch.nn import functional as F

from framework import Framework
from models_teacher import Teacher, attention_logits, open_teacher
from models_vit import BASE, LARGE, MICRO, MINI, ViTEncoder, init_weights, layer_norm
from prmim import ProgressiveDecoder, TokenCounts, TokenOrder
from util.pictures import principal_colors
from util.run.checkpoint import load_strict

__all__ = [
    "TECViT",
    "tec_vit_micro_patch4",
    "tec_vit_mini_patch4",
    "tec_vit_base_patch16",
    "tec_vit_large_patch16",
]

# Names of TEC's releases -> ours: the two decoders, and what is in them.
OFFICIAL_DECODERS = {"forward_fea_decoder": "decoder_fea", "forward_att_decoder": "decoder_att"}
OFFICIAL_NAMES = {"decoder_embed": "embed", "decoder_norm": "norm", "decoder_pred": "pred", "decoder_qk": "pred"}


class TECViT(Framework, ViTEncoder):
    """A ViT encoder with adapters that owns two progressive decoders. Arguments are MAE's, then TEC's, then PR-MIM's.

    teacher: a `Teacher`, or what `models_teacher.open_teacher` makes one of: a checkpoint, a run's folder, the name of a timm
    model; without one, an untrained ViT of the student's size, for tests and for counting costs. att_topk: patches whose
    attention is predicted beside the class token's; att_tau: temperature of the target (iBOT: 9 and 1.0; MAE: 15 and 1.8,
    ViT-L 1.4). num_adap: groups of blocks that the adapter fuses. norm_pix_loss has no effect; it is there because every
    framework has it.
    """

    def __init__(
        self,
        img_size=224,
        patch_size=16,
        in_chans=3,
        embed_dim=768,
        depth=12,
        num_heads=12,
        decoder_embed_dim=512,
        decoder_depth=2,
        decoder_num_heads=16,
        mlp_ratio=4.0,
        norm_pix_loss=False,
        teacher=None,
        att_topk=9,
        att_tau=1.0,
        num_adap=None,
        mask_ratio=0.75,
        throw_ratio=0.5,
        progressive=True,
        kernel_size=7,
        aggregation="dwconv",
        applies_to="thrown",
    ):
        super().__init__(img_size, patch_size, in_chans, embed_dim, depth, num_heads, mlp_ratio)
        self.counts = TokenCounts.from_ratios(self.num_tokens, mask_ratio, throw_ratio)
        self.cls_token_mlp = Mlp(embed_dim, int(embed_dim * mlp_ratio))
        self.encoder_adaptor = EncoderAdaptor(embed_dim, depth, num_adap or max(1, depth // 3), 4 * decoder_embed_dim)
        init_weights(self.cls_token_mlp)
        init_weights(self.encoder_adaptor)
        if teacher is None:
            teacher = Teacher(self.img_size, patch_size, in_chans, embed_dim, depth, num_heads, mlp_ratio)
        elif not isinstance(teacher, Teacher):
            teacher = open_teacher(teacher, self.img_size, patch_size)
        # Beside the modules, so that neither checkpoints nor optimizers nor DDP know of it; `_apply` moves it.
        object.__setattr__(self, "teacher", teacher)
        self.att_topk, self.att_tau = att_topk, att_tau
        num_keys = self.num_tokens if progressive else self.counts.num_kept
        if not 1 <= att_topk <= num_keys or att_tau <= 0:
            raise ValueError(f"att_topk must be from 1 to {num_keys} and att_tau above 0, got {att_topk} and {att_tau}")
        self.num_keys = num_keys
        options = dict(decoder_embed_dim=decoder_embed_dim, decoder_num_heads=decoder_num_heads, mlp_ratio=mlp_ratio)
        options, width = options | dict(progressive=False), teacher.embed_dim
        # The feature decoder's blocks are the attention decoder's, too.
        self.decoder_fea = ProgressiveDecoder(
            self.grid_size, self.counts, embed_dim, head=width, decoder_depth=decoder_depth, **options
        )
        self.decoder_att = ProgressiveDecoder(self.grid_size, self.counts, embed_dim, head=2 * width, decoder_depth=0, **options)
        for decoder in (self.decoder_fea, self.decoder_att) if progressive else ():
            decoder.add_aggregation(kernel_size, aggregation, applies_to)

    def forward(self, imgs, ids_shuffle):
        """imgs [B, C, H, W], normalised, and ids_shuffle int64 [B, N] -> {"feature", "attention": scalar losses}."""
        order = TokenOrder(ids_shuffle, self.counts)
        # The teacher first: what it computes with is free again before the student's activations are kept.
        features, logits, queries = self.teacher(imgs, order, self.num_keys, self.att_topk)
        fea, att = self.forward_decoders(self.forward_encoder(self.cut(imgs), order), order)
        return {"feature": self.feature_loss(fea, features, order), "attention": self.attention_loss(att, logits, queries)}

    def forward_encoder(self, patches, order):
        """All patches [B, N, p*p*C] -> adapted latent of the visible ones [B, 1 + num_visible, D], class token first."""
        return self.encode(self.patch_embed(order.take_visible(patches)) + order.take_visible(self.pos_embed[:, 1:]))

    def encode(self, tokens):
        """Embedded tokens with positions [B, n, D] -> all blocks' outputs, fused [B, 1 + n, D], class token first."""
        x, levels = self.prepend_cls_token(tokens), []
        for block in self.blocks:
            x = block(x)
            levels.append(x)
        levels[-1] = self.norm(x)
        return self.encoder_adaptor(levels)

    def prepend_cls_token(self, tokens):
        """[B, n, D] -> [B, 1 + n, D]; the input adapter is an MLP on the class token."""
        cls_token = self.cls_token_mlp(self.cls_token) + self.pos_embed[:, :1]
        return torch.cat([cls_token.expand(len(tokens), -1, -1), tokens], dim=1)

    def forward_decoders(self, latent, order):
        """Latent [B, 1 + num_visible, D] -> features of both decoders, before their norms, two of [B, 1 + n, C].

        Class token first, which passes the aggregation by; then all N tokens in token order, or the kept ones if plain.
        """
        decoders = self.decoder_fea, self.decoder_att
        x = torch.cat([decoder.embed_tokens(latent, order) for decoder in decoders])  # one pass for both: [2B, 1 + num_kept, C]
        for block in self.decoder_fea.blocks:
            x = block(x)
        outputs = zip(decoders, x.chunk(2), strict=True)
        return [torch.cat([x[:, :1], decoder.aggregate(x[:, 1:], order)], dim=1) for decoder, x in outputs]

    @staticmethod
    def feature_target(features):
        """The teacher's features [B, N, T], z-scored over the N patches of each image and channel; float32 at least."""
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        variance = features.var(dim=1, keepdim=True)
        return (features - features.mean(dim=1, keepdim=True)) / (variance + 1e-6).sqrt()

    def feature_loss(self, x, features, order):
        """Mean squared error over the supervised tokens; x [B, 1 + n, C] in token order, features [B, N, T] in raster order."""
        first = self.counts.num_visible
        target = order.take(self.feature_target(features), order.ids_shuffle[:, first : x.shape[1] - 1])
        pred = self.decoder_fea.predict(x[:, 1 + first :])
        return (pred.to(target.dtype) - target).square().mean()

    def attention_loss(self, x, logits, queries):
        """Cross-entropy between the teacher's and the student's rows of attention, over all keys, visible or masked.

        x [B, 1 + n, C] in token order; logits [B, heads, 1 + topk, n] of the class token and of the tokens at `queries`
        [B, topk], positions in token order. Plain partial reconstruction has the kept tokens alone as keys and queries.
        """
        x, head = self.decoder_att.norm(x), self.decoder_att.pred
        rows = torch.cat([x[:, :1], TokenOrder.take(x[:, 1:], queries)], dim=1)
        (query_weight, key_weight), (query_bias, key_bias) = head.weight.chunk(2), head.bias.chunk(2)
        q, k = F.linear(rows, query_weight, query_bias), F.linear(x[:, 1:], key_weight, key_bias)
        # The release scales by the width of all heads.
        ours = attention_logits(q, k, self.teacher.num_heads) * q.shape[-1] ** -0.5
        target = (logits / self.att_tau).softmax(dim=-1)
        return -(target * ours.log_softmax(dim=-1)).sum(dim=-1).mean()

    @torch.no_grad()
    def reconstruct(self, imgs, ids_shuffle):
        """-> (predicted features [B, N, T] in raster order, mask bool [B, N] of the predicted tokens).

        Plain partial reconstruction predicts no thrown token: its mask is False there and its features are zero.
        """
        order = TokenOrder(ids_shuffle, self.counts)
        x, _ = self.forward_decoders(self.forward_encoder(self.cut(imgs), order), order)
        pred = self.decoder_fea.predict(x[:, 1:])
        return order.restore(pred), order.masked_of_first(pred.shape[1])

    @torch.no_grad()
    def panels(self, imgs, ids_shuffle, undo):
        """Main components of the teacher's features as colours: all of them; true where visible, predicted where masked.

        What the images have in common at a place is taken away: features tell positions first of all.
        """
        pred, mask = self.reconstruct(imgs, ids_shuffle)
        order = TokenOrder(ids_shuffle, self.counts)
        target = self.feature_target(self.teacher.features(imgs))
        common = target.mean(dim=0) if len(target) > 1 else 0.0
        truth, pred = principal_colors(target - common, target - common, pred - common)
        pred = torch.where(mask.unsqueeze(-1), pred, truth * ~order.mask.unsqueeze(-1))
        images = (x.transpose(1, 2).unflatten(2, self.grid_size) for x in (truth, pred))
        return dict(zip(("teacher", "predicted"), (F.interpolate(x, size=self.img_size) for x in images), strict=True))

    @torch.no_grad()
    def token_errors(self, imgs, ids_shuffle, undo):
        """Squared error of the z-scored features, averaged over the channels: 1 is what a constant prediction has."""
        target = self.feature_target(self.teacher.features(imgs))
        return {"feature error": (self.reconstruct(imgs, ids_shuffle)[0] - target).square().mean(dim=-1)}

    def forward_features(self, imgs):
        """Images [B, C, H, W], normalised -> token features [B, 1 + N, D] after the norm, unadapted, class token first."""
        x = self.prepend_cls_token(self.patch_embed(self.cut(imgs)) + self.pos_embed[:, 1:])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def _apply(self, fn, recurse=True):
        """What moves or casts the model moves its teacher."""
        self.teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def load_official(self, state_dict):
        """Loads the weights of TEC's releases before fine-tuning: their content, or its `model`.

        Strict, apart from the aggregators. ValueError names missing, unexpected and mis-shaped keys.
        """
        renamed = {}
        for name, value in state_dict.get("model", state_dict).items():
            owner, _, rest = name.partition(".")
            if owner == "decoder_pos_embed":  # the release has one table for both
                renamed |= {"decoder_fea.pos_embed": value, "decoder_att.pos_embed": value}
            elif owner == "decoder_blocks":
                renamed[f"decoder_fea.blocks.{rest}"] = value
            elif owner in OFFICIAL_DECODERS:
                module, dot, leaf = rest.partition(".")
                renamed[f"{OFFICIAL_DECODERS[owner]}.{OFFICIAL_NAMES.get(module, module)}{dot}{leaf}"] = value
            else:
                renamed[name] = value
        load_strict(self, renamed, "TEC weights", optional="aggregation.")


class EncoderAdaptor(nn.Module):
    """Fuses the outputs of all blocks: groups of neighbouring blocks through a linear layer and an MLP each, then their sum."""

    def __init__(self, dim, depth, num_adap, hidden_dim):
        super().__init__()
        if depth % num_adap:
            raise ValueError(f"{depth} blocks do not divide into num_adap {num_adap} groups")
        self.adap_before = layer_norm(depth * dim)
        self.fuse_fcs = nn.ModuleList(nn.Linear(depth // num_adap * dim, dim) for _ in range(num_adap))
        self.adap_mlps = nn.ModuleList(Mlp(dim, hidden_dim) for _ in range(num_adap))
        self.adap_after = layer_norm(dim)

    def forward(self, levels):
        """Outputs of the blocks, [B, n, D] each -> [B, n, D]."""
        fused = 0
        groups = self.adap_before(torch.cat(levels, dim=-1)).chunk(len(self.fuse_fcs), dim=-1)
        for group, linear, mlp in zip(groups, self.fuse_fcs, self.adap_mlps, strict=True):
            x = linear(group)
            fused = fused + x + mlp(x)
        return self.adap_after(fused)


def tec_vit_micro_patch4(**kwargs):
    return TECViT(**{**MICRO, "decoder_embed_dim": 64, "decoder_num_heads": 2, **kwargs})


def tec_vit_mini_patch4(**kwargs):
    return TECViT(**{**MINI, "decoder_embed_dim": 128, "decoder_num_heads": 4, **kwargs})


def tec_vit_base_patch16(**kwargs):
    return TECViT(**{**BASE, **kwargs})


def tec_vit_large_patch16(**kwargs):
    return TECViT(**{**LARGE, "decoder_embed_dim": 768, **kwargs})
