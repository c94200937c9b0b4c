"""The repository's commands: ``python3 -m ci demo | test | lint | bench | wheels``."""
