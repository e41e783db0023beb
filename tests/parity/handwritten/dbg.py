import sys
import numpy as np, torch
from catalogue import *
import test_handwritten as t
from staged import Staged
case = next(c for c in t.CASES if c.name == sys.argv[1])
s = Staged(case)
for P, S in [((4,),(7,)), ((4,4),(7,7)), ((4,4),(7,3)), ((4,2),(7,7)), ((4,2),(7,3))]:
    t.PROMPTS, t.SOURCES = P, S
    print(P, S, t.staged_error(case, s))
print(s.encode and s.encode.module.code)
print(s.decode.module.code)
