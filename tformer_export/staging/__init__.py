"""The idea of this project: cut one graph into what is computed once and what each step computes.

plan                which values are asked for at which positions; what is asked for at all of them is cached
restriction         what an operation needs of its operands, to give the new positions alone
regions             operations that mix positions and are positionwise as a whole
tables, rotary      values that depend on the position alone, gathered by position
encode, decode      the programs of the two stages; emitter writes them
restriction_errors  why a model cannot be stepped, with the user's own line
auxiliary_outputs   attention and hidden states that a file gives besides
output_lengths      lengths of outputs that follow from those of inputs
landmarks           where a file and its source first differ, for the parity gate's message
"""
