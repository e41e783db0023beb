"""A task that a tiny model learns in seconds: write the digit that follows each digit."""

import random

from tformer_models.data import Dataset

PAD, BOS, EOS, FIRST = 0, 1, 2, 3


def successors(pairs: int = 200, longest: int = 6, digits: int = 5) -> Dataset:
    chance = random.Random(7)

    def draw(count):
        rows = [[FIRST + chance.randrange(digits) for _ in range(chance.randint(1, longest))] for _ in range(count)]
        return [(row, [BOS, *(FIRST + (i - FIRST + 1) % digits for i in row), EOS]) for row in rows]

    sizes = {"source_vocabulary": FIRST + digits, "target_vocabulary": FIRST + digits}
    return Dataset(train=draw(pairs), validation=draw(50), model_arguments=sizes)


def nothing() -> Dataset:
    return Dataset(train=[], validation=[])


def stepping_over_another() -> Dataset:
    return Dataset(train=[([3], [3])], validation=[([3], [3])], step="input_ids")
