import pytest
import torch

from frameworks.models_greenmim_pr import GreenMIMSwin
from tools import compare_window_attention
from tools.compare_window_attention import Ways

SIZES = dict(img_size=64, embed_dim=16, depths=(2, 2, 2), num_heads=(2, 2, 4), window_size=2, decoder_embed_dim=16)


def test_the_ways_agree_and_are_measured(capsys, monkeypatch):
    monkeypatch.setattr(
        "frameworks.models_greenmim_pr.greenmim_swin_base_patch4_window7",
        lambda: GreenMIMSwin(**SIZES, decoder_num_heads=2),
    )
    compare_window_attention.main(["--batch_size", "2", "--rounds", "1", "--device", "cpu"])
    out = capsys.readouterr().out
    assert [out.count(f"| {way} |") for way in ("grouped", "one group", "dense")] == [
        4,
        4,
        4,
    ]  # two stages, shifted or not
    with pytest.raises(SystemExit):
        compare_window_attention.main(["--model", "greenmim_swin_micro_patch4_window4", "--device", "cpu"])
    assert "has no stage with enough visible tokens for groups of windows" in capsys.readouterr().err


def test_a_way_that_differs_is_named(monkeypatch):
    monkeypatch.setattr(Ways, "one_group", lambda self, x: self.grouped(x) + 1)
    torch.manual_seed(0)
    model = GreenMIMSwin(**SIZES, decoder_num_heads=2)
    with pytest.raises(ValueError, match="one group differs from grouped attention by 1.0e"):
        compare_window_attention.measure(model, 2, 1, torch.device("cpu"))
