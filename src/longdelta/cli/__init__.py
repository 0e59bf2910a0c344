"""The command line: ``longdelta demo``, ``longdelta plan``, ``longdelta doctor``."""
