import pytest
import torch

from models_vit import MICRO, VisionTransformer
from tests.downstream.dense import detect, segment, write_shapes, write_stripes
from tests.test_monitor import data  # noqa: F401  (a fixture)


@pytest.fixture(scope="session")
def striped(tmp_path_factory):
    return write_stripes(tmp_path_factory.mktemp("striped"))


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    pytest.importorskip("faster_coco_eval")
    return write_shapes(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """The file of a pre-trained ViT."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("encoder") / "vit.pth"
    torch.save({"model": VisionTransformer(global_pool="token", **MICRO).state_dict()}, path)
    return path


@pytest.fixture(scope="session")
def segmented(striped, encoder, tmp_path_factory):
    """The folder of a finished run with UPerNet."""
    folder = tmp_path_factory.mktemp("runs") / "segmentation"
    segment(striped, folder, "--finetune", encoder, "--drop_path", 0.3)
    return folder


@pytest.fixture(scope="session")
def detected(shapes, encoder, tmp_path_factory):
    """The folder of a finished run with Mask R-CNN."""
    folder = tmp_path_factory.mktemp("runs") / "detection"
    detect(shapes, folder, "--finetune", encoder, "--drop_path", 0.3)
    return folder


@pytest.fixture(params=["segmentation", "detection"])
def dense(request):
    """(program, its data, the folder of a finished run)."""
    if request.param == "segmentation":
        return segment, request.getfixturevalue("striped"), request.getfixturevalue("segmented")
    return detect, request.getfixturevalue("shapes"), request.getfixturevalue("detected")
