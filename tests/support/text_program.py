"""A program of this repository that runs a text: `python -m tests.support.text_program TEXT ARGUMENT...`.

In: Python. Out: what it prints, raises or ends with. Tests look at how programs end.
"""

import sys

if __name__ == "__main__":
    exec(sys.argv[1], globals())
