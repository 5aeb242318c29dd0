import copy

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from models_mae_pr import MaskedAutoencoderViT
from prmim import TokenOrder
from tests.test_models_mae_pr import SIZES, orders, perturbed

peers = pytest.importorskip("scripts.parts.peers", reason="needs Transformers", exc_type=ImportError)


@pytest.fixture
def mae():
    torch.manual_seed(0)
    return perturbed(MaskedAutoencoderViT(**SIZES, throw_ratio=0.0, norm_pix_loss=True))


def test_the_stand_in_for_maes_release_has_the_loss_and_the_gradients_of_mae_here(mae):
    peer = peers.TimmMAE(copy.deepcopy(mae)).double()
    imgs = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    order = TokenOrder(orders(mae, len(imgs)), mae.counts)
    loss = mae(imgs, order.ids_shuffle)["pixel"]
    loss.backward()
    loss_of_peer = peer.forward_loss(imgs, noise=order.ids_restore)
    loss_of_peer.backward()
    assert_close(loss_of_peer, loss, rtol=1e-12, atol=0)
    gradients = {}
    for name, parameter in peer.named_parameters():
        name = name.removeprefix("mae.").replace("decoder_blocks.", "decoder.blocks.")
        gradients[name] = parameter.grad
    expected = {name: parameter.grad for name, parameter in mae.named_parameters()}
    assert_close(gradients, expected, rtol=1e-9, atol=1e-12)


class CountFlash(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function == torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_do_the_work_of_mae_with_flash_attention(name, mae):
    number = sum(p.numel() for p in mae.parameters() if p.requires_grad)
    peer = peers.PEERS[name](copy.deepcopy(mae)).double()
    assert sum(p.numel() for p in peer.parameters() if p.requires_grad) == number
    imgs = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    ids_shuffle = orders(mae, len(imgs))
    with CountFlash() as flash:
        first, second = (peer(imgs, ids_shuffle)["pixel"].item() for _ in range(2))
    assert flash.number == 2 * (SIZES["depth"] + SIZES["decoder_depth"])
    assert first != second  # other tokens are visible
    assert first == pytest.approx(second, rel=0.3)
