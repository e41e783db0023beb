"""Print the English messages of Django that are longer than 25 letters, one a line."""

import gettext
import random
import re
from pathlib import Path

import django

texts: set[str] = set()
for path in sorted(Path(django.__file__).parent.rglob("locale/de/LC_MESSAGES/django.mo")):
    with path.open("rb") as file:
        keys = gettext.GNUTranslations(file)._catalog
    texts |= {re.sub(r"%\(\w+\)\w|%\w|<[^>]*>|[“”\"]", "", key) for key in keys if isinstance(key, str)}
sentences = sorted({" ".join(text.split()) for text in texts if len(text) > 25 and " " in text and "\x04" not in text})
random.Random(1).shuffle(sentences)
print(*sentences, sep="\n")
