"""Bodies of requests, checked before anything is computed. A field that a schema does not have is refused by its name.

base            fields that are refused, and errors in sentences
openai_options  the fields that completions and chats share, and their options of `GenerationOptions`
completions     /v1/completions
chat            /v1/chat/completions
tools           functions that an answer may call, as constraints
generate        /v1/generate: every option of `GenerationOptions`
single_pass     /v1/classify, /v1/entities, /v1/answer, /v1/fill
embeddings      /v1/embeddings, /v1/similarity, /v1/rerank
forecast        /v1/forecast
forms           forms with a file
transcriptions  /v1/audio/transcriptions
"""
