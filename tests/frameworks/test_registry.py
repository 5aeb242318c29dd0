"""Models by their names, and models that runs have pre-trained."""

import pytest
import torch

import main_pretrain
from frameworks.registry import build_model, load_run
from util.run.checkpoint import CheckpointError, save_checkpoint


def save(folder, settings):
    model = build_model(settings)
    save_checkpoint(folder, 1, {"model": model.state_dict()}, {"settings": settings})
    return model


@pytest.fixture
def settings():
    _, args = main_pretrain.parse_args(["--model", "mae_vit_micro_patch4"])
    return vars(args)


def test_a_run_is_loaded_with_its_weights(tmp_path, settings):
    model = save(tmp_path, settings)
    loaded, found = load_run(tmp_path)
    assert found["mask_ratio"] == 0.75
    assert not loaded.training
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_a_run_of_another_version_is_refused(tmp_path, settings):
    save(tmp_path, settings)
    del settings["kernel_size"]
    model = {"w": torch.zeros(1)}
    save_checkpoint(tmp_path, 2, {"model": model}, {"settings": settings})
    with pytest.raises(CheckpointError, match="checkpoint-2.pth' does not say 'kernel_size': .* another version"):
        load_run(tmp_path)
