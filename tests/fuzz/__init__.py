"""Fuzzing: changed files, texts and options, of which none may end in anything but a result or a sentence.

mutations     change bytes, JSON documents and protobuf messages
target        what a target is, and which outcomes are right
targets       the targets by name
models        the small files that targets change or run
files         targets: files of models, checkpoints, journals; quantised_files: graphs with derived weights
texts         targets: tokenizers, chat templates, constraints, requests, lines of a command
signals       targets: images, recordings, series
child         the process in which cases run
supervisor    starts the child, and sees crashes, hangs and growing memory from outside
guided        the same cases, led by the lines that they reach, if atheris is installed
"""
