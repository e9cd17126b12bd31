"""The command line: flags are read into a Request, the verb runs, its Response is shown."""
