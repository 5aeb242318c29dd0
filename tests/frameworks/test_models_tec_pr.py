"""TEC: a slow derivation of both losses, its frozen teacher, sizes, and the names of the release."""

import math
import re

import pytest
import torch
from torch.testing import assert_close

import models_vit
from encoders.load import load_encoder
from frameworks.models_tec_pr import TECViT, tec_vit_micro_patch4
from frameworks.teacher import Teacher
from tests import slow_mae
from tests.test_models_mae_pr import assert_same_weights, orders, perturbed, segments

ENCODER = dict(img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3)
SIZES = dict(
    **ENCODER,
    decoder_embed_dim=16,
    decoder_num_heads=2,
    num_adap=2,
    kernel_size=3,
    att_topk=3,
    att_tau=1.7,
)
ARMS = [(0.0, True), (0.5, False), (0.5, True)]


def build(throw_ratio=0.5, progressive=True, teacher=None, **options):
    torch.manual_seed(0)
    if teacher is None:  # of another size than the student
        teacher = Teacher(dict(img_size=32, patch_size=8, embed_dim=20, depth=3, num_heads=5))
    model = TECViT(
        **SIZES | options,
        throw_ratio=throw_ratio,
        progressive=progressive,
        teacher=teacher,
    )
    for parameter in model.teacher.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return perturbed(model)


def a_batch(model, size=2):
    imgs = torch.randn(size, 3, 32, 32, dtype=torch.float64)
    return imgs, orders(model, size)


# -------------------------------------------------------------------------------------------------- the slow derivation


def slow_teacher(w, img, keys):
    """Returns ({token: feature target}, queries, {token: (query, key)}) of the teacher with 3 blocks and 5 heads.

    keys: the tokens that attention may reach.
    """
    positions = w["pos_embed"][0]
    tokens = {"cls": w["cls_token"][0, 0] + positions[0]}
    for t in range(16):
        tokens[t] = slow_mae.embed(img, t, 8, w) + positions[1 + t]
    for layer in range(2):
        tokens = slow_mae.block(tokens, w, f"blocks.{layer}", heads=5)
    last = slow_mae.block(tokens, w, "blocks.2", heads=5)
    means = torch.stack([(tokens[t] + last[t]) / 2 for t in range(16)])
    deviations = (means.var(dim=0) + 1e-6).sqrt()
    features = (means - means.mean(dim=0)) / deviations
    qk = {}
    for t, x in tokens.items():
        normed = slow_mae.norm(x, w, "blocks.2.norm1")
        qkv = slow_mae.linear(normed, w, "blocks.2.attn.qkv")
        qk[t] = (qkv[:20], qkv[20:40])
    relevance = {}
    for t in keys:
        relevance[t] = 0.0
        for head in range(5):
            relevance[t] += products(qk, "cls", [t], head, width=4)
    most_relevant = sorted(keys, key=relevance.get, reverse=True)
    return features, ["cls", *most_relevant[:3]], qk


def products(qk, query, keys, head, width):
    """Returns the logits of one query and head, divided by the root of `width`. A head has 4 channels."""
    span = slice(4 * head, 4 * head + 4)
    q, _ = qk[query]
    logits = []
    for key in keys:
        _, k = qk[key]
        logits.append(q[span] @ k[span] / math.sqrt(width))
    return torch.stack(logits)


def slow_latent(w, img, visible):
    positions = w["pos_embed"][0]
    cls_token = slow_mae.mlp(w["cls_token"][0, 0], w, "cls_token_mlp")
    tokens = {"cls": cls_token + positions[0]}
    for t in visible:
        tokens[t] = slow_mae.embed(img, t, 8, w) + positions[1 + t]
    outputs = []
    for layer in range(4):
        tokens = slow_mae.block(tokens, w, f"blocks.{layer}", heads=3)
        outputs.append(tokens)
    outputs[3] = {t: slow_mae.norm(x, w, "norm") for t, x in tokens.items()}
    latent = {}
    for t in tokens:
        joined = torch.cat([output[t] for output in outputs])
        joined = slow_mae.norm(joined, w, "encoder_adaptor.adap_before", eps=1e-5)
        total = 0.0
        for i, pair in enumerate(joined.split(48)):  # blocks 0 and 1, blocks 2 and 3
            fused = slow_mae.linear(pair, w, f"encoder_adaptor.fuse_fcs.{i}")
            total = total + fused + slow_mae.mlp(fused, w, f"encoder_adaptor.adap_mlps.{i}")
        latent[t] = slow_mae.norm(total, w, "encoder_adaptor.adap_after", eps=1e-5)
    return latent


def slow_decoder(w, name, latent, retained, thrown):
    """Returns {token or "cls": prediction}. `thrown`: the tokens to be reconstructed. Both decoders share blocks."""
    tokens = {t: slow_mae.linear(x, w, f"{name}.embed") for t, x in latent.items()}
    tokens |= dict.fromkeys(retained, w[f"{name}.mask_token"][0, 0])
    for t, x in tokens.items():
        row = 0 if t == "cls" else 1 + t
        tokens[t] = x + w[f"{name}.pos_embed"][0, row]
    tokens = slow_mae.transformer(tokens, w, "decoder_fea.blocks", heads=2)
    cells = dict(tokens)
    del cells["cls"]
    operator = f"{name}.aggregation.operator"
    for t in thrown:
        kernel = {"weight": w[f"{operator}.weight"], "bias": w[f"{operator}.bias"]}
        tokens[t] = slow_mae.aggregate(cells, t, 4, kernel)
    predictions = {}
    for t, x in tokens.items():
        normed = slow_mae.norm(x, w, f"{name}.norm")
        predictions[t] = slow_mae.linear(normed, w, f"{name}.pred")
    return predictions


def slow_results(model, img, visible, retained, thrown):
    """Returns (feature loss, attention loss, {token: predicted feature}, entropy of the targets) of one image."""
    w = dict(model.named_parameters())
    if not model.method.progressive:
        thrown = []
    keys = sorted([*visible, *retained, *thrown])
    of_teacher = dict(model.teacher.named_parameters())
    targets, queries, teacher_qk = slow_teacher(of_teacher, img, keys)
    latent = slow_latent(w, img, visible)
    features = slow_decoder(w, "decoder_fea", latent, retained, thrown)
    errors = []
    for t in [*retained, *thrown]:
        squares = (features[t] - targets[t]) ** 2
        errors.append(squares.mean())
    student_qk = {}
    queries_and_keys = slow_decoder(w, "decoder_att", latent, retained, thrown)
    for t, x in queries_and_keys.items():
        student_qk[t] = (x[:20], x[20:])
    entropies = []
    crosses = []
    for query in queries:
        for head in range(5):
            ours = products(student_qk, query, keys, head, width=20)  # scaled by the width of all heads
            theirs = products(teacher_qk, query, keys, head, width=4) / 1.7
            shares = theirs.exp() / theirs.exp().sum()
            log_shares = ours - ours.exp().sum().log()
            crosses.append(-(shares @ log_shares))
            entropies.append(-(shares @ shares.log()))
    feature_loss = sum(errors) / len(errors)
    attention_loss = sum(crosses) / len(crosses)
    return feature_loss, attention_loss, features, sum(entropies) / len(entropies)


@torch.no_grad()
@pytest.mark.parametrize(("throw_ratio", "progressive"), ARMS)
def test_losses_and_predictions_against_the_slow_derivation(throw_ratio, progressive):
    model = build(throw_ratio, progressive)
    imgs, ids = a_batch(model)
    losses = model(imgs, ids)
    pred, mask = model.reconstruct(imgs, ids)
    sums = {"feature": 0.0, "attention": 0.0, "entropy": 0.0}
    for b in range(2):
        visible, retained, thrown = segments(ids[b], model.counts)
        feature, attention, predictions, entropy = slow_results(model, imgs[b], visible, retained, thrown)
        sums["feature"] += feature / 2
        sums["attention"] += attention / 2
        sums["entropy"] += entropy / 2
        for token in mask[b].nonzero().flatten().tolist():
            assert token in predictions
        del predictions["cls"]
        for token, value in predictions.items():
            assert_close(pred[b, token], value, rtol=1e-9, atol=1e-9)
    assert list(losses) == ["feature", "attention"]
    assert_close(losses["feature"], sums["feature"], rtol=1e-9, atol=0)
    assert_close(losses["attention"], sums["attention"], rtol=1e-9, atol=0)
    assert losses["attention"] > sums["entropy"]


# ----------------------------------------------------------------------------------------------- losses and the teacher


def test_the_initial_weights_of_the_encoder_do_not_depend_on_the_size_of_the_teacher(tmp_path):
    states = []
    for make in (models_vit.vit_micro_patch4, models_vit.vit_mini_patch4):
        torch.save(make(global_pool="token").state_dict(), tmp_path / "teacher.pth")
        torch.manual_seed(0)
        model = tec_vit_micro_patch4(teacher=tmp_path / "teacher.pth")
        states.append(model.state_dict())
    micro, mini = states
    for name, value in micro.items():
        if not name.startswith("decoder_"):
            assert torch.equal(value, mini[name]), name


# ------------------------------------------------------------------------------------------------ names of the release


def released(model):
    """Returns the model's weights under the release's names, which has one table of positions for both decoders."""
    weights = {}
    for name, value in model.state_dict().items():
        branch = re.match(r"decoder_(fea|att)\.", name)
        if name.startswith("decoder_fea.blocks."):
            name = name.replace("decoder_fea.blocks.", "decoder_blocks.")
        elif name == "decoder_fea.pos_embed":
            name = "decoder_pos_embed"
        elif name == "decoder_att.pos_embed" or "aggregation" in name:
            continue
        elif branch:
            rest = name.removeprefix(branch[0])
            if rest.startswith(("embed.", "norm.", "pred.")):
                rest = f"decoder_{rest}"
            if branch[1] == "att":
                rest = rest.replace("decoder_pred.", "decoder_qk.")
            name = f"forward_{branch[1]}_decoder.{rest}"
        weights[name] = value
    return weights


def test_no_more_rows_of_attention_than_tokens():
    build(progressive=False, att_topk=8)  # visible and retained
    with pytest.raises(ValueError, match="--att_topk"):
        build(progressive=False, att_topk=9)


def test_load_official(tmp_path):
    """Fine-tuning takes the same file."""
    source = build(0.0).float()
    model = build(0.5).float()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.load_official({"model": released(source)})
    assert_same_weights(model, source)
    torch.save({"model": released(source)}, tmp_path / "release.pth")
    tuned = models_vit.VisionTransformer(num_classes=3, cls_token_mlp=True, **ENCODER)
    load_encoder(tuned, tmp_path / "release.pth")
    assert torch.equal(tuned.cls_token_mlp.fc1.weight, source.cls_token_mlp.fc1.weight)
