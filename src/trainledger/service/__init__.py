"""One file per verb: a Request, a Response and `run`. The command line and an HTTP API are made from these."""
