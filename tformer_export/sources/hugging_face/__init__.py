"""Sources from transformers: a folder or a model in memory, with its tokenizer, processor and generation config.

folder          a folder or a model, its weights, inputs and special ids
hub             download of a folder from the Hugging Face hub
peft_adapter    adapters of PEFT, merged into their base model; pattern_worker: the process of their regular expressions
gptq_awq        weights in 4-bit integers, by GPTQ or AWQ
single_pass     single-pass models: the classes of each task and their labels
images, audio   preparation of images and recordings as their processors describe it
image_prompts   decoders that read images in their prompt; grid_images: as patches of a grid
speech_to_text  encoder-decoders that transcribe recordings in windows
"""
