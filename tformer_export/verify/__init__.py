"""The parity gate: the written file is compared with the source model. Without it no file is written.

parity           the gate: ragged rows, prompt and steps, greedy tokens
differences      how far two results are apart
input_draws      random requests
long_row         the longest row that a single-pass model is compared on
report           the result of the gate
teacher_forcing  feed rows to an engine
torch_reference  run the source model
forecasts        whole forecasts
end_to_end       from raw inputs to results
speech           from audio to text
prompts          from texts with images to ids and pixels
golden/          requests and results, by which other runtimes prove themselves
"""
