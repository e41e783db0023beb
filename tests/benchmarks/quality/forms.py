"""What is measured: the shape of the model, and the forms of its weights in the files of each engine.

This module needs the standard library only: engines in other environments import it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from versus.client import Peer
from versus.shapes import Shape

# llama.cpp's blocks of 256 need rows of multiples of 256.
SHAPE = Shape("quality", "continue", 4096, 256, 4, 6, 768, 256, gated=True)
TEXT = "text"  # the folder of the corpus
CALIBRATION = "calibration.jsonl"  # in it, a window of ids in each line
CALIBRATED = " calibrated"  # the end of a form's name
OURS = Peer("tformer", "quality.ours")
LLAMA = Peer("llama.cpp", "quality.llama", ".venv-llama")


@dataclass(frozen=True)
class Form:
    """A file of an engine. name: "int8 calibrated", "Q4_0", …; the form of the weights and whether data fit them.

    A mixture has its budget in its name, as `max_degradation` has it, or its bits: "mixed 1.01x calibrated",
    "mixed 4.96 bits".
    """

    peer: Peer
    name: str

    @property
    def label(self) -> str:
        return f"{self.peer.name} {self.name}"


WHOLE = (Form(OURS, "fp32"), Form(LLAMA, "F32"))
FORMS = (
    *WHOLE,
    Form(OURS, "int8"),
    Form(LLAMA, "Q8_0"),
    Form(LLAMA, "Q6_K"),
    Form(LLAMA, "Q5_K_M"),
    Form(OURS, "mixed 3% calibrated"),
    Form(OURS, "mixed 1.01x calibrated"),
    Form(OURS, "mixed 5.2 bits"),
    Form(OURS, "mixed 5.2 bits calibrated"),
    Form(OURS, "mixed 4.96 bits"),  # as Q4_K_M
    Form(OURS, "mixed 4.96 bits calibrated"),
    Form(OURS, "int4"),
    Form(OURS, "int4 calibrated"),
    Form(LLAMA, "Q4_K_M"),
    Form(LLAMA, "Q4_K_M calibrated"),
    Form(LLAMA, "Q4_0"),
    Form(LLAMA, "Q4_0 calibrated"),
)


def is_calibrated(name: str) -> bool:
    return name.endswith(CALIBRATED)


def weights_of(name: str) -> str:
    """Return the form of the weights."""
    return name.removesuffix(CALIBRATED)
