"""Fine-tuning of TEC's encoders as in the release: a frozen position table, and a trained MLP on the class token."""

import json

import pytest
import torch
from torch.testing import assert_close

from encoders.load import load_encoder
from encoders.trained import load
from frameworks.models_tec_pr import tec_vit_micro_patch4
from models_mae_pr import mae_vit_micro_patch4
from models_vit import VisionTransformer
from scripts import export
from tests.frameworks.test_models_tec_pr import ENCODER, build
from tests.runs import assert_same_state, contents, evaluate, finetune, pretrain
from tests.test_models_vit import scale_and_decay
from util.run.files.checkpoint import newest_checkpoint, save_checkpoint

AS_RELEASED = ("--cls_token_mlp", "--no-train_pos_embed", "--no-cls_token_layer_decay", "--layer_decay", 0.5)
MICRO = ("--model", "vit_micro_patch4")


@pytest.fixture(scope="module")
def encoder(photos, tmp_path_factory):
    """The folder of a short run of TEC, whose teacher is a short run of MAE."""
    teacher = tmp_path_factory.mktemp("teacher")
    student = tmp_path_factory.mktemp("student")
    pretrain(photos, teacher, "--model", "mae_vit_micro_patch4", "--max_steps", 1)
    pretrain(photos, student, "--model", "tec_vit_micro_patch4", "--teacher", teacher, "--max_steps", 1)
    return student


def finetune_with_a_stop(labelled, tmp_path, *flags):
    """Fine-tunes in one piece and in two, which must give the same, and returns the weights."""
    content = finetune(labelled, tmp_path / "whole", *flags)
    finetune(labelled, tmp_path / "parts", *flags, "--max_steps", 4)
    resumed = finetune(labelled, tmp_path / "parts", *flags)
    assert_same_state(resumed, content)
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    found = evaluate(labelled, tmp_path / "whole")
    assert found["loss"] == pytest.approx(results["last"]["val_loss"], rel=1e-5)
    return content["model"]


def test_the_mlp_is_trained_and_the_positions_are_not(labelled, encoder, tmp_path):
    before = contents(newest_checkpoint(encoder)[0])["model"]
    after = finetune_with_a_stop(labelled, tmp_path, *MICRO, *AS_RELEASED, "--finetune", encoder)
    assert torch.equal(after["pos_embed"], before["pos_embed"])
    trained = [name for name in before if name.startswith("cls_token")]
    assert len(trained) == 5
    for name in trained:
        assert not torch.equal(after[name], before[name]), name

    export.main([str(tmp_path / "whole"), "--out", str(tmp_path / "classifier.pth")])  # compares logits with timm's
    exported = torch.load(tmp_path / "classifier.pth", weights_only=True)
    weights = exported.get("model", exported)
    assert not any(name.startswith("cls_token_mlp") for name in weights)


@torch.no_grad()
def test_unfolded_and_folded_start_from_the_same_function(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"model": build().state_dict()}, {})
    imgs = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    features = []
    for unfolded in (True, False):
        model = VisionTransformer(num_classes=5, cls_token_mlp=unfolded, **ENCODER).double()
        report = load_encoder(model, path)
        assert set(report.missing) == {"head.weight", "head.bias", "fc_norm.weight", "fc_norm.bias"}
        assert ("cls_token_mlp.fc1.weight" in report.loaded) == unfolded
        features.append(model.forward_features(imgs))
    assert_close(features[0], features[1], rtol=1e-10, atol=1e-10)


def published(source, path):
    """Writes the encoder of a TEC model as TEC's authors publish it: the MLP folded in, and nothing but these keys."""
    weights = {}
    for name, value in source.state_dict().items():
        if name == "pos_embed" or name.startswith(("patch_embed.", "blocks.")):
            weights[name] = value
    weights["cls_token"] = source.cls_token_mlp(source.cls_token).detach()
    torch.save({"model": weights}, path)
    return weights


def assert_same_features(model, source):
    imgs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = source.forward_features(imgs)
    assert_close(model.forward_features(imgs), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pool", ["avg", "token"])
@pytest.mark.parametrize("with_mlp", [False, True])
def test_published_weights_are_folded_already(tmp_path, pool, with_mlp):
    source = build()
    weights = published(source, tmp_path / "tec.pth")
    model = VisionTransformer(num_classes=5, global_pool=pool, cls_token_mlp=with_mlp, **ENCODER).double()
    report = load_encoder(model, tmp_path / "tec.pth")
    mlp = {name for name in model.state_dict() if name.startswith("cls_token_mlp")}
    assert set(report.loaded) == set(weights) | mlp
    assert not report.unexpected
    assert ("the MLP on the class token begins as the file's token" in str(report)) == with_mlp
    assert ("holds no final norm: norm starts with weight 1" in str(report)) == (pool == "token")
    source.norm = model.norm
    assert_same_features(model, source)


def test_pre_training_goes_on_from_any_token(labelled, tmp_path):
    """From TEC's own published encoder, with a stop, and from an encoder of MAE: features are those of the file."""
    teacher = tmp_path / "teacher.pth"
    torch.save({"model": mae_vit_micro_patch4().state_dict()}, teacher)
    published(tec_vit_micro_patch4(), tmp_path / "tec.pth")
    for name in ("teacher", "tec"):
        flags = ("--model", "tec_vit_micro_patch4", "--teacher", teacher, "--pretrained", tmp_path / f"{name}.pth")
        frozen = ("--lr", 0, "--weight_decay", 0, "--max_steps", 1)
        pretrain(labelled, tmp_path / name, *flags, *frozen)
        imgs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
        begun, theirs = (load(path).model.double() for path in (tmp_path / name, tmp_path / f"{name}.pth"))
        expected = theirs.encode(theirs.embed(imgs))
        assert_close(begun.encode(begun.embed(imgs)), expected, rtol=1e-6, atol=1e-6)
    content = pretrain(labelled, tmp_path / "whole", *flags)
    pretrain(labelled, tmp_path / "parts", *flags, "--max_steps", 4)
    assert_same_state(pretrain(labelled, tmp_path / "parts", *flags), content)


def test_the_mlp_learns_like_the_head_and_the_positions_not_at_all():
    with torch.device("meta"):
        flags = dict(cls_token_mlp=True, train_pos_embed=False, cls_token_layer_decay=False)
        model = VisionTransformer(num_classes=5, **flags, **ENCODER)
    found = scale_and_decay(model, 0.5)
    assert "pos_embed" not in found
    assert found["cls_token"] == (1.0, 0.0)
    assert found["cls_token_mlp.fc1.weight"] == (1.0, 0.05)
    assert found["cls_token_mlp.fc1.bias"] == (1.0, 0.0)
    assert found["patch_embed.proj.weight"] == (0.5**5, 0.05)


def test_partial_fine_tuning_freezes_the_mlp():
    model = VisionTransformer(num_classes=5, cls_token_mlp=True, **ENCODER)
    model.freeze_all_but(1)
    trained = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained.add(name.split(".")[0])
    assert trained == {"blocks", "fc_norm", "head"}
