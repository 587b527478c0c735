from contextlib import contextmanager
from contextvars import ContextVar

from captum_vz._engine import OtherMixing

_noting: ContextVar[OtherMixing | None] = ContextVar("captum_vz_gaps", default=None)
@contextmanager
def noting_other_mixing():
    gaps = OtherMixing()
    token = _noting.set(gaps)
    try:
        yield gaps
    finally:
        _noting.reset(token)
