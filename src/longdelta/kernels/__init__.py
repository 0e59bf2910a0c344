"""Backends of the stages. Each implements the names of `stages.Backend` and nothing more."""
