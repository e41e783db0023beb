"""Models on many machines, by Ray: `Predictor` for `map_batches` of Ray Data."""

from tformer_runtime.distributed.predictor import Predictor

__all__ = ["Predictor"]
