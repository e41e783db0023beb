"""Rewrites of the traced graph into the forms that staging knows, one module each. None changes a result.

placeholders        placeholder tokens, which rows of images replace
last_position       models that return logits for the last position only
own_first_token     a forward that replaces the first token of the step input by its own
einsum              Einstein sums as matrix products
relative_shift      products with a table of distances, shifted row by row
hidden_wraps        rotations along the positions whose first rows are overwritten
attention_patterns  softmax(scale · QKᵀ + bias) · V, in any operations
fully_masked        queries whose keys are all hidden
own_caches          caches of the user's own: attention also reads the part that is not written yet
attention_weights   weights of attention as extra outputs
padding_tests       "is this token padding?" as the answer for a valid token
selected_rows       rows that a mask selects and that are put back, as one expression of all rows; part of a trace
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from tformer_export.analysis.binding_time import Level, binding_times
from tformer_export.capture.trace import CapturedGraph, merge_equal_nodes
from tformer_export.normalise.attention_patterns import Recognition, recognise
from tformer_export.normalise.attention_weights import AttentionSelection, add_attentions, add_cross_attentions
from tformer_export.normalise.einsum import einsums_to_products
from tformer_export.normalise.fully_masked import fill_fully_masked
from tformer_export.normalise.hidden_wraps import replace_hidden_wraps
from tformer_export.normalise.last_position import keep_all_positions
from tformer_export.normalise.own_caches import keep_written_keys
from tformer_export.normalise.own_first_token import fill_first_position
from tformer_export.normalise.padding_tests import fold_padding_tests
from tformer_export.normalise.placeholders import place_by_count
from tformer_export.normalise.relative_shift import shifts_to_lookups


@dataclass(frozen=True)
class NormaliseSettings:
    """The facts and options on which the rewrites depend.

    masks: the names of the inputs that are masks of padding.
    padding: the declared id of padding that stands for nothing else; None if there is none.
    cross_attentions, attentions: see `tformer_export.options.ExtraOutputs`.
    """

    masks: Collection[str] = ()
    padding: int | None = None
    cross_attentions: AttentionSelection | None = None
    attentions: bool = False


@dataclass
class Normalised:
    """The results of the rewrites.

    counts: name of a rewrite → the number of places that it changed.
    recognition: the attentions of the graph.
    """

    counts: dict[str, int] = field(default_factory=dict)
    recognition: Recognition = field(default_factory=lambda: Recognition(0, ()))

    @property
    def gives_last(self) -> bool:
        """Return whether the source returns logits of the last position alone. The graph returns those of all."""
        return self.counts["last_position"] > 0

    @property
    def hides_padding(self) -> bool:
        """Return whether forward treats the declared padding in another way than other ids."""
        return self.counts["padding_tests"] > 0


Apply = Callable[[CapturedGraph, NormaliseSettings, Normalised], int]


@dataclass(frozen=True)
class Rewrite:
    """A rewrite of the traced graph.

    name: the key of its count.
    apply: rewrites the graph in place and returns the number of places that it changed. Its docstring defines a place.
    """

    name: str
    apply: Apply


def _graph_alone(rewrite: Callable[[CapturedGraph], int]) -> Apply:
    return lambda graph, settings, normalised: rewrite(graph)


def _recognise(graph: CapturedGraph, settings: NormaliseSettings, normalised: Normalised) -> int:
    normalised.recognition = recognise(graph)
    return normalised.recognition.count


def _fill_fully_masked(graph: CapturedGraph, settings: NormaliseSettings, normalised: Normalised) -> int:
    of_step = {node for node, level in binding_times(graph).items() if level is Level.STEP}
    return fill_fully_masked(graph, normalised.recognition.fills, of_step, settings.masks)


def _add_weights(graph: CapturedGraph, settings: NormaliseSettings, normalised: Normalised) -> int:
    """Add the extra outputs of weights of attention that were asked for, and return their number."""
    count = 0
    if settings.cross_attentions is not None and settings.cross_attentions is not False:
        add_cross_attentions(graph, settings.cross_attentions)
        count += 1
    if settings.attentions:
        add_attentions(graph)
        count += 1
    return count


FORMS = (  # in their order
    Rewrite("placeholders", _graph_alone(place_by_count)),
    Rewrite("last_position", _graph_alone(keep_all_positions)),
    Rewrite("own_first_token", _graph_alone(fill_first_position)),
    Rewrite("einsum", _graph_alone(einsums_to_products)),  # of scores too
    Rewrite("relative_shift", _graph_alone(shifts_to_lookups)),
    Rewrite("hidden_wraps", _graph_alone(replace_hidden_wraps)),
    Rewrite("attention_patterns", _recognise),
    # The next three read and change recognised attentions.
    Rewrite("fully_masked", _fill_fully_masked),
    Rewrite("own_caches", _graph_alone(keep_written_keys)),
    Rewrite("attention_weights", _add_weights),
)
FOLDS = (  # after the facts of inputs, which follow from the tests of padding
    Rewrite("padding_tests", lambda graph, settings, normalised: fold_padding_tests(graph, settings.padding)),
    Rewrite("equal_nodes", _graph_alone(merge_equal_nodes)),  # of tests that are folded, for example
)


NORMALISE = (*FORMS, *FOLDS)


def normalise(
    graph: CapturedGraph,
    settings: NormaliseSettings,
    rewrites: Sequence[Rewrite] = NORMALISE,
    normalised: Normalised | None = None,
) -> Normalised:
    """Run rewrites in their order, in place, and add their results. Each leaves a graph that torch.fx accepts.

    Raises OptionError for extra outputs that the model does not have.
    """
    normalised = normalised or Normalised()
    for rewrite in rewrites:
        normalised.counts[rewrite.name] = int(rewrite.apply(graph, settings, normalised))
        graph.graph.lint()
    return normalised
