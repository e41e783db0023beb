"""Models whose Python code asks for single values of the data, which drawn data hardly ever have."""

from __future__ import annotations

import json

import torch

from soundness.models import RARE, Decoder, ids, suspect

FIRST, LAST, INSIDE = (ids(9, rare_at=place) for place in (0, 8, 4))
ROWS = [FIRST, LAST, INSIDE]
SPECIAL_IDS = {RARE, RARE + 1}


class _Louder(Decoder):
    """Twice as loud if a condition on the ids holds."""

    def asks(self, ids):
        raise NotImplementedError

    def change(self, x, ids):
        return x * 2 if self.asks(ids) else x


@suspect(ROWS)
class AsksTheFirst(_Louder):
    def asks(self, ids):
        return ids[0, 0].item() == RARE


@suspect(ROWS, thorough=True)
class AsksWhetherTheLastIsAnother(_Louder):
    def asks(self, ids):
        return ids[0, -1].item() != RARE


@suspect(ROWS, thorough=True)
class AsksTheFirstByInt(_Louder):
    def asks(self, ids):
        return int(ids[0, 0]) == RARE


@suspect(ROWS, thorough=True)
class AsksTheGreatest(_Louder):
    def asks(self, ids):
        return ids.max().item() >= RARE


@suspect(ROWS)
class LooksForAnId(_Louder):
    def asks(self, ids):
        return RARE in ids[0].tolist()


@suspect(ROWS)
class LooksForAnIdInALoop(_Louder):
    def asks(self, ids):
        return any(value == RARE for value in ids[0].tolist())


@suspect(ROWS, thorough=True)
class LooksForAnIdInASet(_Louder):
    def asks(self, ids):
        return any(value in SPECIAL_IDS for value in ids[0].tolist())


@suspect(ROWS)
class LooksForAnOffset(_Louder):
    def asks(self, ids):
        return ids[0, 4].item() - 40 == RARE - 40


@suspect(ROWS)
class FindsAPlace(Decoder):
    """The place of an id, or an error that is caught."""

    def change(self, x, ids):
        try:
            ids[0].tolist().index(RARE)
        except ValueError:
            return x
        return x.roll(1, -1)


@suspect(ROWS, thorough=True)
class FindsAPlaceAmongInts(Decoder):
    def finish(self, logits, ids):
        try:
            [int(value) for value in ids[0]].index(RARE)
        except ValueError:
            return logits
        return logits.flip(-1)


@suspect(ROWS)
class Segments(Decoder):
    """Types of tokens: 0 up to a separator, and 1 behind it."""

    def change(self, x, ids):
        values = ids[0].tolist()
        end = values.index(RARE) + 1 if RARE in values else len(values)
        return x + self.tokens(torch.tensor([0] * end + [1] * (len(values) - end)))


@suspect(ROWS)
class CountsByPython(Decoder):
    def change(self, x, ids):
        return x * (1 + ids[0].tolist().count(RARE))


TEXTS = {str(RARE): True}


@suspect(ROWS)
class ComparesText(_Louder):
    def asks(self, ids):
        return f"{ids[0, 0].item()}" == "47"


@suspect(ROWS, thorough=True)
class LooksUpText(_Louder):
    def asks(self, ids):
        return TEXTS.get(str(int(ids[0, 0])), False)


@suspect(ROWS, thorough=True)
class LooksUpRepresentation(_Louder):
    def asks(self, ids):
        return {"47": True}.get(repr(ids[0, -1].item()), False)


@suspect(ROWS, thorough=True)
class ComparesFormatted(_Louder):
    def asks(self, ids):
        return format(ids[0, 0].item(), "03d") == "047"


@suspect(ROWS, thorough=True)
class ComparesHexadecimal(_Louder):
    def asks(self, ids):
        return hex(ids[0, 0].item()) == "0x2f"


@suspect(ROWS, thorough=True)
class FindsTextOfAList(_Louder):
    def asks(self, ids):
        return "47" in str(ids[0].tolist())


@suspect(ROWS, thorough=True)
class FindsJoinedText(_Louder):
    def asks(self, ids):
        return "47" in " ".join(map(str, ids[0].tolist()))


@suspect(ROWS, thorough=True)
class FormatsATensor(_Louder):
    def asks(self, ids):
        return f"{ids[0, 0]}" == "47"


@suspect(ROWS, thorough=True)
class FindsTextOfATensor(_Louder):
    def asks(self, ids):
        return "47" in str(ids)


@suspect(ROWS, thorough=True)
class FindsRepresentationOfATensor(_Louder):
    def asks(self, ids):
        return "47" in repr(ids[0, :4])


@suspect(ROWS, thorough=True)
class ComparesACharacter(_Louder):
    def asks(self, ids):
        return chr(ids[0, 0].item()) == "/"


@suspect(ROWS, thorough=True)
class ComparesACharacterOfAList(_Louder):
    def asks(self, ids):
        return "/" in "".join(chr(i) for i in ids[0].tolist())


@suspect(ROWS, thorough=True)
class ComparesBytes(_Louder):
    def asks(self, ids):
        return b"/" in bytes(ids[0].tolist())


@suspect(ROWS, thorough=True)
class ReadsJson(_Louder):
    def asks(self, ids):
        return "47" in json.dumps(ids[0].tolist())


@suspect(ROWS, thorough=True)
class ComparesTextOfASum(_Louder):
    """No single number is the one of the text."""

    def asks(self, ids):
        return str(ids[0, 0].item() + 53) == "100"


@suspect(ROWS, thorough=True)
class EndsOfText(_Louder):
    def asks(self, ids):
        return str(ids[0, 0].item()).endswith("47")


@suspect(ROWS, thorough=True)
class ComparesTextOfAFloat(_Louder):
    def asks(self, ids):
        return f"{ids[0, 0].float().item():.1f}" == "47.0"


@suspect(ROWS)
class TextsOfAnArray(_Louder):
    def asks(self, ids):
        return "47" in str(ids.numpy())


@suspect(ROWS, thorough=True)
class BytesOfAnArray(_Louder):
    def asks(self, ids):
        return bytes([RARE, 0, 0, 0, 0, 0, 0, 0]) in ids.numpy().tobytes()
