"""``python -m longdelta`` is ``longdelta``."""

from longdelta.cli.main import app

app(prog_name="longdelta")
