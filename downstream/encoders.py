"""The encoders of trained models of dense tasks, without their heads."""

from downstream.detection.backbone import ViTDet
from downstream.detection.models import detector_from
from downstream.segmentation.models import segmenter_from
from downstream.segmentation.vit_backbone import DenseViT
from encoders.load import Weights


def dense_encoder(weights: Weights) -> DenseViT | ViTDet:
    """Returns the encoder of a model of main_segmentation.py or main_detection.py, in eval mode.

    It has no final norm if its heads read tokens without one: those of UPerNet and of detectors.
    """
    if "categories" in weights.settings:
        return detector_from(weights).model.backbone
    return segmenter_from(weights).model.backbone
