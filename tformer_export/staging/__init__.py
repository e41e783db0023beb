"""Staging: the traced graph is cut into the part that runs once for a request and the part that runs for each step.

plan                the values that are needed at all positions, and so are cached
restriction         the positions that an operation needs of its operands
layouts             positions on axes that have other rows too, or are merged with other axes
regions             operations that mix positions, and keep them apart as a whole
lookback            operations that read earlier positions outside attention
recurrence          loops over positions, decoded from the states that they carry
probe               random inputs on which operations are tested
row_by_row          operations over tables that run for each row of a batch alone
tables, rotary      values that depend on the position alone, gathered by position
encode, decode      the programs of the two stages; emitter: the part that they share
restriction_errors  messages why a model cannot be decoded step by step, with the user's own line
auxiliary_outputs   attention weights and hidden states as extra outputs
output_lengths      lengths of outputs that follow from lengths of inputs
difference_locator  where a file and its source first differ, for the parity gate's message
"""
