"""A prediction layer for a tiny target, in the format of `forerun distil`, as training begins."""

from pathlib import Path

from core.config import ModelConfig
from core.loading import load_network
from core.prediction_layer import SHAPE
from drafter_service.distil.checkpoint import write_checkpoint
from drafter_service.distil.prediction import PredictionStudent


def save_prediction_layer(target: Path, folder: Path, layers: tuple[int, ...] = (0, 1)) -> Path:
    """Write an untrained one that may propose every token."""
    network = load_network(ModelConfig(model=str(target), dtype="float32"))
    vocab_size = network.config.get_text_config().vocab_size
    student = PredictionStudent(network, layers, list(range(vocab_size)), seed=0)
    weights = {name: value.detach() for name, value in student.trained.items()}
    manifest = {"target": str(target), "shape": SHAPE, "feature_layers": list(layers)}
    write_checkpoint(folder, network, weights, list(range(vocab_size)), manifest)
    return folder
