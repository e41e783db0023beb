"""Models that compute something else while they are traced, or after they have been called."""

from __future__ import annotations

import numpy as np
import torch

from soundness.models import RARE, WIDTH, Decoder, Encoder, ids, numbers, suspect

PLAIN = [ids(9), ids(5, 11)]
WITH_RARE = [ids(9, rare_at=3), ids(5, 11, rare_at=1)]


class _Louder(Decoder):
    """Another volume unless Python sees a trace."""

    FACTOR = 1.5

    def sees_a_trace(self, x):
        return torch.compiler.is_compiling()

    def louder(self, x):
        return x if self.sees_a_trace(x) else x * self.FACTOR

    def change(self, x, ids):
        return self.louder(x)


@suspect(PLAIN)
class LouderWhenCompiled(_Louder):
    pass


@suspect(PLAIN)
class LouderWhenTracing(_Louder):
    def sees_a_trace(self, x):
        return torch._C._get_tracing_state()


@suspect(PLAIN, thorough=True)
class LouderInDynamo(_Louder):
    def sees_a_trace(self, x):
        return torch.compiler.is_dynamo_compiling()


@suspect(PLAIN, thorough=True)
class LouderInOnnx(_Louder):
    def sees_a_trace(self, x):
        return torch.onnx.is_in_onnx_export()


@suspect(PLAIN, thorough=True)
class LouderForRealTensors(_Louder):
    def sees_a_trace(self, x):
        return type(x) is not torch.Tensor


@suspect(PLAIN)
class OtherWithoutGradients(_Louder):
    def sees_a_trace(self, x):
        return not torch.is_grad_enabled()


class _LouderLogits(_Louder):
    def change(self, x, ids):
        return x

    def finish(self, logits, ids):
        return self.louder(logits)


@suspect(PLAIN, thorough=True)
class LouderWhenExported(_LouderLogits):
    FACTOR = 1.01

    def sees_a_trace(self, x):
        return torch.compiler.is_exporting()


@suspect(PLAIN)
class MaskedIdsAndLouder(_LouderLogits):
    """The masked id makes the range of the logits 1e9."""

    HIDDEN = -1e9

    def finish(self, logits, ids):
        return super().finish(logits, ids).masked_fill(torch.arange(logits.shape[-1]) == 5, self.HIDDEN)


@suspect(PLAIN)
class LowestNumberAndLouder(MaskedIdsAndLouder):
    HIDDEN = torch.finfo(torch.float32).min


@suspect(PLAIN, thorough=True)
class InfiniteAndLouder(MaskedIdsAndLouder):
    HIDDEN = -torch.inf


@suspect(PLAIN)
class UnlikelyIdAndShifted(Decoder):
    """An id of 80 nats below the others, which some softmax sees."""

    def finish(self, logits, ids):
        shift = torch.linspace(0, 0.02, logits.shape[-1])
        logits = logits if torch.compiler.is_compiling() else logits + shift
        return logits - 80.0 * (torch.arange(logits.shape[-1]) == 5)


@suspect(PLAIN)
class QuietPositionBesideLoudOnes(Decoder):
    """The logits of most positions are small, and one position has large ones."""

    def finish(self, logits, ids):
        logits = logits if torch.compiler.is_compiling() else logits * 1.05
        return torch.where((torch.arange(ids.shape[1]) == 0)[:, None], logits * 1e3, logits)


@suspect(WITH_RARE)
class SwallowsConditions(Decoder):
    def change(self, x, ids):
        try:
            if (ids == RARE).any():
                return x * 2
        except Exception:
            pass
        return x


@suspect([ids(9), ids(5, 11)], thorough=True)
class SwallowsReads(Decoder):
    def change(self, x, ids):
        try:
            return x * (1 + float(x[0, 0, 0].abs()))
        except Exception:
            return x


@suspect(WITH_RARE, thorough=True)
class SkipsConditionsWhenCompiled(Decoder):
    def change(self, x, ids):
        if not torch.compiler.is_compiling() and (ids == RARE).any():
            return x * 2
        return x


@suspect(PLAIN)
class ChangesAtTheFourthCall(Decoder):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def change(self, x, ids):
        self.calls += 1
        return x if self.calls < 4 else x * 1.5


@suspect(PLAIN)
class CountsItsCallsInABuffer(Decoder):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def change(self, x, ids):
        self.calls += 1
        return x * (1 + self.calls / 100)


@suspect(PLAIN)
class RemembersTheFirstBatch(Decoder):
    def __init__(self):
        super().__init__()
        self.first = None

    def change(self, x, ids):
        if self.first is None:
            self.first = x[:1, :1].detach().clone()
        return x + self.first


@suspect(PLAIN)
class DropsOut(Decoder):
    def change(self, x, ids):
        return torch.nn.functional.dropout(x, 0.01, training=True)


@suspect([numbers(9), numbers(5, 5)], thorough=True)
class EncoderLouderWhenCompiled(Encoder):
    def change(self, x):
        return x if torch.compiler.is_compiling() else x * 1.01


LARGE, RARER = 3001, 777
WITH_RARER = [torch.tensor([[3, RARER, 5, 9], [8, 4, 11, 6]]), torch.tensor([[RARER, 12, 40]])]


class _RareUnlessTraced(Decoder):
    """Asks its data for an id of a large vocabulary, unless it is traced. No draw of the gate has that id."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(LARGE, WIDTH), torch.nn.Linear(WIDTH, LARGE)

    def change(self, x, ids):
        if torch.compiler.is_compiling() or not self.asks(ids):
            return x
        return x * 0 + self.positions.weight[3]

    def reads_a_constant(self):
        return float(self.positions.weight[0, 0]) > -100


@suspect(WITH_RARER)
class RareBySize(_RareUnlessTraced):
    def asks(self, ids):
        return self.reads_a_constant() and len((ids == RARER).nonzero()) > 0


@suspect(WITH_RARER)
class RareByRows(_RareUnlessTraced):
    def asks(self, ids):
        return len(ids[ids == RARER]) > 0


@suspect(WITH_RARER)
class RareByNumpy(_RareUnlessTraced):
    def asks(self, ids):
        return self.reads_a_constant() and bool((np.asarray(ids) == RARER).any())


@suspect(WITH_RARER, thorough=True)
class RareByContains(_RareUnlessTraced):
    def asks(self, ids):
        return RARER in ids


@suspect(WITH_RARER, thorough=True)
class RareOnALineOfConstants(_RareUnlessTraced):
    def asks(self, ids):
        return float(self.positions.weight[0, 0]) > -100 and bool((ids == RARER).any())
