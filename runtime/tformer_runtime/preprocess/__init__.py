"""From text, audio, images and tables to arrays.

inputs           an input of a model, of any kind → arrays
input_line       a line of text → an input
json_schema      the numbers, strings and white space of a JSON schema
tokenizer        text ↔ ids, for generation; text of a stream, piece by piece
tokenizer_growth settings of a tokenizer with which its package fails, such as texts that grow without end
text_reader      text → ids and the offsets of each token, for single-pass models
vocabulary       the bytes of each token, for constrained generation
chat_template    a conversation → a prompt
template_worker  the process in which a chat template runs
audio, images    a file or an array → features
tiles            a large image → a grid of tiles
prompt_items     a prompt with images → its text and the images' pixels
series           columns of numbers: normalization and windows
csv_series       a CSV file → a series
ctc              scores of tokens at each frame → text
"""
