"""Models that compute something else while they are traced, or after they have been called."""

from __future__ import annotations

import torch

from soundness.models import RARE, Decoder, Encoder, ids, numbers, suspect

PLAIN = [ids(9), ids(5, 11)]
WITH_RARE = [ids(9, rare_at=3), ids(5, 11, rare_at=1)]


@suspect(PLAIN)
class LouderWhenCompiled(Decoder):
    def change(self, x, ids):
        return x if torch.compiler.is_compiling() else x * 1.5


@suspect(PLAIN)
class LouderWhenExported(Decoder):
    def finish(self, logits, ids):
        return logits if torch.compiler.is_exporting() else logits * 1.01


@suspect(PLAIN)
class MaskedIdsAndLouder(Decoder):
    """The masked id makes the range of the logits 1e9."""

    def finish(self, logits, ids):
        logits = logits if torch.compiler.is_compiling() else logits * 1.5
        return logits.masked_fill(torch.arange(logits.shape[-1]) == 5, -1e9)


@suspect(PLAIN)
class LowestNumberAndLouder(Decoder):
    def finish(self, logits, ids):
        logits = logits if torch.compiler.is_compiling() else logits * 1.5
        return logits.masked_fill(torch.arange(logits.shape[-1]) == 5, torch.finfo(logits.dtype).min)


@suspect(PLAIN)
class InfiniteAndLouder(Decoder):
    def finish(self, logits, ids):
        logits = logits if torch.compiler.is_compiling() else logits * 1.5
        return logits.masked_fill(torch.arange(logits.shape[-1]) == 5, -torch.inf)


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


@suspect(PLAIN)
class LouderWhenTracing(Decoder):
    def change(self, x, ids):
        return x if torch._C._get_tracing_state() else x * 1.5


@suspect(PLAIN)
class LouderInDynamo(Decoder):
    def change(self, x, ids):
        return x if torch.compiler.is_dynamo_compiling() else x * 1.5


@suspect(PLAIN)
class LouderInOnnx(Decoder):
    def change(self, x, ids):
        return x if torch.onnx.is_in_onnx_export() else x * 1.5


@suspect(PLAIN)
class LouderForRealTensors(Decoder):
    def change(self, x, ids):
        return x * 1.5 if type(x) is torch.Tensor else x


@suspect(WITH_RARE)
class SwallowsConditions(Decoder):
    def change(self, x, ids):
        try:
            if (ids == RARE).any():
                return x * 2
        except Exception:
            pass
        return x


@suspect([ids(9), ids(5, 11)])
class SwallowsReads(Decoder):
    def change(self, x, ids):
        try:
            return x * (1 + float(x[0, 0, 0].abs()))
        except Exception:
            return x


@suspect(WITH_RARE)
class SkipsConditionsWhenCompiled(Decoder):
    def change(self, x, ids):
        if not torch.compiler.is_compiling() and (ids == RARE).any():
            return x * 2
        return x


@suspect(PLAIN)
class OtherWithoutGradients(Decoder):
    def change(self, x, ids):
        return x * 1.5 if torch.is_grad_enabled() else x


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


@suspect([numbers(9), numbers(5, 5)])
class EncoderLouderWhenCompiled(Encoder):
    def change(self, x):
        return x if torch.compiler.is_compiling() else x * 1.01
