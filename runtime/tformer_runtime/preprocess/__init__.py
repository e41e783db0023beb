"""From text, sound, pictures and tables to arrays.

inputs         one input of a model, of any kind → arrays
tokenizer      text ↔ ids, for generation; text of a stream, piece by piece
text_reader    text → ids with the place of each token, for models that read a text once
vocabulary     the bytes of each token, for constrained generation
chat_template  a conversation → a prompt
audio, images  a file or an array → features
series         columns of numbers: normalisation, windows, marks of time
csv_series     a CSV file → a series
ctc            scores of tokens at each frame → text
"""
