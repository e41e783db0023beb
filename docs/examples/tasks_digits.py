"""Train a small ViT on scikit-learn's handwritten digits and save digits/; write the other images into images/.

images/N-I.png is image I of the data set, an N. seen.txt names 200 images of the training side, unseen.txt the
images that the model was not trained on.
"""

from pathlib import Path

import torch
import transformers
from PIL import Image
from sklearn.datasets import load_digits

SEEN = 1500  # of 1,797 images of 8 × 8 pixels

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.manual_seed(1)
torch.set_num_threads(1)
data = load_digits()
images = [Image.fromarray((digit * 255 / 16).astype("uint8")).resize((32, 32)) for digit in data.images]
labels = torch.from_numpy(data.target).long()

processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
pixels = processor([image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]
config = transformers.ViTConfig(
    image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
    num_labels=10, id2label={i: str(i) for i in range(10)}, label2id={str(i): i for i in range(10)},
)  # fmt: skip
model = transformers.ViTForImageClassification(config).train()
steps = 700
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
for _ in range(steps):
    rows = torch.randint(SEEN, (64,))
    shifted = torch.roll(pixels[rows], torch.randint(-2, 3, (2,)).tolist(), (2, 3))
    loss = model(pixel_values=shifted, labels=labels[rows]).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    rate.step()
model.eval().save_pretrained("digits")
processor.save_pretrained("digits")

Path("images").mkdir(exist_ok=True)
names = [f"images/{label}-{i}.png" for i, label in enumerate(data.target)]
for i, (name, image) in enumerate(zip(names, images, strict=True)):
    if i < 200 or i >= SEEN:
        image.save(name)
Path("seen.txt").write_text("\n".join(names[:200]) + "\n")
Path("unseen.txt").write_text("\n".join(names[SEEN:]) + "\n")
with torch.no_grad():
    right = (model(pixels[SEEN:]).logits.argmax(-1) == labels[SEEN:]).sum().item()
print(f"digits/: {right} of {len(names) - SEEN} unseen images are read right")
