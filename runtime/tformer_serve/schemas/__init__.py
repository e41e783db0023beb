"""Bodies of requests, checked before anything is computed. A field that a schema does not have is refused by its name.

base            fields that are refused, and errors in sentences
openai_options  the fields that completions and chats share, and their options of `GenerationOptions`
completions     /v1/completions
chat            /v1/chat/completions
tools           functions that an answer may call, as constraints
generate        /v1/generate: every option of `GenerationOptions`
"""
