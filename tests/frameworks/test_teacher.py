"""TEC's teacher: timm's function, files of all origins, the normalisation of pixels, and what is refused."""

import pytest
import timm
import torch
from torch.testing import assert_close

from encoders.models_relative_vit import relative_vit_micro_patch4
from frameworks import teacher as models_teacher
from frameworks.models_tec_pr import tec_vit_micro_patch4
from frameworks.teacher import open_teacher
from models_mae_pr import mae_vit_micro_patch4
from models_vit import vit_micro_patch4, vit_mini_patch4
from prmim import TokenOrder
from tests.test_models_mae_pr import orders, perturbed
from util.run.files.checkpoint import save_checkpoint, sha256

TIMM = dict(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3, num_classes=0)


def timm_vit(**options):
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", **TIMM | options)
    return perturbed(model).float().eval()


def features_of(theirs, imgs):
    """Returns the mean of the outputs of the last two blocks of timm's model."""
    last, before = theirs.forward_intermediates(
        imgs,
        indices=2,
        norm=False,
        intermediates_only=True,
        output_fmt="NLC",
    )
    return (last + before) / 2


def normalised(pixels, mean, std):
    centred = pixels - torch.tensor(mean)[:, None, None]
    return centred / torch.tensor(std)[:, None, None]


def in_training_checkpoint(weights):
    student = {f"module.backbone.{name}": value for name, value in weights.items()}
    return {"student": student | {"module.head.last": torch.zeros(3)}}


FORMS = {
    "timm": lambda weights: weights,
    "MAE": lambda weights: {"model": weights, "epoch": 3},
    "iBOT": lambda weights: {"state_dict": weights | {"head.mlp.0.weight": torch.zeros(3)}},
    "training checkpoint": in_training_checkpoint,
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_features_equal_those_of_timm(tmp_path, form):
    theirs = timm_vit()
    path = tmp_path / "teacher.pth"
    torch.save(FORMS[form](theirs.state_dict()), path)
    teacher = open_teacher(str(path), (32, 32), 4)
    assert teacher.source == str(path)
    assert ("of iBOT or DINO" in teacher.origin) == (form == "training checkpoint")
    imgs = torch.randn(2, 3, 32, 32)
    assert_close(teacher.features(imgs), features_of(theirs, imgs), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_patches_follow_all_class_tokens(tmp_path):
    """timm's register tokens are class tokens here, as in Pixio's setting."""
    theirs = timm_vit(reg_tokens=3, no_embed_class=False)
    torch.save(theirs.state_dict(), tmp_path / "teacher.pth")
    teacher = open_teacher(str(tmp_path / "teacher.pth"), (32, 32), 4)
    imgs = torch.randn(2, 3, 32, 32)
    assert_close(teacher.features(imgs), features_of(theirs, imgs), rtol=1e-4, atol=1e-4)
    student = mae_vit_micro_patch4(throw_ratio=0.5)
    order = TokenOrder(orders(student, 2), student.counts)
    features, rows, _ = teacher(imgs, order, 64, topk=5)
    assert features.shape == (2, 64, 96)
    assert rows.shape == (2, 3, 6, 64)


def test_a_run_of_this_project_is_a_teacher(tmp_path):
    model = mae_vit_micro_patch4()
    settings = dict(model="mae_vit_micro_patch4", input_size=[32], patch_size=4)
    path = save_checkpoint(tmp_path, 7, {"model": model.state_dict()}, {"settings": settings})
    teacher = open_teacher(str(tmp_path), (32, 32), 4)
    last = teacher.blocks[3]
    assert torch.equal(last.mlp.fc2.weight, model.blocks[3].mlp.fc2.weight)
    assert teacher.source == str(path.resolve())
    assert "(made as mae_vit_micro_patch4), width 96, 4 blocks: 52 loaded" in teacher.origin
    assert teacher.fingerprint == sha256(path)
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    student = tec_vit_micro_patch4(teacher=str(tmp_path))
    assert student.own_settings()["teacher"] == teacher.source


def test_positions_of_another_grid_are_resized(tmp_path):
    torch.save(timm_vit().state_dict(), tmp_path / "teacher.pth")
    teacher = open_teacher(str(tmp_path / "teacher.pth"), (48, 32), 4)
    assert teacher.pos_embed.shape == (1, 97, 96)
    assert teacher.features(torch.randn(1, 3, 48, 32)).shape == (1, 96, 96)


@pytest.fixture
def timm_gives(monkeypatch):
    """Replaces timm's download: every pre-trained model is the one that is given here."""

    def give(model):
        monkeypatch.replace_in(models_teacher, "timm.create_model", lambda name, pretrained, img_size: model)

    return give


@torch.no_grad()
def test_a_timm_name_and_pixels_of_another_normalisation(timm_gives):
    """The teacher sees a photograph as timm's model does: normalised with that model's mean and deviation."""
    theirs = timm_vit()
    statistics = dict(mean=(0.5, 0.5, 0.4), std=(0.5, 0.25, 0.5))
    theirs.pretrained_cfg = statistics
    timm_gives(theirs)
    teacher = open_teacher("vit_base_patch16_224.augreg_in21k", (32, 32), 4)
    assert teacher.source == teacher.fingerprint == "vit_base_patch16_224.augreg_in21k"
    assert teacher.num_heads == 3
    pixels = torch.rand(2, 3, 32, 32)
    expected = features_of(theirs, normalised(pixels, **statistics))
    seen = normalised(pixels, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    features = teacher.features(seen)
    assert_close(features, expected, rtol=1e-4, atol=1e-4)


MINI = vit_mini_patch4(global_pool="token").state_dict()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (MINI | {"blocks.0.attn.q_norm.weight": torch.zeros(64)}, "this Teacher has no blocks.0.attn.q_norm"),
        ({k: v for k, v in MINI.items() if k != "blocks.2.norm1.bias"}, r"missing: blocks\.2\.norm1\.bias"),
        (vit_micro_patch4(embed_dim=48).state_dict(), "does not say its number of heads"),
        (relative_vit_micro_patch4().state_dict(), "a teacher must be a plain ViT"),
    ],
)
def test_unusable_files_are_refused(tmp_path, weights, message):
    torch.save(weights, tmp_path / "teacher.pth")
    with pytest.raises(ValueError, match=message):
        open_teacher(str(tmp_path / "teacher.pth"), (32, 32), 4)


@torch.no_grad()
@pytest.mark.parametrize("channels", [3, 5])
def test_a_teacher_follows_the_normalisation_of_its_student(tmp_path, channels):
    """Whatever statistics the student's images are normalised with, the teacher computes the features of its own."""
    theirs = timm_vit(in_chans=channels)
    torch.manual_seed(3)
    drawn = 0.1 + 0.8 * torch.rand(3, 2, channels)
    own, first, second = drawn.tolist()
    mean, std = own
    settings = {"mean": mean, "std": std, "input_size": 32, "patch_size": 4}
    path = save_checkpoint(tmp_path, 1, {"model": theirs.state_dict()}, {"settings": settings})
    student = tec_vit_micro_patch4(teacher=path, in_chans=channels)
    pixels = torch.rand(2, channels, 32, 32)
    expected = features_of(theirs, normalised(pixels, *own))
    for statistics in (first, own, second, second):
        student.teacher.use_statistics(*statistics)
        seen = normalised(pixels, *statistics)
        found = student.teacher.features(seen)
        assert_close(found, expected, rtol=1e-3, atol=1e-3)
