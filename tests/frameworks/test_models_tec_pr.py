import math
import re

import pytest
import torch

import models_vit
from encoders.load import load_encoder
from frameworks import models_tec_pr, registry
from frameworks.models_tec_pr import TECViT, tec_vit_base_patch16, tec_vit_large_patch16, tec_vit_micro_patch4
from frameworks.teacher import Teacher
from models_vit import VisionTransformer
from prmim import TokenOrder
from tests import slow_mae
from tests.test_models_mae_pr import assert_same_weights, orders, perturbed, segments
from util.run.checkpoint import save_checkpoint, sha256

ENCODER = dict(img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3)
SIZES = ENCODER | dict(decoder_embed_dim=16, decoder_num_heads=2, num_adap=2, kernel_size=3, att_topk=3, att_tau=1.7)
ARMS = [(0.0, True), (0.5, False), (0.5, True)]


def build(throw_ratio=0.5, progressive=True, teacher=None, **options):
    torch.manual_seed(0)
    if teacher is None:  # of another size than the student
        teacher = Teacher(img_size=32, patch_size=8, embed_dim=20, depth=3, num_heads=5)
    model = TECViT(**SIZES | dict(throw_ratio=throw_ratio, progressive=progressive, teacher=teacher) | options)
    for parameter in model.teacher.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return perturbed(model)


def slow_teacher(w, img, heads, keys, topk):
    """Returns ({token: feature target}, queries, {(query, head): {key: logit}}).

    keys: the tokens that attention may reach.
    """
    tokens = {"cls": w["cls_token"][0, 0] + w["pos_embed"][0, 0]}
    for t in range(16):
        embedded = (w["patch_embed.proj.weight"] * pixels(img, t)).sum(dim=(1, 2, 3)) + w["patch_embed.proj.bias"]
        tokens[t] = embedded + w["pos_embed"][0, 1 + t]
    for layer in range(2):
        tokens = slow_mae.block(tokens, w, f"blocks.{layer}", heads)
    last = slow_mae.block(tokens, w, "blocks.2", heads)
    features = {t: (tokens[t] + last[t]) / 2 for t in range(16)}
    mean = sum(features.values()) / 16
    variance = sum((x - mean) ** 2 for x in features.values()) / 15
    features = {t: (x - mean) / (variance + 1e-6) ** 0.5 for t, x in features.items()}
    q, k = {}, {}
    for t, x in tokens.items():
        q[t], k[t], _ = slow_mae.linear(slow_mae.norm(x, w, "blocks.2.norm1"), w, "blocks.2.attn.qkv").chunk(3)
    logits = {(t, h): products(q[t], k, h, heads, len(mean) // heads) for t in ("cls", *keys) for h in range(heads)}
    relevance = {j: sum(logits["cls", h][j] for h in range(heads)) / heads for j in keys}
    queries = ["cls", *sorted(keys, key=lambda j: -relevance[j])[:topk]]
    return features, queries, {key: {j: row[j] for j in keys} for key, row in logits.items()}


def products(query, keys, head, heads, divisor):
    """Returns {key: logit} of one head, divided by the root of `divisor`."""
    span = slice(head * len(query) // heads, (head + 1) * len(query) // heads)
    return {j: (query[span] @ k[span]) / math.sqrt(divisor) for j, k in keys.items()}


def pixels(img, t):
    return img[:, 8 * (t // 4) : 8 * (t // 4) + 8, 8 * (t % 4) : 8 * (t % 4) + 8]


def slow_mlp(x, w, name):
    hidden = slow_mae.linear(x, w, f"{name}.fc1")
    return slow_mae.linear(hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5)), w, f"{name}.fc2")


def slow_latent(w, img, visible):
    tokens = {"cls": slow_mlp(w["cls_token"][0, 0], w, "cls_token_mlp") + w["pos_embed"][0, 0]}
    for t in visible:
        embedded = (w["patch_embed.proj.weight"] * pixels(img, t)).sum(dim=(1, 2, 3)) + w["patch_embed.proj.bias"]
        tokens[t] = embedded + w["pos_embed"][0, 1 + t]
    levels = {t: [] for t in tokens}
    for layer in range(4):
        tokens = slow_mae.block(tokens, w, f"blocks.{layer}", 3)
        for t, x in tokens.items():
            levels[t].append(slow_mae.norm(x, w, "norm") if layer == 3 else x)
    latent = {}
    for t, outputs in levels.items():
        z = slow_mae.norm(torch.cat(outputs), w, "encoder_adaptor.adap_before", eps=1e-5)
        total = 0
        for i in range(2):  # blocks 0 and 1, blocks 2 and 3
            y = slow_mae.linear(z[48 * i : 48 * i + 48], w, f"encoder_adaptor.fuse_fcs.{i}")
            total = total + y + slow_mlp(y, w, f"encoder_adaptor.adap_mlps.{i}")
        latent[t] = slow_mae.norm(total, w, "encoder_adaptor.adap_after", eps=1e-5)
    return latent


def slow_decoder(w, name, latent, retained, thrown):
    """Returns {token or "cls": features after the decoder's norm}. `thrown`: the tokens to be reconstructed."""
    tokens = {t: slow_mae.linear(x, w, f"{name}.embed") for t, x in latent.items()}
    tokens |= dict.fromkeys(retained, w[f"{name}.mask_token"][0, 0])
    tokens = {t: x + w[f"{name}.pos_embed"][0, 0 if t == "cls" else 1 + t] for t, x in tokens.items()}
    tokens = slow_mae.transformer(tokens, w, "decoder_fea.blocks", heads=2)
    filled = dict(tokens)
    for t in thrown:
        filled[t] = w[f"{name}.aggregation.operator.bias"]
        for other, x in tokens.items():
            if other != "cls":
                i, j = other // 4 - t // 4 + 1, other % 4 - t % 4 + 1
                if 0 <= i < 3 and 0 <= j < 3:
                    filled[t] = filled[t] + w[f"{name}.aggregation.operator.weight"][:, 0, i, j] * x
    return {t: slow_mae.norm(x, w, f"{name}.norm") for t, x in filled.items()}


def slow_losses(model, img, split, progressive):
    """Returns (feature loss, attention loss, {token: predicted feature}, entropy of the targets) of one image."""
    w = {name: value.double() for name, value in model.state_dict().items()}
    visible, retained, thrown = split
    keys = sorted([*visible, *retained, *(thrown if progressive else [])])
    teacher = {name: value.double() for name, value in model.teacher.state_dict().items()}
    targets, queries, logits = slow_teacher(teacher, img, 5, keys, 3)
    latent = slow_latent(w, img, visible)
    fea, att = (
        slow_decoder(w, f"decoder_{b}", latent, retained, thrown if progressive else []) for b in ("fea", "att")
    )
    predictions = {t: slow_mae.linear(x, w, "decoder_fea.pred") for t, x in fea.items() if t != "cls"}
    errors = [((predictions[t] - targets[t]) ** 2).mean() for t in keys if t not in visible]
    qk = {t: slow_mae.linear(x, w, "decoder_att.pred") for t, x in att.items()}
    entropies, crosses = [], []
    for query in queries:
        for head in range(5):
            ours = products(
                qk[query][:20], {j: qk[j][20:] for j in keys}, head, 5, 20
            )  # scaled by the width of all heads
            theirs = {j: value / 1.7 for j, value in logits[query, head].items()}
            total, own = (sum(v.exp() for v in row.values()) for row in (theirs, ours))
            crosses.append(-sum(theirs[j].exp() / total * (ours[j] - own.log()) for j in keys))
            entropies.append(-sum(theirs[j].exp() / total * (theirs[j] - total.log()) for j in keys))
    return sum(errors) / len(errors), sum(crosses) / len(crosses), predictions, sum(entropies) / len(entropies)


@pytest.mark.parametrize(("throw_ratio", "progressive"), ARMS)
def test_losses_and_predictions_against_the_slow_derivation(throw_ratio, progressive):
    model = build(throw_ratio, progressive)
    imgs, ids = torch.randn(2, 3, 32, 32, dtype=torch.float64), orders(model, 2)
    results = [
        slow_losses(model, img, segments(row, model.counts), progressive) for img, row in zip(imgs, ids, strict=True)
    ]
    losses = model(imgs, ids)
    assert list(losses) == ["feature", "attention"]
    for k, loss in enumerate(losses.values()):
        torch.testing.assert_close(loss, torch.stack([r[k] for r in results]).mean(), rtol=1e-9, atol=0)
    assert losses["attention"] > torch.stack([r[3] for r in results]).mean()  # at least the entropy of the target
    pred, mask = model.reconstruct(imgs, ids)
    for b, (_, _, predictions, _) in enumerate(results):
        assert set(mask[b].nonzero().flatten().tolist()) <= predictions.keys()
        for token, value in predictions.items():
            torch.testing.assert_close(pred[b, token], value, rtol=1e-9, atol=1e-9)


def test_attention_loss_is_the_entropy_if_student_and_teacher_agree(monkeypatch):
    """If the student reproduces the logits, the cross-entropy has its minimum."""
    model = build(0.0, att_tau=1.0)
    logits = torch.randn(2, 5, 4, 16, dtype=torch.float64)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    monkeypatch.setattr(models_tec_pr, "attention_logits", lambda q, k, heads: logits * q.shape[-1] ** 0.5)
    loss = model.attention_loss(
        torch.randn(2, 17, 16, dtype=torch.float64), logits, torch.zeros(2, 3, dtype=torch.int64)
    )
    torch.testing.assert_close(loss, entropy)


def test_feature_targets_are_normalised_over_the_patches():
    features = 5 + 3 * torch.randn(4, 196, 8)
    target = TECViT.feature_target(features)
    torch.testing.assert_close(target.mean(dim=1), torch.zeros(4, 8), atol=1e-5, rtol=0)
    torch.testing.assert_close(target.var(dim=1), torch.ones(4, 8), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("throw_ratio", "progressive"), ARMS)
def test_features_of_every_masked_token_are_supervised_and_attention_reaches_every_key(throw_ratio, progressive):
    model = build(throw_ratio, progressive).float()
    imgs, ids = torch.randn(3, 3, 32, 32), orders(model, 3)
    order, outputs, exact = TokenOrder(ids, model.counts), [], model.forward_decoders
    model.forward_decoders = lambda *args: outputs.extend(exact(*args)) or outputs
    losses = model(imgs, ids)
    touched = []
    for x, loss in zip(outputs, losses.values(), strict=True):
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        touched.append(order.restore(gradient[:, 1:].abs().amax(-1, keepdim=True)).squeeze(-1) > 0)
    present = 16 if progressive else model.counts.num_kept
    assert torch.equal(touched[0], order.mask & (order.ids_restore < present))
    assert torch.equal(touched[1], order.ids_restore < present)


def test_the_teacher_is_frozen_deterministic_and_in_no_checkpoint():
    model = build().float().train()
    names = [*model.state_dict(), *dict(model.named_parameters()), *dict(model.named_modules())]
    assert not any("teacher" in name for name in names)
    imgs, ids = torch.randn(2, 3, 32, 32), orders(model, 2)
    sum(model(imgs, ids).values()).backward()
    assert all(p.grad is None and not p.requires_grad for p in model.teacher.parameters())
    assert not model.teacher.training
    order = TokenOrder(ids, model.counts)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.teacher(imgs, order, 16, 3), model.teacher(imgs, order, 16, 3), strict=True)
    )
    assert not any(x.requires_grad for x in model.teacher(imgs, order, 16, 3))


def test_a_run_needs_a_teacher():
    with pytest.raises(ValueError, match="--model tec_vit_base_patch16 needs --teacher: the pre-trained ViT"):
        registry.check_own_flags({"model": "tec_vit_base_patch16", "teacher": None})
    registry.check_own_flags({"model": "tec_vit_base_patch16", "teacher": "run"})
    registry.check_own_flags({"model": "mae_vit_base_patch16", "teacher": None})


def test_what_a_run_records_about_the_teacher(tmp_path, monkeypatch):
    weights = {"model": models_vit.vit_micro_patch4(global_pool="token").state_dict()}
    path = save_checkpoint(tmp_path, 3, weights, {})
    monkeypatch.chdir(tmp_path)
    model = tec_vit_micro_patch4(teacher=".", att_topk=5)
    assert model.own_settings() == {"teacher": str(path.resolve()), "att_topk": 5, "att_tau": 1.0}
    assert model.named_files() == {"teacher": model.teacher} and model.teacher.fingerprint == sha256(path)
    assert "checkpoint-3.pth'" in model.teacher.origin
    untrained = tec_vit_micro_patch4()
    assert untrained.own_settings()["teacher"] is None and untrained.teacher.fingerprint is None


def test_the_teacher_moves_with_the_model():
    model = TECViT(**SIZES).double()
    assert {p.dtype for p in model.teacher.parameters()} == {torch.float64}
    assert {p.device.type for p in model.to("meta").teacher.parameters()} == {"meta"}


def test_initialisation():
    """Linear layers Xavier-uniform with zero bias, the two mask tokens normal."""
    torch.manual_seed(0)
    model = TECViT(**SIZES)
    for name in (
        "cls_token_mlp.fc1",
        "encoder_adaptor.fuse_fcs.1",
        "encoder_adaptor.adap_mlps.0.fc2",
        "decoder_att.pred",
    ):
        linear = model.get_submodule(name)
        bound = (6 / sum(linear.weight.shape)) ** 0.5
        assert 0.9 * bound < linear.weight.abs().max() <= bound and not linear.bias.any(), name
    assert 0.005 < model.decoder_att.mask_token.std() < 0.05 and 0.005 < model.decoder_fea.mask_token.std() < 0.05


def test_the_initial_weights_of_the_encoder_do_not_depend_on_the_size_of_the_teacher(tmp_path):
    states = []
    for size in ("micro", "mini"):
        torch.save(
            getattr(models_vit, f"vit_{size}_patch4")(global_pool="token").state_dict(), tmp_path / "teacher.pth"
        )
        torch.manual_seed(0)
        states.append(tec_vit_micro_patch4(teacher=tmp_path / "teacher.pth").state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0] if not name.startswith("decoder_"))


def test_sizes_of_vit_large():
    with torch.device("meta"):
        model = tec_vit_large_patch16(throw_ratio=0.0)
    assert model.decoder_fea.embed.out_features == 768 and model.decoder_fea.blocks[0].attn.num_heads == 16
    assert len(model.encoder_adaptor.fuse_fcs) == 8 and model.encoder_adaptor.adap_mlps[0].fc1.out_features == 3072


def test_sizes_of_vit_base():
    with torch.device("meta"):
        model = tec_vit_base_patch16(throw_ratio=0.0)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    assert shapes["encoder_adaptor.adap_before.weight"] == [9216]
    assert (
        shapes["encoder_adaptor.fuse_fcs.3.weight"] == [768, 2304] and "encoder_adaptor.fuse_fcs.4.weight" not in shapes
    )
    assert shapes["encoder_adaptor.adap_mlps.0.fc1.weight"] == [2048, 768]
    assert shapes["decoder_fea.pred.weight"] == [768, 512] and shapes["decoder_att.pred.weight"] == [1536, 512]
    assert (
        shapes["decoder_fea.blocks.1.attn.qkv.weight"] == [1536, 512]
        and "decoder_fea.blocks.2.norm1.weight" not in shapes
    )
    assert not any(name.startswith("decoder_att.blocks") for name in shapes)
    assert (model.att_topk, model.att_tau, len(model.teacher.blocks), model.teacher.num_heads) == (9, 1.0, 12, 12)


def release_name(name):
    """Returns the release's name of our parameter, or None if it has one parameter for two of ours."""
    if name.startswith("decoder_fea.blocks."):
        return name.replace("decoder_fea.blocks.", "decoder_blocks.")
    if name == "decoder_fea.pos_embed":
        return "decoder_pos_embed"
    if name == "decoder_att.pos_embed" or "aggregation" in name:
        return None
    branch = re.match(r"decoder_(fea|att)\.", name)
    if branch:
        head = "decoder_pred." if branch[1] == "fea" else "decoder_qk."
        rest = (
            name[branch.end() :]
            .replace("embed.", "decoder_embed.")
            .replace("norm.", "decoder_norm.")
            .replace("pred.", head)
        )
        return f"forward_{branch[1]}_decoder.{rest}"
    return name


def test_load_official():
    source = build(0.0).float()
    released = {release_name(name): value for name, value in source.state_dict().items() if release_name(name)}
    assert {"forward_fea_decoder.mask_token", "forward_fea_decoder.decoder_embed.bias", "decoder_pos_embed"} <= set(
        released
    )
    assert {"forward_att_decoder.decoder_qk.weight", "forward_att_decoder.decoder_norm.weight"} <= set(released)
    assert "decoder_blocks.1.norm1.bias" in released and len(released) == len(source.state_dict()) - 1
    model = build(0.5).float()
    model.load_official({"model": released})
    assert_same_weights(model, source)


def test_folding_the_mlp_on_the_class_token_changes_neither_features_nor_logits(tmp_path):
    """Compares a classifier that sends its class token through the MLP with one that has loaded the folded token."""

    class Unfolded(VisionTransformer):
        def prepend_cls_token(self, tokens):
            hidden = torch.nn.functional.linear(self.cls_token, *self.mlp[0])
            token = torch.nn.functional.linear(torch.nn.functional.gelu(hidden), *self.mlp[1]) + self.pos_embed[:, :1]
            return torch.cat([token.expand(len(tokens), -1, -1), tokens], dim=1)

    source = build()
    path = save_checkpoint(tmp_path, 1, {"model": source.state_dict()}, {})
    imgs = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    for pool in ("avg", "token"):
        torch.manual_seed(1)
        folded = VisionTransformer(num_classes=5, global_pool=pool, **ENCODER).double().eval()
        report = load_encoder(folded, path)
        assert "cls_token" in report.loaded and not [name for name in report.unexpected if name.startswith("cls_token")]
        unfolded = Unfolded(num_classes=5, global_pool=pool, **ENCODER).double().eval()
        unfolded.load_state_dict(folded.state_dict() | {"cls_token": source.cls_token.detach()})
        unfolded.mlp = [
            (fc.weight.detach(), fc.bias.detach()) for fc in (source.cls_token_mlp.fc1, source.cls_token_mlp.fc2)
        ]
        assert not torch.allclose(folded.cls_token, source.cls_token)
        for parameter in (folded.head.weight, unfolded.head.weight):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(folded(imgs), unfolded(imgs), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(folded.forward_features(imgs), source.forward_features(imgs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(att_topk=0), "att_topk must be from 1 to 16 and att_tau above 0, got 0 and 1.7"),
        (dict(att_topk=9, progressive=False), "att_topk must be from 1 to 8"),
        (dict(att_tau=0.0), "got 3 and 0.0"),
        (dict(num_adap=3), "4 blocks do not divide into num_adap 3 groups"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TECViT(**SIZES | options)
