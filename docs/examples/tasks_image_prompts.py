"""Save a small LLaVA with seeded random weights and its processor, and an image: tasks_image_prompts.py FOLDER."""

import sys

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models

transformers.logging.disable_progress_bar()
torch.manual_seed(0)
special = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
vocabulary = {token: i for i, token in enumerate([*special, *"abcdefghijklmnopqrstuvwxyz:.? \n"])}
bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
bpe.decoder = decoders.Fuse()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
    extra_special_tokens={"image_token": "<image>"},
)  # fmt: skip
template = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}{{ '\n' }}{% endfor %}assistant: "
)
processor = transformers.LlavaProcessor(
    image_processor=transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    ),
    tokenizer=tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
    chat_template=template,
)  # fmt: skip
vision = transformers.CLIPVisionConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
)
text = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=len(vocabulary),
    max_position_embeddings=256,
)  # fmt: skip
model = transformers.LlavaForConditionalGeneration(
    transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=4)
)
for weight in model.parameters():
    if weight.dim() > 1:  # large enough that images change what is generated
        torch.nn.init.normal_(weight, std=0.2)
model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
model.save_pretrained(sys.argv[1])
processor.save_pretrained(sys.argv[1])
Image.radial_gradient("L").convert("RGB").save("sun.png")
Image.linear_gradient("L").convert("RGB").save("sky.png")
