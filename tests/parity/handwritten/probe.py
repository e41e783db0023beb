import sys, time, traceback, importlib
import numpy as np, torch
torch.set_num_threads(1)
from catalogue import *
from staged import Staged
from test_handwritten import CASES, staged_error
names = sys.argv[1:]
verbose = "-v" in names
names = [n for n in names if n != "-v"]
ok = bad = 0
for case in CASES:
    if names and not any(n in case.name for n in names): continue
    t = time.time()
    try:
        s = Staged(case)
        e = staged_error(case, s)
        flag = "ok  " if e < 1e-5 else "DIFF"
        print(f"{flag} {case.name:45s} {e:.1e} {s.found} {time.time()-t:.1f}s", flush=True)
    except Exception as error:
        print(f"FAIL {case.name:45s} {type(error).__name__}: {str(error)[:600]} {time.time()-t:.1f}s", flush=True)
        if verbose: traceback.print_exc()
