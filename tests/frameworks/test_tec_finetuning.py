"""Fine-tuning of TEC's encoders as in the release: a frozen position table, and a trained MLP on the class token."""

import json

import pytest
import torch
from timm.optim import param_groups_layer_decay

from encoders.load import load_encoder, load_model
from frameworks.models_tec_pr import tec_vit_micro_patch4
from models_vit import VisionTransformer
from scripts import export
from tests.frameworks.test_models_tec_pr import ENCODER, build
from tests.runs import assert_same_state, contents, evaluate, finetune, pretrain
from util.run.checkpoint import newest_checkpoint, save_checkpoint

AS_RELEASED = ("--cls_token_mlp", "--no-train_pos_embed", "--no-cls_token_layer_decay", "--layer_decay", 0.5)
MICRO = ("--model", "vit_micro_patch4")


@pytest.fixture(scope="module")
def encoder(photos, tmp_path_factory):
    """The folder of a short run of TEC, whose teacher is a short run of MAE."""
    teacher, student = tmp_path_factory.mktemp("teacher"), tmp_path_factory.mktemp("student")
    pretrain(photos, teacher, "--model", "mae_vit_micro_patch4", "--max_steps", 1)
    pretrain(photos, student, "--model", "tec_vit_micro_patch4", "--teacher", teacher, "--max_steps", 1)
    return student


def weights_of(folder):
    return contents(newest_checkpoint(folder)[0])["model"]


def test_the_mlp_is_trained_and_the_positions_are_not(labelled, encoder, tmp_path):
    before, flags = weights_of(encoder), (*MICRO, *AS_RELEASED, "--finetune", encoder)
    content = finetune(labelled, tmp_path / "whole", *flags)
    after = content["model"]
    assert torch.equal(after["pos_embed"], before["pos_embed"])
    changed = [name for name in before if name.startswith("cls_token")]
    assert len(changed) == 5 and not any(torch.equal(after[name], before[name]) for name in changed)
    finetune(labelled, tmp_path / "parts", *flags, "--max_steps", 4)
    assert_same_state(finetune(labelled, tmp_path / "parts", *flags), content)
    results = json.loads((tmp_path / "whole" / "results.json").read_text())["last"]
    assert evaluate(labelled, tmp_path / "whole")["loss"] == pytest.approx(results["val_loss"], rel=1e-5)
    out = tmp_path / "classifier.pth"
    export.main([str(tmp_path / "whole"), "--out", str(out)])  # compares the logits with timm's model
    exported = torch.load(out, weights_only=True)
    assert not [name for name in exported.get("model", exported) if name.startswith("cls_token_mlp")]


def test_unfolded_and_folded_start_from_the_same_function(tmp_path):
    source = build()
    path = save_checkpoint(tmp_path, 1, {"model": source.state_dict()}, {})
    imgs, logits = torch.randn(4, 3, 32, 32, dtype=torch.float64), []
    for unfolded in (True, False):
        model = VisionTransformer(num_classes=5, cls_token_mlp=unfolded, **ENCODER).double().eval()
        report = load_encoder(model, path)
        loaded = [name for name in report.loaded if name.startswith("cls_token_mlp.")]
        assert len(loaded) == (4 if unfolded else 0) and set(report.missing) == {
            *("head.weight", "head.bias", "fc_norm.weight", "fc_norm.bias")
        }
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
        logits.append(model(imgs))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-10, atol=1e-10)
    without = VisionTransformer(num_classes=5, cls_token_mlp=True, **ENCODER).double().eval()
    without.load_state_dict(model.state_dict(), strict=False)  # the MLP of this one is random
    assert not torch.allclose(without(imgs), logits[0], rtol=1e-3)


def published(source, path):
    """Writes the encoder of a TEC model as TEC's authors publish it: the MLP folded in, and nothing but these keys."""
    names = [f"patch_embed.proj.{kind}" for kind in ("weight", "bias")]
    parts = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    names += [f"blocks.{i}.{part}.{kind}" for i in range(4) for part in parts for kind in ("weight", "bias")]
    weights = {name: source.state_dict()[name] for name in ("pos_embed", *names)}
    weights["cls_token"] = source.cls_token_mlp(source.cls_token).detach()
    torch.save({"model": weights}, path)
    return weights


@pytest.mark.parametrize("pool", ["avg", "token"])
@pytest.mark.parametrize("with_mlp", [False, True])
@pytest.mark.fault(
    "U93", "TEC's published weights, whose MLP is folded already, with TEC's recipes", "loaded; said; equal features"
)
def test_published_weights_are_folded_already(tmp_path, pool, with_mlp):
    source = build()
    weights = published(source, tmp_path / "tec.pth")
    model = VisionTransformer(num_classes=5, global_pool=pool, cls_token_mlp=with_mlp, **ENCODER).double().eval()
    report = load_encoder(model, tmp_path / "tec.pth")
    assert set(report.loaded) == set(weights) and not report.unexpected and not model.cls_token_mlp.state_dict()
    assert ("taken for TEC's publication, so the class token is used without its MLP" in str(report)) == with_mlp
    assert ("the file, taken for TEC's publication, holds no final norm: norm starts with weight 1" in str(report)) == (
        pool == "token"
    )
    imgs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    source.norm = model.norm
    torch.testing.assert_close(model.forward_features(imgs), source.forward_features(imgs), rtol=1e-10, atol=1e-10)


def test_a_refused_file_leaves_the_model_unchanged(tmp_path):
    weights = published(build(), tmp_path / "tec.pth")
    torch.save(weights | {"blocks.3.mlp.fc2.bias": torch.full((24,), torch.nan)}, tmp_path / "tec.pth")
    model = VisionTransformer(num_classes=5, cls_token_mlp=True, **ENCODER).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(FloatingPointError, match=r"tec\.pth' \(taken for TEC's publication\) are not finite"):
        load_encoder(model, tmp_path / "tec.pth")
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_official_loading_of_published_weights_says_what_is_folded_and_what_is_untrained(tmp_path):
    source, model = build(), build(0.5)
    weights, before = published(source, tmp_path / "tec.pth"), {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.warns(
        UserWarning, match="MLP is folded into the class token; adapter and decoders are not in the file"
    ):
        model.load_official({"model": weights})
    after, source.norm = model.state_dict(), torch.nn.LayerNorm(24, eps=1e-6).double()
    assert not any(name.startswith("cls_token_mlp") for name in after)
    others = [name for name in after if name not in weights and not name.startswith("norm.")]
    assert others and all(torch.equal(after[name], before[name]) for name in others)
    imgs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model.forward_features(imgs), source.forward_features(imgs), rtol=1e-10, atol=1e-10)
    del weights["blocks.3.mlp.fc2.bias"]
    with pytest.raises(ValueError, match=r"TEC weights do not fit this TECViT: 1 missing: blocks\.3\.mlp\.fc2\.bias"):
        model.load_official(weights)


def test_a_run_on_published_weights_resumes_and_evaluates(labelled, tmp_path, capsys):
    published(tec_vit_micro_patch4(), tmp_path / "tec.pth")
    assert load_model(tmp_path / "tec.pth").norm.weight.unique().tolist() == [1.0]
    flags = (*MICRO, *AS_RELEASED, "--finetune", tmp_path / "tec.pth")
    content = finetune(labelled, tmp_path / "whole", *flags)
    assert "taken for TEC's publication" in capsys.readouterr().out
    assert not any(name.startswith("cls_token_mlp") for name in content["model"])
    finetune(labelled, tmp_path / "parts", *flags, "--max_steps", 4)
    assert_same_state(finetune(labelled, tmp_path / "parts", *flags), content)
    results = json.loads((tmp_path / "whole" / "results.json").read_text())["last"]
    assert evaluate(labelled, tmp_path / "whole")["loss"] == pytest.approx(results["val_loss"], rel=1e-5)


def test_the_mlp_learns_like_the_head_and_the_positions_not_at_all():
    with torch.device("meta"):
        model = VisionTransformer(num_classes=5, cls_token_mlp=True, train_pos_embed=False, **ENCODER)
    model.cls_token_layer_decay = False
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    found = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert id(model.pos_embed) not in found and found[id(model.cls_token)] == (1.0, 0.0)
    mlp = model.cls_token_mlp
    assert found[id(mlp.fc1.weight)] == found[id(mlp.fc2.weight)] == (1.0, 0.05)
    assert found[id(mlp.fc1.bias)] == (1.0, 0.0)
    assert found[id(model.patch_embed.proj.weight)] == (0.5**5, 0.05)


def test_partial_fine_tuning_freezes_the_mlp():
    model = VisionTransformer(num_classes=5, cls_token_mlp=True, **ENCODER)
    model.freeze_all_but(1)
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"blocks", "fc_norm", "head"}


def test_other_models_and_encoders_are_refused(labelled, pretrained, tmp_path, capsys):
    for model in ("swin_micro_patch4_window4", "relative_vit_micro_patch4"):
        for flag in ("--cls_token_mlp", "--no-train_pos_embed"):
            message = finetune.refused(capsys, labelled, tmp_path / "out", "--model", model, flag)
            assert f"{flag} is for plain ViTs, but --model is {model}: leave it out" in message
    flags = [*MICRO, "--cls_token_mlp", "--finetune", pretrained]
    message = finetune.refused(capsys, labelled, tmp_path / "out", *flags, code=4)
    assert "made as mae_vit_micro_patch4" in message and "missing: cls_token_mlp.fc1.weight" in message
