"""How compiled kernels are launched: what the last call launched, and a way to launch afresh."""

from longdelta.runtime.launch import Launch, forget_records, fresh, records

__all__ = ["Launch", "forget_records", "fresh", "records"]
