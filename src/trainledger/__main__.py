"""`python -m trainledger` is the same program as `trainledger`."""

from __future__ import annotations

import sys

from trainledger.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
