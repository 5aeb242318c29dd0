"""One epoch of pre-training. Knows batches, losses and steps, but no framework and no model."""

from util.run.train_engine import TrainEngine


class PretrainEngine(TrainEngine):
    """model(imgs, ids_shuffle, *plans) -> dict of scalar losses; the batches are `MaskCollator`'s."""

    def losses_of(self, batch, step, micro):
        imgs, _, *orders = batch
        self.reseed(step, micro)
        imgs = self.normalize(imgs.to(self.device, non_blocking=True))
        return self.model(imgs, *(order.to(self.device, non_blocking=True) for order in orders))
