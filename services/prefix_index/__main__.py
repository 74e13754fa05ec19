"""`python -m services.prefix_index`."""

import sys

from services.prefix_index.service import serve
from shared.process import run

if __name__ == "__main__":
    sys.exit(run("prefix_index", serve))
