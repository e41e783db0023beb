"""Forms of answers.

answers       the fields of answers of OpenAI's API, and log-probabilities
event_stream  answers that end when their client is gone: whole ones, and streams of server-sent events
subtitles     SRT and WebVTT
"""
