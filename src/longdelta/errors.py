"""What longdelta raises: messages name the argument, what it must be, what came, what to do."""


class InvalidInput(ValueError):
    """An argument is wrong: its shape, dtype, device, offsets or option."""


class UnsupportedProblem(RuntimeError):
    """No backend takes this problem, or the one asked for does not; lists each reason."""


class NotYet(NotImplementedError):
    """An argument is part of the interface, but this version does not implement it."""
