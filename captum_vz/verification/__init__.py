"""Compare the maps of a user's own model with the definition of Value Zeroing, and report what was found."""

from captum_vz.verification.checks import Check, VerificationReport
from captum_vz.verification.verify import verify

__all__ = ["Check", "VerificationReport", "verify"]
