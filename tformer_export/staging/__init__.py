"""The idea of this project: cut one graph into what is computed once and what each step computes.

restriction         restrict every step value to the new positions; where it cannot be, its operand is cached
plan                the cut points and their caches
regions             operations that mix positions and are positionwise as a whole
tables, rotary      values that depend on the position alone, gathered by position
encode, decode      the programs of the two stages; emitter writes them
restriction_errors  why a model cannot be stepped, with the user's own line
auxiliary_outputs, output_lengths, landmarks
"""
