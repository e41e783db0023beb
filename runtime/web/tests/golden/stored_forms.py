"""Expressions of stored forms as texts, in Python's order."""

from __future__ import annotations

from golden_file import GoldenFile
from msgspec import to_builtins

from tformer_runtime.format import stored_forms as forms


def main() -> None:
    cases, seconds = [], {forms.INT4_BLOCKS: {"codes": "c"}, forms.INT6_PLANES: {"lower": "l"}}
    for form in forms.BITS:
        for inner, block in ((64, 32), (100, 32), (64, 64), (99, 16)):
            matrix = forms.MatrixSpec(form, inner, 40, block, "w", **seconds.get(form, {}))
            expressions = [
                *(make(matrix, is_local) for make in (forms.columns_of, forms.packed_of) for is_local in (False, True)),
                forms.block_scales_of(matrix),
                forms.zero_points_of(matrix),
            ]
            cases.append(
                {
                    "matrix": to_builtins(matrix),
                    "constants": {name: list(values) for name, values in matrix.constants().items()},
                    "expressions": list(map(forms.shown, expressions)),
                }
            )
    GoldenFile().write(cases)


main()
