"""A data set that a tiny model learns in seconds: the successor of each digit."""

import random
from dataclasses import replace

from tformer_models.data import Dataset

PAD, BOS, EOS, FIRST_DIGIT = 0, 1, 2, 3


def successors(num_pairs: int = 200, max_digits: int = 6, digits: int = 5) -> Dataset:
    """Return random digits below `digits`, and the digit after each of them, modulo `digits`."""
    rng = random.Random(7)

    def draw_pairs(count):
        rows = [[FIRST_DIGIT + rng.randrange(digits) for _ in range(rng.randint(1, max_digits))] for _ in range(count)]
        return [(row, [BOS, *(FIRST_DIGIT + (i - FIRST_DIGIT + 1) % digits for i in row), EOS]) for row in rows]

    sizes = {"source_vocabulary": FIRST_DIGIT + digits, "target_vocabulary": FIRST_DIGIT + digits}
    return Dataset(train=draw_pairs(num_pairs), validation=draw_pairs(50), model_arguments=sizes)


def sizeless() -> Dataset:
    """Return a data set that does not tell the sizes of its vocabularies."""
    return replace(successors(), model_arguments={})


def no_pairs() -> Dataset:
    """Return a data set without pairs."""
    return Dataset(train=[], validation=[])


def wrong_step_input() -> Dataset:
    """Return pairs whose step input is not the step input of the model."""
    return Dataset(train=[([3], [3])], validation=[([3], [3])], step_input="input_ids")
