"""Source models: networks of the zoo, fine-tuned on one domain."""

from fata.training.images import domains, images_of
from fata.training.outputs import output_files
from fata.training.recipe import Recipe, TrainingError
from fata.training.train import Epoch, train_source

__all__ = [
    "Epoch",
    "Recipe",
    "TrainingError",
    "domains",
    "images_of",
    "output_files",
    "train_source",
]
