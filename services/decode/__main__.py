"""`python -m services.decode`."""

import sys

from services.decode.service import serve
from shared.process import run

if __name__ == "__main__":
    sys.exit(run("decode", serve))
