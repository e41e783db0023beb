"""The parity gate: the written file against the source model, or no file.

parity             the gate: ragged rows, prompt and steps, greedy tokens
draws              random requests, and the source's own answers
report             what was found
teacher_forcing    feed rows to an engine
torch_reference    run the source model
forecasts          whole forecasts; end_to_end: from raw inputs to results; speech: from sound to text
"""
